"""What `foveal plan` says beside what was measured: every committed result that it can be compared with.

    python3 benchmarks/plan_vs_measured.py

Reads `train_engine_*.json` (passes, and peaks of `--memory`), `train_N_gpus_*.json`, `cuda_smoke_*.json`,
`vllm_rollout_*.json` and `many_gpus_*.json` in `benchmarks/results`, plans the configuration that each was measured
with, and writes `plan_vs_measured.md` there. Peaks are `torch.cuda.max_memory_allocated` in GiB; vLLM's are what the
device had in use.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import cuda_smoke, train_engine
from benchmarks.real_size import build_model
from foveal.cluster.room import BESIDE_SHARE, KEPT_FREE
from foveal.config import Config, load_config
from foveal.plan.command import Plan, make_plan
from foveal.plan.gpus import find_gpu
from foveal.plan.rows import Lengths

RESULTS = Path(__file__).resolve().parent / "results"
GIB = 2**30
VISUAL = {"3B": 384, "7B": 384, "4B": 294, "30B-A3B": 294}
"""Visual tokens of a 448×672 picture."""


@dataclass(frozen=True)
class Row:
    """A comparison: `unit` is "GiB", "s", or "too large" for what ran out of memory, beside the device's GiB."""

    file: str
    name: str
    what: str
    measured: float
    planned: float
    unit: str = "GiB"

    @property
    def off(self) -> float:
        return self.planned / self.measured - 1


def comparisons(results: Path = RESULTS) -> list[Row]:
    """All rows, in the order of the files."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for path in sorted([*results.glob("train_engine_*.json"), *results.glob("train_*_gpus_*.json")]):
            rows += _engine(path, root)
        for path in sorted(results.glob("cuda_smoke_*.json")):
            rows += _smoke(path, root)
        for path in sorted(results.glob("vllm_rollout_*.json")):
            rows += _rollout(path, root)
        for path in sorted(results.glob("many_gpus_*.json")):
            rows += _several(path, root)
    return rows


def _engine(path: Path, root: Path) -> Iterator[Row]:
    result = json.loads(path.read_text())
    options = _options(result["command"], groups=128, steps=4, prompt=560, tokens=512, moe=None, token_budget="auto")
    options.tiny = False
    several = re.match(r"train_(\d+)_gpus_", path.stem)
    size = path.stem.removeprefix(several[0] if several else "train_engine_").partition("_")[0]
    if several:
        options.set = [f"trainer.n_gpus_per_node={several[1]}", *_gathering(result), *options.set]
    layers = re.search(r"_(\d+)_layers", path.stem)
    folder = _model(root, size, int(layers[1]) if layers else None)
    lengths = {"prompt": int(result["prompt_tokens"]), "visual": VISUAL[size]}
    for key, found in result.items():
        if not isinstance(found, dict) or key == "versions":
            continue
        memory = key.startswith("memory ")
        mode, _, answers = key.removeprefix("memory ").partition(" ")
        offload = mode.endswith("+offload")
        parsed = train_engine.Mode.parse(mode.removesuffix("+offload"))
        config = train_engine.settings(options, parsed, answers or "equal", folder.parent)
        alone = memory or "error" in found or not parsed.shared  # a single optimizer step
        groups = options.groups // options.steps if alone else int(found["groups"])
        config.data.rollout_batch_size = groups
        config.worker.actor.global_batch_size = options.groups // options.steps
        config.worker.actor.model.model_path = str(folder)
        keys = config.worker.actor.offload
        keys.offload_params = keys.offload_optimizer = offload
        given = options.token_budget
        budget = int(given) if given != "auto" else train_engine.MEMORY_BUDGET if memory else 0
        if "error" in found:
            yield _too_large(path.name, key, _plan(config, budget or None, lengths, answer=options.tokens))
            continue
        if found.get("began_again"):  # the peak is of passes that ran out of memory
            continue
        if memory:
            budgets = {
                "old": int(found.get("logprobs_budget", budget)),
                "update_actor": int(found.get("update_budget", budget)),
            }
            peaks = {phase: found[f"peak_{phase}"] for phase in budgets if f"peak_{phase}" in found}
            config.worker.rollout.name = "vllm"  # with its own weights, as far as offloading goes
            plan = _plan(config, budgets["old"], lengths)
            if found["in_rollout"] > 1:  # offloaded, next to nothing stays
                yield Row(path.name, key, "gen", found["in_rollout"], _peak(plan, "gen"))
        else:
            budgets = {"old": int(found["logprobs_budget"]), "update_actor": int(found["update_budget"])}
            measured_peaks = {phase: f"perf/peak_memory_gb/{phase}" for phase in budgets}
            peaks = {phase: found[name] for phase, name in measured_peaks.items() if name in found}
        for phase, measured in peaks.items():
            config.algorithm.old_logprobs = "recompute"
            plan = _plan(config, budgets[phase], lengths, answer=options.tokens)
            yield Row(path.name, key, phase, measured, _peak(plan, phase))
            if f"seconds/{phase}" in found:
                yield Row(path.name, key, phase, found[f"seconds/{phase}"], plan.seconds.phases[phase], "s")


def _smoke(path: Path, root: Path) -> Iterator[Row]:
    """Runs of `foveal train`. Those that have no peak of each phase were before layers were compiled, and their budgets
    were EasyR1's."""
    result = json.loads(path.read_text())
    options = _options(result["command"], prompts=16, response=128, layers=None, steps=2)
    folder = _model(root, "3B", vision_layers=options.layers)
    rest = [word for word in result["command"].split() if "=" in word and not word.startswith("-")]
    options.overrides = rest
    config = load_config(cuda_smoke.settings(root, folder, root / "rows.jsonl", options))
    config.worker.rollout.name = "transformers"
    tokens = [round(entry["prompt_length"]["mean"]) for entry in result["log"]]
    last = result["log"][-1]["perf"]
    if "peak_memory_gb" not in last:
        config.worker.actor.use_torch_compile = False
        config.worker.actor.token_budget = "easyr1"
    plan = _plan(config, None, {"prompt": tokens[-1], "visual": VISUAL["3B"]}, answer=options.response)
    peak = max(phase.of_torch for phase in plan.memory.phases if phase.name != "gen") / GIB
    yield Row(path.name, "two steps", "the run", last["max_memory_allocated_gb"], peak)


