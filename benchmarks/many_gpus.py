"""Whole steps of `foveal train` in several set-ups of one host's GPUs, at real sizes with random weights.

    python3 benchmarks/many_gpus.py --model 3B --network --side one trainer.n_gpus_per_node=1 \
        --side two trainer.n_gpus_per_node=2 \
        --side tp2 trainer.n_gpus_per_node=2 worker.rollout.tensor_parallel_size=2 \
        --side off trainer.n_gpus_per_node=2 cluster.rollout_devices=1 trainer.async_rollout=true \
        --out benchmarks/results/many_gpus_3B.json

A side is a name and its settings; KEY=VALUE arguments elsewhere go to all sides (`worker.rollout.enforce_eager=true`
and `worker.actor.use_torch_compile=false` shorten the start). Each side trains in a process of its own, one after the
other, on the same rows: a prompt is 560 tokens with a 448×672 picture, and each of its 5 answers has `--response`
tokens. A step makes 4 optimizer steps; weights and moments are in bfloat16, and there is no reference model. Nothing is
validated or saved.

The record is written after each side. A side that fails or takes longer than `--limit` seconds is noted, and the next
one begins. A step's seconds are those from the end of the step before to its own end, so that a run that samples ahead
compares with one that doesn't; medians leave `--warm-up` steps out. `--network` measures NCCL among all GPUs first.
`--tiny` runs on a CPU, where `worker.rollout.name=transformers` starts faster; its model has too few heads for tensor
parallelism.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cuda_smoke import REWARD, settings
from benchmarks.network import bandwidth
from benchmarks.real_size import CHAT_TOKENS, SIZES, build_model, picture_rows
from foveal.cli import main as foveal
from foveal.config import load_config
from foveal.preflight import open_processing
from foveal.quickstart.tiny import build_tiny
from foveal.track.file import CONFIG_FILE, LOG_FILE, read_log
from foveal.types import Metrics

ROOT = Path(__file__).resolve().parents[1]
N = 5
OPTIMIZER_STEPS = 4
PATIENCE = 60
"""Seconds for a side that is told to stop."""
KEPT = ("timing_s/", "perf/", "actor/", "rollout/", "reward/", "prompt_length/", "response_length/")
"""Beginnings of the metrics of a step that the record keeps."""
Result = TypeVar("Result")


def in_process(work: Callable[..., Result], *arguments: Any) -> Result:
    """Does something in a process of its own, after which no GPU holds anything of it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def build(folder: Path, size: str, tiny: bool) -> dict[str, Any]:
    """Writes the model's folder; returns its size, and what it was made on."""
    if tiny:
        build_tiny(folder, SIZES[size].like, dtype="bfloat16")
    else:
        build_model(folder, size)
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"parameters": stored // 2, "device": device, "torch": torch.__version__}


def prepare(root: Path, options: argparse.Namespace) -> list[str]:
    """Writes rows and reward; returns the arguments of all sides, but for the run's folder."""
    model, rows = root / "model", root / "rows"
    (root / "reward.py").write_text(REWARD)
    ours = [
        "algorithm.use_kl_loss=false",
        "algorithm.disable_kl=true",
        f"worker.actor.global_batch_size={options.prompts // OPTIMIZER_STEPS}",
        "worker.actor.fsdp.torch_dtype=bf16",
        "worker.actor.optim.strategy=adamw_bf16",
        "worker.rollout.name=vllm",
        "worker.rollout.tensor_parallel_size=1",
        f"worker.rollout.n={N}",
        "data.val_files=null",
        "trainer.logger=[file]",
    ]
    smoke = argparse.Namespace(**{**vars(options), "overrides": []})
    arguments = [*settings(root, model, rows / "rows.jsonl", smoke), *ours, *options.overrides]
    height, width = (112, 112) if options.tiny else (448, 672)
    processing = open_processing(load_config(arguments))
    characters = options.prompt - CHAT_TOKENS - processing.visual_tokens((height, width))
    picture_rows(rows, options.prompts * options.steps, width=width, height=height, characters=characters)
    return arguments


