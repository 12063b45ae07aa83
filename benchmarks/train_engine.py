"""The trainer at real model sizes with random weights and no engine: speed of its passes, memory, kernels.

    python3 benchmarks/train_engine.py --models 7B,3B,4B --modes bf16+none+compile bf16+full bf16+full+naive

A mode is some words joined by "+": `bf16` (weights and moments in bfloat16), `amp` (both in float32), `amp8bit`
(float32 weights, moments in 8 bits) or `lora` (adapters of rank 64 in float32 on all linear layers of frozen bfloat16
weights; they begin at zero, as in a run); checkpointing `full`, `selective` or `none`; `compile`; `naive` (every answer
brings its prompt). Left out: bf16, full, eager, shared. The rows are prompts of 560 tokens with a 448×672
picture of noise, and 5 answers of 512 random tokens, or of 64–1,024 (`ragged`).

Timed is the whole update phase, after a warm-up of three updates of one optimizer step; naive modes do one optimizer
step, of as many prompts, after one. Prints a line per measurement and writes `train_engine_MODEL.json` after each.
`--tiny` runs on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.real_size import CHAT_TOKENS, SIZES, build_model, models_asked_for, picture_rows, random_module
from benchmarks.train_profiles import DEVICE, allocated, measure_memory, profile, timed, update
from foveal.cluster.worker import Worker
from foveal.config import Config, load_config
from foveal.data.loader import open_loader
from foveal.errors import DeviceMemoryError
from foveal.models.loading import DTYPES, prepare
from foveal.models.lora import is_factor
from foveal.preflight import open_processing
from foveal.train.budget import set_budgets
from foveal.types import Group, Metrics, Prompt, Response

N = 5
MEMORY_BUDGET = 8192  # of the memory table: `auto` would fill whatever is free
PRECISIONS = {"bf16": "adamw_bf16", "amp": "adamw", "amp8bit": "adamw_8bit", "lora": "adamw"}
RANK = 64
CHECKPOINTING = {"full": "true", "selective": "selective", "none": "false"}
GRID = [f"{p}+{c}{k}" for p in ("bf16", "amp") for c in CHECKPOINTING for k in ("", "+compile")]


@dataclass(frozen=True)
class Mode:
    """How the trainer computes."""

    precision: str = "bf16"
    checkpointing: str = "full"
    compiled: bool = False
    shared: bool = True

    @classmethod
    def parse(cls, text: str) -> Mode:
        words = set(text.split("+"))
        if unknown := words - PRECISIONS.keys() - CHECKPOINTING.keys() - {"compile", "naive"}:
            raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}")
        precision = next((word for word in PRECISIONS if word in words), "bf16")
        checkpointing = next((word for word in CHECKPOINTING if word in words), "full")
        return cls(precision, checkpointing, "compile" in words, "naive" not in words)

    def __str__(self) -> str:
        words = [self.precision, self.checkpointing, "compile" * self.compiled, "naive" * (not self.shared)]
        return "+".join(word for word in words if word)


class RandomWorker(Worker):
    """A worker whose model folder holds no weights."""

    def _load(self, dtype: str, source: str) -> Any:
        model = random_module(Path(source), DEVICE, DTYPES[dtype])
        prepare(model, DEVICE)
        return model


class Record:
    """The numbers of one model: printed and written as they come."""

    def __init__(self, out: Path, name: str) -> None:
        self.path = out / f"train_engine_{name}.json"
        self.name = name
        versions = {"python": platform.python_version()}
        versions |= {"torch": torch.__version__, "transformers": transformers.__version__}
        device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
        self.values: dict[str, Any] = {"command": " ".join(sys.argv), "device": device, "versions": versions}
        out.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, value: Any, line: str | None = None) -> None:
        self.values[name] = value
        print(f"{self.name} {name}: {value if line is None else line}", flush=True)
        self.path.write_text(json.dumps(self.values, indent=1) + "\n")


def settings(options: argparse.Namespace, mode: Mode, lengths: str, root: Path) -> Config:
    values = {
        "data.train_files": root / "rows" / "rows.jsonl",
        "data.image_dir": root / "rows",
        "data.prompt_key": "problem",
        "data.max_prompt_length": options.prompt,
        "data.max_response_length": options.tokens if lengths == "equal" else 2 * options.tokens,
        "data.rollout_batch_size": options.groups,
        "algorithm.disable_kl": "true",
        "worker.actor.global_batch_size": options.groups // options.steps,
        "worker.actor.model.model_path": root / "model",
        "worker.actor.model.enable_gradient_checkpointing": CHECKPOINTING[mode.checkpointing],
        "worker.actor.model.lora.rank": RANK if mode.precision == "lora" else 0,
        "worker.actor.optim.strategy": PRECISIONS[mode.precision],
        "worker.actor.use_torch_compile": str(mode.compiled).lower(),
        "worker.actor.shared_prefix": str(mode.shared).lower(),
        "worker.actor.token_budget": options.token_budget,
        "worker.rollout.name": "transformers",
        "worker.rollout.n": N,
        "trainer.n_gpus_per_node": 1,
    }
    if mode.precision == "lora":
        values["worker.actor.fsdp.torch_dtype"] = "bf16"  # on a CPU too
    if options.tiny:
        values["data.min_pixels"] = 3136
    return load_config([*(f"{key}={value}" for key, value in values.items()), *options.set])


def make_groups(worker: Worker, prompts: list[Prompt], lengths: str, tokens: int) -> list[Group]:
    """Answers of random tokens with random advantages; no pass has scored them yet.

    Args:
        lengths: "equal", `tokens` each, or "ragged", an eighth to twice of that.
    """
    random = np.random.default_rng(0)
    size = worker.model.get_input_embeddings().weight.shape[0]
    allowed = np.setdiff1d(np.arange(size), worker.processing.forbidden_ids)

    def answer() -> Response:
        length = tokens if lengths == "equal" else int(random.integers(max(1, tokens // 8), 2 * tokens + 1))
        logprobs = random.normal(-np.log(size), 0.1, length).astype(np.float32)
        response = Response(random.choice(allowed, length), logprobs, "length")
        response.columns["advantages"] = np.full(length, random.normal(), np.float32)
        return response

    return [Group(prompt, [answer() for _ in range(N)]) for prompt in prompts]


def measure_passes(
    worker: Worker, prompts: list[Prompt], mode: Mode, lengths: str, options: argparse.Namespace
) -> Metrics:
    """The log-probability pass and the update of a step, each timed as the trainer does, after a warm-up."""
    per_step = options.groups // options.steps
    warm = make_groups(worker, prompts[:per_step], lengths, options.tokens)
    groups = make_groups(worker, prompts, lengths, options.tokens)
    found: Metrics = {}
    if "logprobs" in options.phases:
        worker.old_logprobs(warm)
    found["warm_up_seconds"] = timed(update, worker, warm)
    if mode.shared:  # with the optimizer's states in place, an update teaches how many tokens fit; then all is as later
        found["second_update_seconds"] = timed(update, worker, warm)
        found["third_update_seconds"] = timed(update, worker, warm)
    worker.performance({})  # forgets what was done so far
    assert worker.policy is not None
    packers = worker.policy.packer, worker.policy.experience_packer
    found |= {"groups": len(groups), "update_budget": packers[0].budget, "logprobs_budget": packers[1].budget}
    timings: dict[str, float] = {}
    if "logprobs" in options.phases:
        timings["old"] = timed(worker.old_logprobs, groups)
    else:  # in a run that pass comes first, and leaves log-probabilities and layouts
        for group in groups:
            worker.layouts(group.prompt)
            for response in group.responses:
                response.columns["old_logprobs"] = response.logprobs
    if "update" in options.phases:
        timings["update_actor"] = timed(update, worker, groups)
    found |= {f"seconds/{name}": took for name, took in timings.items()}
    found["began_again"] = float(any(packer.ceiling < sys.maxsize for packer in packers))
    return found | worker.performance(timings)


def summary(found: Metrics) -> str:
    """One line for a person."""
    pieces = []
    phases = ("old", "old", "logprobs_budget"), ("update_actor", "actor", "update_budget")
    for phase, mfu, budget in (names for names in phases if f"seconds/{names[0]}" in found):
        text = f"{phase} {found[f'seconds/{phase}']:.2f} s for {found['groups']:.0f} groups"
        text += f", {found[f'perf/peer_tokens_per_s/{phase}']:,.0f} peer tok/s"
        text += f", {found[f'perf/tokens_per_s/{phase}']:,.0f} tok/s"
        if f"perf/mfu_{mfu}" in found:
            text += f", effective MFU {found[f'perf/effective_mfu_{mfu}']:.1%}, MFU {found[f'perf/mfu_{mfu}']:.1%}"
            text += f", peak {found[f'perf/peak_memory_gb/{phase}']:.1f} GiB"
        pieces.append(f"{text}, budget {found[budget]:,.0f}")
    again = " (ran out of memory and began again: the time is not valid)" if found["began_again"] else ""
    return "; ".join(pieces) + again


def release() -> None:
    gc.collect()
    if allocated() > 1:
        torch._dynamo.reset()  # compiled layers held the model; not otherwise: the optimizer's graphs fit the next mode
        gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def attempt(record: Record, name: str, work: Callable[[], None]) -> None:
    """Runs a mode; one that doesn't fit the device is noted, and the others go on."""
    try:
        work()
    except (DeviceMemoryError, torch.OutOfMemoryError) as error:
        record.add(name, {"error": str(error)}, f"does not fit: {str(error).splitlines()[0]}")
    release()