def _rollout(path: Path, root: Path) -> Iterator[Row]:
    result = json.loads(path.read_text())
    size = path.stem.removeprefix("vllm_rollout_")
    given = result["settings"]
    config = load_config(
        [
            f"worker.actor.model.model_path={_model(root, size)}",
            "data.max_prompt_length=1024",
            "data.max_response_length=512",
            "data.rollout_batch_size=256",
            "worker.actor.global_batch_size=256",
            "worker.rollout.name=vllm",
            "worker.rollout.n=5",
            "trainer.n_gpus_per_node=1",
            f"worker.rollout.gpu_memory_utilization={given['gpu_memory_utilization']}",
            f"worker.rollout.max_num_batched_tokens={given['max_num_batched_tokens']}",
        ]
    )
    plan = _plan(config, None, {"prompt": 560, "visual": VISUAL[size]}, answer=512)
    assert plan.memory.engine is not None
    yield Row(path.name, "awake", "engine", result["engine_gib"], (plan.memory.engine.share + BESIDE_SHARE) / GIB)
    seconds = result.get("rollout_2", result["rollout_1"])["generate_seconds"]
    yield Row(path.name, "256 prompts × 5", "gen", seconds, plan.seconds.phases["gen"], "s")


def _several(path: Path, root: Path) -> Iterator[Row]:
    """Whole steps: the highest peak of each phase, and the median of its seconds, after the warm-up."""
    result = json.loads(path.read_text())
    size = result["model"]
    lengths = {"prompt": int(result["prompt_tokens"]), "visual": VISUAL[size]}
    for name, side in result["sides"].items():
        if side.get("failure") or not side["medians"]:
            continue
        smoke = argparse.Namespace(prompts=side["prompts"], response=result["response_tokens"], layers=None, steps=4)
        smoke.overrides, smoke.pixels = [], (672, 448)
        config = load_config(
            [
                *cuda_smoke.settings(root, _model(root, size), root / "rows.jsonl", smoke),
                "algorithm.use_kl_loss=false",
                "algorithm.disable_kl=true",
                f"worker.actor.global_batch_size={round(side['prompts'] / side['optimizer_steps'])}",
                "worker.actor.fsdp.torch_dtype=bf16",
                "worker.actor.optim.strategy=adamw_bf16",
                "worker.rollout.name=vllm",
                "worker.rollout.tensor_parallel_size=1",
                f"worker.rollout.n={result['n']}",
                *_gathering(result),
                *result["settings"],
                *side["settings"],
            ]
        )
        plan = _plan(config, None, lengths, answer=result["response_tokens"])
        steps = side["steps"][result["warm_up"] :]
        for phase in plan.memory.phases:
            peaks = [step[f"perf/peak_memory_gb/{phase.name}"] for step in side["steps"][1:] if _has(step, phase.name)]
            if peaks and phase.name != "gen":
                yield Row(path.name, name, phase.name, max(peaks), phase.of_torch / GIB)
        seconds = dict(plan.seconds.phases)
        if not plan.seconds.ahead:  # engines take the weights when they are asked for answers
            seconds["gen"] += seconds["hand over"]
        for phase_name, planned in seconds.items():
            if steps and all(f"timing_s/{phase_name}" in step for step in steps):
                yield Row(path.name, name, phase_name, side["medians"][phase_name], planned, "s")
        yield Row(path.name, name, "step", side["medians"]["step"], plan.seconds.step, "s")


