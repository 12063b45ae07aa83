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

`--processes N` trains on N GPUs of this host, a process each, sharded as in a run; `--set` chooses how
(`worker.actor.fsdp.fsdp_size`, `worker.actor.ulysses_size`, …). Weights, groups and answers are the same for any N;
`--against FILE` compares with the record of another: speed, and loss, gradient norm and entropy of each optimizer step.
The record is `train_N_gpus_MODEL.json`.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import platform
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.real_size import CHAT_TOKENS, SIZES, build_model, models_asked_for, picture_rows, random_module
from benchmarks.train_profiles import DEVICE, allocated, measure_memory, profile, timed, update
from foveal.cluster.balance import assign, sizes_of, training_cost
from foveal.cluster.topology import team_size
from foveal.cluster.worker import Worker
from foveal.config import Config, load_config
from foveal.config.schema_model import FsdpConfig
from foveal.data.loader import open_loader
from foveal.errors import DeviceMemoryError
from foveal.models.loading import DTYPES, prepare
from foveal.models.lora import is_factor
from foveal.preflight import open_processing
from foveal.track import console
from foveal.train import policy
from foveal.train.budget import set_budgets
from foveal.train.meter import combined
from foveal.train.peers import Peers, spread_with
from foveal.train.place import Place, take_place
from foveal.train.processes import from_all, saving_group
from foveal.train.scorer import TokenScorer
from foveal.types import Group, Prompt, Response

N = 5
COMPARED = ("loss", "grad_norm", "entropy")
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
    """A worker whose model folder holds no weights: every process draws the same ones, and keeps its shards."""

    def _load(self, dtype: str, source: str) -> Any:
        torch.manual_seed(0)
        model = random_module(Path(source), DEVICE, DTYPES[dtype])
        prepare(model, DEVICE)
        return model

    def _spread(self, scorer: TokenScorer, fsdp: FsdpConfig, source: str, role: str = "actor") -> Peers:
        peers = spread_with(scorer, lambda model: None, fsdp, self.device, role=role, group=self.place.apart)
        release()  # the rest of the weights
        return peers


class Record:
    """The numbers of one model: printed and written as they come, where this process is to."""

    def __init__(self, out: Path, name: str, processes: int) -> None:
        self.path = out / f"{f'train_{processes}_gpus' if processes > 1 else 'train_engine'}_{name}.json"
        self.name = name
        self.writes = True
        versions = {"python": platform.python_version()}
        versions |= {"torch": torch.__version__, "transformers": transformers.__version__}
        self.values: dict[str, Any] = {"command": " ".join(sys.argv), "device": "cpu", "versions": versions}
        out.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, value: Any, line: str | None = None) -> None:
        self.values[name] = value
        if self.writes:
            print(f"{self.name} {name}: {value if line is None else line}", flush=True)
            self.path.write_text(json.dumps(self.values, indent=1) + "\n")

    def reread(self) -> None:
        """Takes what another process has added."""
        if self.path.exists():
            self.values = json.loads(self.path.read_text())


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

    return [Group(prompt, [answer() for _ in range(worker.config.worker.rollout.n)]) for prompt in prompts]