def train(folder: Path, arguments: list[str]) -> int:
    """`foveal train` in this process, without its save at the end; writes down when the first step began."""
    from foveal.trainer import Trainer

    fit = Trainer.fit

    def fit_and_tell(self: Trainer) -> int:
        (folder / "began").write_text(str(time.time()))
        return fit(self)

    Trainer.fit = fit_and_tell  # type: ignore[method-assign]
    Trainer.save = lambda *_, **__: None  # type: ignore[method-assign]
    return foveal(["train", *arguments, f"trainer.save_checkpoint_path={folder}"])


def run_side(folder: Path, arguments: list[str], limit: float) -> dict[str, Any]:
    """Trains in a process of its own; returns what there is of it, also where it failed."""
    folder.mkdir()
    command = [sys.executable, __file__, "--train", str(folder), *arguments]
    # A cluster of its own, whatever else runs on this host.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "RAY_ADDRESS": "local",
    }
    output = folder / "output.txt"
    began = time.time()
    with output.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        failure = wait(process, limit)
    found: dict[str, Any] = {"seconds": time.time() - began}
    if (folder / "began").exists():
        found["start_up_seconds"] = float((folder / "began").read_text()) - began
    if (folder / CONFIG_FILE).exists():
        found |= layout(json.loads((folder / CONFIG_FILE).read_text()))
    printed = output.read_text(errors="replace")
    if budgets := re.findall(r"up to ([\d,]+) tokens with gradient", printed):
        found["pass_tokens"] = int(budgets[-1].replace(",", ""))  # of a worker in the trainer's own process
    if failure:
        found |= {"failure": failure, "output": printed.splitlines()[-15:]}
    found["steps"] = [
        {name: value for name, value in metrics.items() if name.startswith(KEPT)}
        for metrics in read_log(folder / LOG_FILE).values()
        if "timing_s/step" in metrics
    ]
    return found


def wait(process: subprocess.Popen[bytes], limit: float) -> str | None:
    """Waits for a side's end, which comes at the limit at the latest; returns what was wrong."""
    try:
        status = process.wait(limit)
        return f"exit status {status}" if status else None
    except subprocess.TimeoutExpired:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        return f"not done after {limit:g} s"
    finally:
        process.kill()  # Ray's processes end with the one that started them
        process.wait()


def layout(config: dict[str, Any]) -> dict[str, Any]:
    """What a side's configuration says of its devices and its work."""
    trainer, worker = config["trainer"], config["worker"]
    return {
        "gpus": trainer["nnodes"] * trainer["n_gpus_per_node"],
        "engine_gpus": config["cluster"]["rollout_devices"],
        "tensor_parallel": worker["rollout"]["tensor_parallel_size"],
        "ahead": trainer["async_rollout"],
        "prompts": config["data"]["rollout_batch_size"],
        "optimizer_steps": config["data"]["rollout_batch_size"] / worker["actor"]["global_batch_size"],
    }


def summary(side: dict[str, Any], warm_up: int) -> Metrics:
    """Medians of a side's steps after the first `warm_up`; nothing where there are none.

    Returns:
        seconds of the phases and of `step`, by the clock; `tokens_per_s_per_gpu`, of all prompts and answers, a prompt
        counted once per answer, as EasyR1 counts them; shares of the peak rate, highest memory in GiB, seconds that
        either side of a run that samples ahead was idle.
    """
    steps: list[Metrics] = side["steps"]
    if len(steps) <= warm_up:
        return {}
    ends = [step["perf/elapsed_s"] for step in steps]
    walls = [steps[0]["timing_s/step"], *(end - before for before, end in pairwise(ends))][warm_up:]
    later = steps[warm_up:]

    def middle(name: str) -> float:
        return median(step[name] for step in later)

    names = [name for name in later[0] if name.startswith(("timing_s/", "perf/mfu_", "perf/effective_mfu_"))]
    names += [name for name in later[0] if name.startswith("perf/idle_s/")]
    found = {name.removeprefix("timing_s/").removeprefix("perf/"): middle(name) for name in names}
    found["step"] = median(walls)
    found["tokens_per_s_per_gpu"] = median(
        step["perf/total_num_tokens"] / wall / side["gpus"] for step, wall in zip(later, walls, strict=True)
    )
    memory = [value for step in steps for name, value in step.items() if "memory_" in name and "cpu" not in name]
    if memory:
        found["peak_memory_gb"] = max(memory)
    if "rollout/logprob_gap/mean" in later[0]:
        found["logprob_gap"] = middle("rollout/logprob_gap/mean")
    return found