def measure(size: str, options: argparse.Namespace, root: Path) -> None:
    record = Record(options.out, f"{size}_{options.moe}_layers" if options.moe else size)
    layers = (options.moe or 1) if options.tiny else None
    folder = build_model(root / "model", size, layers=layers, weights=False)
    if options.moe:  # fewer layers of full size
        description = transformers.AutoConfig.from_pretrained(folder)
        description.text_config.num_hidden_layers = options.moe
        description.save_pretrained(folder)
    first = settings(options, options.modes[0], options.lengths[0], root)
    processing = open_processing(first)
    height, width = (224, 224) if options.tiny else (448, 672)
    characters = options.prompt - CHAT_TOKENS - processing.visual_tokens((height, width))
    picture_rows(root / "rows", options.groups, width=width, height=height, characters=characters)
    prompts = open_loader(first, processing, "train").take(options.groups)
    record.add("prompt_tokens", float(np.mean([len(prompt.expanded_ids) for prompt in prompts])))

    def passes(mode: Mode) -> None:
        config = settings(options, mode, options.lengths[0], root)
        worker = RandomWorker(config, processing, train=True, images=1)
        record.values["parameters"] = sum(p.numel() for n, p in worker.model.named_parameters() if not is_factor(n))
        assert worker.policy is not None
        few = prompts if mode.shared else prompts[: options.groups // options.steps]
        for number, lengths in enumerate(options.lengths if mode.shared else ["equal"]):
            if number:
                set_budgets(settings(options, mode, lengths, root), {"actor": worker.policy}, DEVICE)
            found = measure_passes(worker, few, mode, lengths, options)
            record.add(f"{mode} {lengths}", found, summary(found))
        if options.profile:
            groups = make_groups(worker, few, "equal", options.tokens)
            table = profile(worker, groups, options.profile)
            record.add(f"{mode} kernels", table.splitlines(), "\n" + table)

    def memory(mode: Mode, offload: bool) -> None:
        config = settings(options, mode, "equal", root).model_copy(deep=True)
        keys = config.worker.actor.offload
        keys.offload_params = keys.offload_optimizer = offload
        if not isinstance(config.worker.actor.token_budget, int):
            config.worker.actor.token_budget = MEMORY_BUDGET
        worker = RandomWorker(config, processing, train=True, images=1)
        groups = make_groups(worker, prompts[: options.groups // options.steps], "equal", options.tokens)
        record.add(f"memory {mode}{'+offload' * offload}", measure_memory(worker, groups, offload=offload))

    for mode in options.modes:
        if options.memory:
            for offload in (False, True):
                attempt(record, f"memory {mode}{'+offload' * offload}", partial(memory, mode, offload))
        else:
            attempt(record, str(mode), partial(passes, mode))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="7B", help=f"comma-separated, of {', '.join(SIZES)}")
    parser.add_argument("--moe", type=int, metavar="LAYERS", help="30B-A3B with so many decoder layers instead")
    parser.add_argument("--modes", nargs="+", type=Mode.parse, metavar="MODE", help="or --grid")
    parser.add_argument("--grid", action="store_true", help=f"{len(GRID)} modes: precision × checkpointing × compile")
    parser.add_argument("--lengths", nargs="+", choices=("equal", "ragged"), default=["equal"])
    parser.add_argument("--phases", nargs="+", choices=("logprobs", "update"), default=["logprobs", "update"])
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of an update")
    parser.add_argument("--prompt", type=int, default=560, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--token-budget", default="auto", help="worker.actor.token_budget")
    parser.add_argument("--memory", action="store_true", help="peak memory, with and without offload, instead of speed")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="kernels of so many micro-batches")
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="configuration")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "benchmarks/results")))
    parser.add_argument("--tiny", action="store_true", help="one layer, a small vocabulary, 4 short groups")
    options = parser.parse_args()
    usual = ["bf16", "amp", "amp8bit"] if options.memory else ["bf16+none+compile", "bf16", "bf16+naive"]
    options.modes = options.modes or [Mode.parse(text) for text in (GRID if options.grid else usual)]
    if options.tiny:
        options.groups, options.steps, options.prompt, options.tokens = 4, 2, 128, 12
    if options.groups % options.steps:
        parser.error("--groups must be a multiple of --steps")
    size = models_asked_for(parser, "30B-A3B" if options.moe else options.models)
    with tempfile.TemporaryDirectory() as temporary:
        measure(size, options, Path(temporary))


if __name__ == "__main__":
    main()
