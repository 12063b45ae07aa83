"""Where the trainer's time and memory go: the kernels of a micro-batch, and peaks with and without offload."""

from __future__ import annotations

import gc
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.engine_profiles import kernel_table
from foveal.cluster.worker import Worker
from foveal.train.offload import phase_parkings
from foveal.train.optim import take_step
from foveal.train.packing import Part
from foveal.types import Group

GIB = 2**30
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def timed(work: Callable[..., Any], *arguments: Any) -> float:
    """The seconds that `work` takes, the device's part included."""
    _synchronize()
    started = time.perf_counter()
    work(*arguments)
    _synchronize()
    return time.perf_counter() - started


def _synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def update(worker: Worker, groups: list[Group], sizes: list[int] | None = None) -> None:
    metrics = worker.update(groups, 1, 100, 0.0, sizes)
    assert "actor/grad_norm" in metrics, f"no optimizer step was taken: {metrics}"
    assert "actor/not_finite_steps" not in metrics, metrics


def profile(worker: Worker, groups: list[Group], count: int) -> str:
    """The kernels of forward and backward of some micro-batches one after the other, the share of time that the device
    is busy, and the calls of the driver in which the host spends most."""
    assert worker.policy is not None
    packer, scorer = worker.policy.packer, worker.policy.scorer.train()
    warm, *measured = packer.split(groups)[: count + 1]
    measured = measured or [warm]

    def work(micro_batches: list[list[Part]]) -> None:
        for number, parts in enumerate(micro_batches, start=1):
            if packer.peers:
                packer.peers.before_backward(last=number == len(micro_batches))
            pack = packer.build(parts)
            scores = scorer(pack, with_entropy=True)
            (scores.logprobs * pack.column("advantages")).mean().backward()

    work([warm])
    on = "CUDA" if DEVICE.type == "cuda" else "CPU"
    with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, on)], acc_events=True) as profiler:
        took = timed(work, measured)
    of_optimizer = timed(take_step, worker.policy.optimizer, 1.0)
    scorer.eval()
    busy, _, table = kernel_table(profiler)
    tokens = sum(map(packer.tokens, measured))
    each = f"{tokens / len(measured):,.0f} tokens: {took / len(measured) * 1e3:.1f} ms each"
    head = f"{len(measured)} micro-batches of {each}, busy {busy / took / 1e6:.1%}"
    return f"{head}; optimizer step {of_optimizer * 1e3:.0f} ms\n{table}\n{_driver_calls(profiler)}"


def _driver_calls(profiler: torch.profiler.profile) -> str:
    spent: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or []:
        if event.name.startswith("cu") and event.device_type == torch.autograd.DeviceType.CPU:
            spent[event.name].append(event.time_range.elapsed_us() / 1e3)
    longest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:5]
    return "host: " + ", ".join(f"{sum(t):.1f} ms in {len(t)} × {name}" for name, t in longest)


def measure_memory(worker: Worker, groups: list[Group], *, offload: bool) -> dict[str, float]:
    """GiB of the device: weights; resting, in a rollout and at the peaks of both passes, with optimizer states."""
    found: dict[str, float] = {"weights": allocated()}
    update(worker, groups)  # brings the optimizer's states
    gc.collect()
    found["at_rest"] = allocated()
    if offload:
        assert worker.policy is not None
        absent: dict[str, Any] = {"reference": None, "critic": None, "critic_optimizer": None}
        parts = {"actor": worker.model, "optimizer": worker.policy.optimizer}
        # Not the worker's own: its engine samples with the trainer's weights, where vLLM has its own.
        worker.parked = phase_parkings(worker.config, DEVICE, **parts, **absent)
        for turn in ("first", "second"):  # the first one takes host memory
            found[f"away_seconds_{turn}"] = sum(timed(parking.away) for parking in worker.parked.values())
            found["in_rollout"] = allocated()
            if turn == "first":
                found["back_seconds"] = sum(timed(parking.back) for parking in worker.parked.values())
    found.setdefault("in_rollout", found["at_rest"])
    worker.performance({})
    worker.old_logprobs(groups)
    update(worker, groups)
    peaks = worker.performance({})
    assert worker.policy is not None
    packers = worker.policy.packer, worker.policy.experience_packer
    found |= {"update_budget": packers[0].budget, "logprobs_budget": packers[1].budget}
    found["began_again"] = float(any(packer.ceiling < sys.maxsize for packer in packers))
    found |= {f"peak_{name.rpartition('/')[2]}": value for name, value in peaks.items() if "peak_memory" in name}
    return {name: round(value, 2) for name, value in found.items()}


def allocated() -> float:
    """GiB of the device that tensors take."""
    return torch.cuda.memory_allocated() / GIB if DEVICE.type == "cuda" else 0.0
