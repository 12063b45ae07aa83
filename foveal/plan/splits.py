"""How many of the GPUs may sample, where engines have GPUs of their own (`cluster.rollout_devices`)."""

from __future__ import annotations

from dataclasses import dataclass

from foveal.cluster.topology import division_problems
from foveal.config import Config
from foveal.plan.gpus import Gpu
from foveal.plan.memory import plan_memory
from foveal.plan.rows import Lengths
from foveal.plan.seconds import plan_seconds

_WORTH = 0.97
"""Of a step's seconds, that another split must not need more than to be told of."""


@dataclass(frozen=True)
class Split:
    """So many GPUs for engines alone, and the seconds of a step then."""

    rollout_devices: int
    step: float


def possible_splits(config: Config) -> list[int]:
    """Other values of `cluster.rollout_devices` that the devices can be divided by; none where it is 0."""
    own = config.cluster.rollout_devices
    others = range(1, config.trainer.devices) if own else range(0)
    return [number for number in others if number != own and not division_problems(with_split(config, number), "vllm")]


def with_split(config: Config, rollout_devices: int) -> Config:
    config = config.model_copy(deep=True)
    config.cluster.rollout_devices = rollout_devices
    return config


def better_split(config: Config, gpu: Gpu, lengths: Lengths, step: float) -> Split | None:
    """The split that fits and has the shortest steps; None where they are hardly shorter than `step` seconds."""
    found = []
    for number in possible_splits(config):
        changed = with_split(config, number)
        memory = plan_memory(changed, gpu, lengths)
        if memory.fits:
            found.append(Split(number, plan_seconds(changed, gpu, lengths, memory).step))
    best = min(found, key=lambda split: split.step, default=None)
    return best if best is not None and best.step < _WORTH * step else None