def share(worker: Worker, groups: list[Group]) -> tuple[list[Group], list[int] | None]:
    """This process's groups, and how many of them go into each optimizer step, as the trainer deals them out where
    nobody has their prompts; None where it is alone."""
    place, processing, actor = worker.place, worker.processing, worker.config.worker.actor
    if place.alone:
        return groups, None
    cost = partial(
        training_cost,
        counter=worker.meter.counter(worker.scorer),
        media_ids=set(processing.placeholders.values()),
        merge=math.isqrt(processing.merge_length),
        shared_prefix=actor.shared_prefix,
    )
    size, batch = team_size(worker.config), actor.global_batch_size
    owners = assign([cost(group) for group in groups], [()] * len(groups), batch, place.world // size)
    team = place.rank // size
    own = [group for group, owner in zip(groups, owners, strict=True) if owner == team]
    return own, sizes_of(owners, batch, team)


def timed_in_all(work: Callable[..., Any], *arguments: Any) -> float:
    """The seconds until all processes have done it."""
    from_all(None)
    return max(from_all(timed(work, *arguments)))


@contextmanager
def noted_steps() -> Iterator[list[dict[str, float]]]:
    """What each optimizer step within the block found, of all processes together."""
    found: list[dict[str, float]] = []
    step = policy.optimizer_step

    def noted(*arguments: Any) -> dict[str, float]:
        stats = step(*arguments)
        values = [stats.get(name, math.nan) for name in ("pg_loss", "grad_norm", "entropy")]
        found.append(dict(zip(COMPARED, values, strict=True)))
        found[-1]["entropy"] /= stats.get("tokens", 1.0)
        return stats

    with mock.patch.object(policy, "optimizer_step", noted):
        yield found


def measure_passes(
    worker: Worker, prompts: list[Prompt], mode: Mode, lengths: str, options: argparse.Namespace
) -> dict[str, Any]:
    """The log-probability pass and the update of a step, each timed as the trainer does, after a warm-up."""
    per_step = options.groups // options.steps
    warm, warm_sizes = share(worker, make_groups(worker, prompts[:per_step], lengths, options.tokens))
    groups, sizes = share(worker, make_groups(worker, prompts, lengths, options.tokens))
    found: dict[str, Any] = {}
    if "logprobs" in options.phases:
        worker.old_logprobs(warm)
    found["warm_up_seconds"] = timed_in_all(update, worker, warm, warm_sizes)
    if mode.shared:  # with the optimizer's states in place, an update teaches how many tokens fit; then all is as later
        found["second_update_seconds"] = timed_in_all(update, worker, warm, warm_sizes)
        found["third_update_seconds"] = timed_in_all(update, worker, warm, warm_sizes)
    worker.performance({})  # forgets what was done so far
    assert worker.policy is not None
    packers = worker.policy.packer, worker.policy.experience_packer
    found |= {"groups": len(prompts), "update_budget": packers[0].budget, "logprobs_budget": packers[1].budget}
    timings: dict[str, float] = {}
    if "logprobs" in options.phases:
        timings["old"] = timed_in_all(worker.old_logprobs, groups)
    else:  # in a run that pass comes first, and leaves log-probabilities and layouts
        for group in groups:
            worker.layouts(group.prompt)
            for response in group.responses:
                response.columns["old_logprobs"] = response.logprobs
    if "update" in options.phases:
        with noted_steps() as found["steps"]:
            timings["update_actor"] = timed_in_all(update, worker, groups, sizes)
    found |= {f"seconds/{name}": took for name, took in timings.items()}
    found["began_again"] = float(any(packer.ceiling < sys.maxsize for packer in packers))
    rates = from_all(worker.performance(timings))
    if DEVICE.type == "cuda":
        found["not_given_back_gb"] = not_given_back()
    return found | combined(rates, team_size=team_size(worker.config), engine_size=1)


def summary(found: dict[str, Any]) -> str:
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


def not_given_back() -> float:
    """GiB of the device that no tensor takes, and that torch can't give to another user, as vLLM is."""
    torch.cuda.empty_cache()
    return (torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) / 2**30


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


def write_inputs(size: str, options: argparse.Namespace, root: Path) -> None:
    """The model's folder, and rows."""
    layers = (options.moe or 1) if options.tiny else None
    folder = build_model(root / "model", size, layers=layers, weights=False)
    if options.moe:  # fewer layers of full size
        description = transformers.AutoConfig.from_pretrained(folder)
        description.text_config.num_hidden_layers = options.moe
        description.save_pretrained(folder)
    processing = open_processing(settings(options, options.modes[0], options.lengths[0], root))
    height, width = (224, 224) if options.tiny else (448, 672)
    characters = options.prompt - CHAT_TOKENS - processing.visual_tokens((height, width))
    picture_rows(root / "rows", options.groups, width=width, height=height, characters=characters)


class Measuring:
    """Measures modes in this process, of several where it isn't alone.

    Args:
        root: with the inputs.
    """

    def __init__(self, options: argparse.Namespace, root: Path, record: Record, place: Place) -> None:
        self.options, self.root, self.record, self.place = options, root, record, place
        if DEVICE.type == "cuda":
            record.values["device"] = torch.cuda.get_device_name()
        first = settings(options, options.modes[0], options.lengths[0], root)
        self.processing = open_processing(first)
        self.prompts = open_loader(first, self.processing, "train").take(options.groups)
        record.add("prompt_tokens", float(np.mean([len(prompt.expanded_ids) for prompt in self.prompts])))

    def _worker(self, config: Config) -> RandomWorker:
        return RandomWorker(config, self.processing, train=True, images=1, place=self.place)

    def passes(self, mode: Mode) -> None:
        options, record, root = self.options, self.record, self.root
        worker = self._worker(settings(options, mode, options.lengths[0], root))
        record.values["parameters"] = sum(p.numel() for n, p in worker.model.named_parameters() if not is_factor(n))
        assert worker.policy is not None
        few = self.prompts if mode.shared else self.prompts[: options.groups // options.steps]
        for number, lengths in enumerate(options.lengths if mode.shared else ["equal"]):
            if number:
                set_budgets(settings(options, mode, lengths, root), {"actor": worker.policy}, DEVICE)
            found = measure_passes(worker, few, mode, lengths, options)
            record.add(f"{mode} {lengths}", found, summary(found))
        if options.profile:
            groups, _ = share(worker, make_groups(worker, few, "equal", options.tokens))
            table = profile(worker, groups, options.profile)
            record.add(f"{mode} kernels", table.splitlines(), "\n" + table)

    def memory(self, mode: Mode, offload: bool) -> None:
        options = self.options
        config = settings(options, mode, "equal", self.root).model_copy(deep=True)
        keys = config.worker.actor.offload
        keys.offload_params = keys.offload_optimizer = offload
        if not isinstance(config.worker.actor.token_budget, int):
            config.worker.actor.token_budget = MEMORY_BUDGET
        worker = self._worker(config)
        groups = make_groups(worker, self.prompts[: options.groups // options.steps], "equal", options.tokens)
        name = f"memory {mode}{'+offload' * offload}"
        self.record.add(name, measure_memory(worker, groups, offload=offload))


def measure_apart(options: argparse.Namespace, root: Path, record: Record, mode: Mode) -> None:
    """Measures a mode in several processes, each of which sees one device, as Ray starts a run's.

    Raises:
        DeviceMemoryError: the memory of one did not suffice. RuntimeError: one failed otherwise, or all took too long.
    """
    context = multiprocessing.get_context("spawn")
    meeting = Path(tempfile.mkdtemp(dir=root))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(rank) for rank in range(options.processes)]
    processes = []
    try:
        for rank in range(options.processes):
            arguments = (rank, meeting, options, root, record, mode)
            processes.append(context.Process(target=member, args=arguments, name=f"process {rank}"))
            with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=devices[rank % len(devices)]):
                processes[-1].start()
        end = time.monotonic() + options.timeout
        while running := [process for process in processes if process.exitcode is None]:
            if failed := [process for process in processes if process.exitcode]:  # others may wait for it for ever
                raise RuntimeError(f"{failed[0].name} ended with status {failed[0].exitcode}")
            if time.monotonic() > end:
                raise RuntimeError(f"no end after {options.timeout:g} s (--timeout)")
            multiprocessing.connection.wait([process.sentinel for process in running], timeout=1)
        if failed := [process for process in processes if process.exitcode]:
            raise RuntimeError(f"{failed[0].name} ended with status {failed[0].exitcode}")
    except RuntimeError as error:
        if lacking := sorted(meeting.glob("lacks_memory_*")):
            raise DeviceMemoryError(lacking[0].read_text()) from error
        raise
    finally:
        for process in processes:
            process.kill()
            process.join()
        record.reread()


def member(rank: int, meeting: Path, options: argparse.Namespace, root: Path, record: Record, mode: Mode) -> None:
    """One of the processes: joins the others as `cluster.member.Member` does, and measures."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    world = options.processes
    record.writes = rank == 0
    if rank:
        console.divert(lambda kind, text: kind != "note" and print(f"process {rank}: {text}", file=sys.stderr))
    torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // world)))
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo",
            store=dist.FileStore(str(meeting / "store"), world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=options.timeout),
        )
        saving_group()
        config = settings(options, mode, options.lengths[0], root)
        Measuring(options, root, record, take_place(team_size(config))).passes(mode)
        from_all(None)  # one that leaves while the other still talks to it may abort
    except BaseException as error:
        if isinstance(error, DeviceMemoryError | torch.OutOfMemoryError):
            (meeting / f"lacks_memory_{rank}").write_text(f"process {rank}: {error}")
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # NCCL's own end would wait for the others
    dist.destroy_process_group()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def compare(record: Record, path: Path) -> None:
    """Writes how much faster each mode was than in another record, and the largest relative differences of what its
    optimizer steps found."""
    others = json.loads(path.read_text())
    for name, ours in list(record.values.items()):
        theirs = others.get(name)
        if not (isinstance(ours, dict) and isinstance(theirs, dict) and "groups" in ours and "groups" in theirs):
            continue
        found: dict[str, Any] = {"file": path.name}
        for phase in (key for key in ours if key.startswith("seconds/") and key in theirs):
            found[f"faster/{phase.removeprefix('seconds/')}"] = theirs[phase] / ours[phase]
        alike = ("seconds/old" in ours) == ("seconds/old" in theirs)  # or old_logprobs are others
        pairs = list(zip(ours.get("steps", ()), theirs.get("steps", ()), strict=False)) if alike else []
        for key in COMPARED if pairs else ():
            found[f"difference/{key}"] = max(abs(a[key] - b[key]) / abs(b[key]) for a, b in pairs)
        line = ", ".join(f"{key} {value:.4g}" for key, value in found.items() if key != "file")
        record.add(name, {**ours, "against": found}, f"against {path}: {line}")


def measure(size: str, options: argparse.Namespace, root: Path) -> None:
    record = Record(options.out, f"{size}_{options.moe}_layers" if options.moe else size, options.processes)
    write_inputs(size, options, root)
    if options.processes > 1:
        record.path.unlink(missing_ok=True)
        for mode in options.modes:
            attempt(record, str(mode), partial(measure_apart, options, root, record, mode))
    else:
        measuring = Measuring(options, root, record, Place())
        for mode in options.modes:
            if options.memory:
                for offload in (False, True):
                    attempt(record, f"memory {mode}{'+offload' * offload}", partial(measuring.memory, mode, offload))
            else:
                attempt(record, str(mode), partial(measuring.passes, mode))
    if options.against:
        compare(record, options.against)


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
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="on as many GPUs")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that several processes have for a mode")
    parser.add_argument("--against", type=Path, metavar="FILE", help="record to compare with at the end")
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
    if options.processes > 1:
        if options.memory:
            parser.error("--memory goes with one process")
        if DEVICE.type == "cuda" and torch.cuda.device_count() < options.processes:
            parser.error(f"--processes {options.processes}: there are {torch.cuda.device_count()} GPUs")
        options.set = [f"trainer.n_gpus_per_node={options.processes}", *options.set]
    size = models_asked_for(parser, "30B-A3B" if options.moe else options.models)
    with tempfile.TemporaryDirectory() as temporary:
        measure(size, options, Path(temporary))


if __name__ == "__main__":
    main()