def speed_ups(sides: dict[str, dict[str, Any]]) -> dict[str, Metrics]:
    """How many times as fast each phase and step of every side is as those of the first side that has any."""
    measured = {name: side for name, side in sides.items() if side["medians"]}
    if not measured:
        return {}
    first = next(iter(measured.values()))
    phases = [name for name in first["medians"] if f"timing_s/{name}" in first["steps"][0]]
    return {
        name: {phase: first["medians"][phase] / side["medians"][phase] for phase in phases if phase in side["medians"]}
        for name, side in measured.items()
    }


def table(record: dict[str, Any]) -> str:
    """A line for each side, and what failed."""
    columns = ["step", "gen", "reward", "old", "update_actor", "tokens_per_s_per_gpu", "mfu_actor"]
    columns += ["effective_mfu_actor", "peak_memory_gb", "logprob_gap", "idle_s/trainer", "idle_s/engine"]
    rows = [["side", "gpus", "start", *columns, "x step", "x gen", "x update"]]
    for name, side in record["sides"].items():
        faster = record["speed_ups"].get(name, {})
        numbers = [side.get("start_up_seconds"), *(side["medians"].get(column) for column in columns)]
        numbers += [faster.get(phase) for phase in ("step", "gen", "update_actor")]
        rows.append([name, str(side.get("gpus", "")), *("-" if n is None else f"{n:.4g}" for n in numbers)])
    shown = [n for n in range(len(rows[0])) if any(row[n] != "-" for row in rows[1:])]
    rows = [[row[n] for n in shown] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for name, side in record["sides"].items():
        for metric in ("actor/pg_loss", "actor/grad_norm") if side["steps"] else ():
            values = ", ".join(f"{step[metric]:.4g}" for step in side["steps"] if metric in step)
            lines.append(f"{name} {metric}: {values}")
        if "failure" in side:
            lines += [f"{name}: {side['failure']}", *side["output"]]
    return "\n".join(lines)


def write(record: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")


def measure(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    record: dict[str, Any] = {"command": " ".join(sys.argv), "model": options.model, "cpus": os.cpu_count()}
    record |= {"prompt_tokens": options.prompt, "response_tokens": options.response, "n": N}
    if options.network:
        record["network"] = bandwidth(root, 2 if options.tiny else torch.cuda.device_count(), options.tiny)
        print(f"network: {json.dumps(record['network'])}", flush=True)
    record |= in_process(build, root / "model", options.model, options.tiny)
    arguments = prepare(root, options)
    record |= {"warm_up": options.warm_up, "settings": options.overrides, "sides": {}, "speed_ups": {}}
    for name, *own in options.side:
        side = run_side(root / name, [*arguments, *own], options.limit)
        record["sides"][name] = {"settings": own, **side, "medians": summary(side, options.warm_up)}
        record["speed_ups"] = speed_ups(record["sides"])
        write(record, options.out)
        print(f"{name}: {len(side['steps'])} steps, {side['seconds']:.0f} s", flush=True)
    return record


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        sys.exit(train(Path(sys.argv[2]), sys.argv[3:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="3B")
    parser.add_argument("--side", nargs="+", action="append", required=True, metavar=("NAME", "KEY=VALUE"))
    parser.add_argument("--prompts", type=int, default=128, help="a step; five answers each")
    parser.add_argument("--prompt", type=int, default=560, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=1, help="first steps that the medians leave out")
    parser.add_argument("--limit", type=float, default=500, help="seconds of a side")
    parser.add_argument("--network", action="store_true", help="measure the network among the GPUs first")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and 4 short prompts, for a CPU")
    options, overrides = parser.parse_known_args()
    options.overrides = overrides
    if wrong := [text for text in overrides if text.startswith("-") or "=" not in text]:
        parser.error(f"neither an option nor KEY=VALUE: {' '.join(wrong)}")
    if options.tiny:
        options.prompts, options.prompt, options.response = 4, 96, 12
    options.warm_up = min(options.warm_up, options.steps - 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the side that runs ends too
    with tempfile.TemporaryDirectory(prefix="many_gpus_") as temporary:
        print(table(measure(options, Path(temporary))))


if __name__ == "__main__":
    main()
