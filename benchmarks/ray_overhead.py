"""What Ray costs a step: the ordinary trainer with its worker in this process, and with the same worker as an actor.

    python3 benchmarks/ray_overhead.py --out benchmarks/results/ray_overhead_3B.json

Both sides make the same steps with the size of Qwen2.5-VL-3B and random weights, one after the other, each in a process
of its own, as two of them do not fit into one GPU's memory; not on two GPUs at once, which differ by as much as is
measured here. Steps are compared in pairs after the first two: by the trainer's own timers, and from one step's
beginning to the next's, which holds what lies between them too. The stages themselves differ by more between two runs
than Ray costs, so they are timed in the worker as well: `added_share` compares what a step takes outside of them. In
the first step, what goes through Ray is counted.
`--engine vllm` samples with vLLM (about 80 s more for each side to start; `worker.rollout.enforce_eager=true` shortens
that), `--tiny` tries the script out on a CPU. KEY=VALUE arguments go to `foveal train`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cuda_smoke import REWARD, settings
from benchmarks.real_size import build_model, picture_rows
from foveal.cli import main as foveal
from foveal.quickstart.tiny import build_tiny

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("in_process", "ray")
WARM_UP = 2
"""First steps that are not compared: kernels are compiled, and budgets learned."""


def prepare(root: Path, options: argparse.Namespace) -> list[str]:
    """Writes model, rows and reward; returns the arguments of both runs, but for the run's folder."""
    model = build_tiny(root / "model", "qwen2_5_vl") if options.tiny else build_model(root / "model", "3B")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    width, height = options.pixels
    rows = picture_rows(root / "rows", options.prompts * options.steps, width=width, height=height)
    (root / "reward.py").write_text(REWARD)
    ours = [
        f"trainer.max_steps={options.steps}",
        "trainer.logger=[file]",
        "data.val_files=null",
        f"worker.rollout.name={options.engine}",
        "worker.rollout.tensor_parallel_size=1",
        "worker.actor.use_torch_compile=false",  # a minute for each side
    ]
    return [*settings(root, model, rows, options)[: -len(options.overrides) or None], *ours, *options.overrides]


def run_side(side: str, out: Path, arguments: list[str]) -> None:
    """Trains in this process, and writes down how long it took to start and what went through Ray."""
    import foveal.trainer as trainer

    traffic: dict[str, dict[str, int]] = {}
    inside = out.with_suffix(".inside")
    started, ready = time.perf_counter(), 0.0
    begun: list[float] = []
    start, train_step = trainer.start_workers, trainer.Trainer.train_step

    def start_workers(config: Any, processing: Any, **options: Any) -> Any:
        nonlocal ready
        if side == "ray":
            count_traffic(traffic)
            workers: Any = watched_workers(inside)(config, processing, {"checkpoint": None, **options})
        else:
            workers = start(config, processing, **options)
            watch(workers, inside)
        ready = time.perf_counter() - started
        return workers

    def timed_step(self: Any) -> None:
        begun.append(time.perf_counter())
        train_step(self)

    trainer.Trainer.train_step = timed_step  # type: ignore[method-assign]
    trainer.start_workers = start_workers  # which takes the worker of a single device into this process
    trainer.Trainer.save = lambda *_, **__: None  # type: ignore[method-assign]  # half a minute each
    assert foveal(["train", *arguments]) == 0
    whole = [after - before for before, after in pairwise(begun)]
    values = {"start_up_seconds": ready, "whole_step_seconds": whole, "bytes": traffic}
    out.write_text(json.dumps(values | {"inside_seconds": [float(line) for line in inside.read_text().split()]}))