def _gathering(result: dict[str, Any]) -> list[str]:
    """`gather_weights` says how records that are older than the setting did it."""
    return [f"worker.actor.fsdp.gather_weights={result['gather_weights']}"] if "gather_weights" in result else []


def _has(step: dict[str, float], phase: str) -> bool:
    return f"perf/peak_memory_gb/{phase}" in step


def _too_large(file: str, name: str, plan: Plan) -> Row:
    peak = max((phase for phase in plan.memory.phases if phase.name != "gen"), key=lambda phase: phase.of_torch)
    return Row(file, name, peak.name, plan.gpu.gib, peak.of_torch / GIB, "too large")


def _plan(config: Config, budget: int | None, lengths: dict[str, int], answer: int | None = None) -> Plan:
    if budget is not None:
        config = config.model_copy(deep=True)
        config.worker.actor.token_budget = budget
    return make_plan(config, find_gpu("h200-141"), Lengths.of(config, True, answer=answer, **lengths), cures=False)


def _peak(plan: Plan, phase: str) -> float:
    return next(found.of_torch for found in plan.memory.phases if found.name == phase) / GIB


@lru_cache
def _model(root: Path, size: str, layers: int | None = None, vision_layers: int | None = None) -> Path:
    """A folder of a published size; `layers` as of `train_engine.py --moe`, `vision_layers` as of `build_model`."""
    from transformers import AutoConfig

    folder = build_model(root / f"{size}-{layers}-{vision_layers}" / "model", size, layers=vision_layers, weights=False)
    if layers is not None:
        config = AutoConfig.from_pretrained(folder)
        config.text_config.num_hidden_layers = layers
        config.save_pretrained(folder)
    return folder


def _options(command: str, **defaults: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, default in defaults.items():
        kind = int if isinstance(default, int) or default is None else str
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    parser.add_argument("--set", nargs="+", action="extend", default=[])
    parser.add_argument("--pixels", type=int, nargs=2)
    known, _ = parser.parse_known_args(command.split()[1:])
    return known


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "# `foveal plan` and what was measured",
        "",
        "H200, one of them where nothing else is said. Written by [plan_vs_measured.py](../plan_vs_measured.py) from "
        "the figures beside it. Peaks are "
        "those of `torch.cuda.max_memory_allocated`, vLLM's what the device had in use. The rates behind the times "
        "come from these very figures; of the memory, what vLLM keeps asleep does.",
        "",
    ]
    titles = {"GiB": "## Memory (GiB)", "s": "## Time (seconds)", "too large": "## Out of memory (GiB)"}
    for unit, title in titles.items():
        found = [row for row in rows if row.unit == unit]
        if not found:
            continue
        worst = max(abs(row.off) for row in found)
        lines += [
            title,
            "",
            f"| figures | configuration | phase | {'there' if unit == 'too large' else 'measured'} | planned | off |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| [{row.file}]({row.file}) | {row.name} | {row.what} | {row.measured:.1f} | {row.planned:.1f} "
            f"| {row.off:+.1%} |"
            for row in found
        ]
        told = sum(row.off > -KEPT_FREE for row in found)
        counted = f"{len(found)} comparisons, at most {worst:.1%} off."
        lines += ["", counted if unit != "too large" else f"{told} of {len(found)} are told beforehand.", ""]
    return "\n".join(lines)


def main() -> None:
    rows = comparisons()
    text = table(rows)
    (RESULTS / "plan_vs_measured.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