def watch(worker: Any, out: Path) -> None:
    """Has a worker write into a file, a line a step, how many seconds it was at work in its stages."""
    inside = 0.0
    measured = worker.performance

    def timed(stage: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            nonlocal inside
            began = time.perf_counter()
            found = stage(*arguments, **named)
            inside += time.perf_counter() - began
            return found

        return run

    def sampled(*arguments: Any) -> Iterator[Any]:
        advance = timed(partial(next, stream(*arguments), None))
        while (group := advance()) is not None:
            yield group

    def performance(timings: dict[str, float]) -> Any:
        nonlocal inside
        with out.open("a") as file:
            file.write(f"{inside}\n")
        inside = 0.0
        return measured(timings)

    stream = worker.sample
    for name in ("old_logprobs", "ref_logprobs", "update"):
        setattr(worker, name, timed(getattr(worker, name)))
    worker.sample, worker.performance = sampled, performance


def watched_workers(out: Path) -> Any:
    """`RayWorkers` whose worker is watched in its own process."""
    from foveal.cluster import ray_group

    class Watched(ray_group.Member):
        def start(self, *arguments: Any) -> Any:
            found = super().start(*arguments)
            watch(self.worker, out)
            return found

    ray_group.Member = Watched  # type: ignore[misc]
    return ray_group.RayWorkers


def count_traffic(found: dict[str, dict[str, int]]) -> None:
    """Counts the bytes of what is sent to the workers and comes back, by stage, until the second rollout."""
    import ray.cloudpickle as pickle

    from foveal.cluster.crew import Crew

    call, stream = Crew.call, Crew.stream
    rollouts = 0

    def add(stage: str, direction: str, item: Any) -> None:
        if rollouts == 1:
            entry = found.setdefault(stage, {"sent": 0, "received": 0})
            entry[direction] += len(pickle.dumps(item))

    def counted(stage: str, arguments: Callable[[int], tuple[Any, ...]]) -> Callable[[int], tuple[Any, ...]]:
        def of_rank(rank: int) -> tuple[Any, ...]:
            sent = arguments(rank)
            add(stage, "sent", sent)
            return sent

        return of_rank

    def counted_call(self: Any, stage: str, method: str, arguments: Any = lambda rank: (), **options: Any) -> Any:
        results = call(self, stage, method, counted(stage, arguments), **options)
        for result in results:
            add(stage, "received", result)
        return results

    def counted_stream(self: Any, stage: str, method: str, arguments: Any) -> Iterator[tuple[int, Any]]:
        nonlocal rollouts
        rollouts += 1
        for rank, item in stream(self, stage, method, counted(stage, arguments)):
            add(stage, "received", item)
            yield rank, item

    Crew.call, Crew.stream = counted_call, counted_stream  # type: ignore[method-assign, assignment]


def compared(
    records: dict[str, list[dict[str, Any]]], whole: dict[str, list[float]], inside: dict[str, list[float]]
) -> dict[str, Any]:
    """Median seconds of each phase on both sides, and how the steps compare.

    Args:
        records: of each side, a record a step as in experiment_log.jsonl.
        whole: of each side, seconds from each step's beginning to the next's.
        inside: of each side, seconds that each step spent in the worker's stages.
    """
    later = {side: steps[WARM_UP:] for side, steps in records.items()}
    phases = {
        side: {name: median(step["timing_s"][name] for step in steps) for name in steps[0]["timing_s"]}
        for side, steps in later.items()
    }
    outside = {
        side: [step["timing_s"]["step"] - within for step, within in zip(steps, inside[side], strict=True)][WARM_UP:]
        for side, steps in records.items()
    }
    pairs = list(zip(*(later[side] for side in SIDES), strict=True))
    return {
        "seconds": phases,
        "step_ratios": [ray["timing_s"]["step"] / own["timing_s"]["step"] for own, ray in pairs],
        "ratio": median(ray["timing_s"]["step"] / own["timing_s"]["step"] for own, ray in pairs),
        "whole_step_ratio": median(
            ray / own for own, ray in zip(*(whole[side][WARM_UP:] for side in SIDES), strict=True)
        ),
        "outside_seconds": outside,
        "added_share": median(
            (ray - own) / step["timing_s"]["step"]
            for own, ray, step in zip(*(outside[side] for side in SIDES), later["in_process"], strict=True)
        ),
        "added_seconds": {
            name: median(ray["timing_s"][name] - own["timing_s"][name] for own, ray in pairs)
            for name in phases["in_process"]
        },
        "largest_difference_of_grad_norm": max(
            abs(own["actor"]["grad_norm"] - ray["actor"]["grad_norm"])
            for own, ray in zip(*(records[side] for side in SIDES), strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--prompts", type=int, default=16, help="a step; five answers each")
    parser.add_argument("--response", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--steps", type=int, default=6, help="four or more")
    parser.add_argument("--pixels", type=int, nargs=2, help="of a picture")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a CPU")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options, options.overrides = parser.parse_known_args()
    if options.side:
        run_side(options.side, options.out, options.overrides)
        return
    options.pixels = options.pixels or ((112, 112) if options.tiny else (672, 448))
    result: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        arguments = prepare(root, options)
        records = {}
        for side in SIDES:
            own = [*arguments, f"trainer.save_checkpoint_path={root / side}"]
            out = root / f"{side}.json"
            command = [sys.executable, __file__, "--side", side, "--out", str(out), *own]
            subprocess.run(
                command,
                check=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            )
            log = root / side / "experiment_log.jsonl"
            records[side] = [json.loads(line) for line in log.read_text().splitlines()]
            result[side] = json.loads(out.read_text())
    seconds = ({side: result[side][f"{what}_seconds"] for side in SIDES} for what in ("whole_step", "inside"))
    result |= compared(records, *seconds)
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
