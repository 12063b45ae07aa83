"""What the trainer asks of its workers, and how they are started."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from foveal.config import Config
from foveal.data.processing import Processing
from foveal.types import Group, Metrics, Prompt, Sampling


class Snapshot(Protocol):
    """What a checkpoint will hold, taken at one moment.

    Attributes:
        copied: whether training may go on while it is written.
    """

    @property
    def copied(self) -> bool: ...

    def write(self, folder: Path) -> None: ...


class Workers(Protocol):
    """One worker in this process, or many elsewhere: the trainer can't tell.

    `rollout` hands out groups while others are still being sampled, which is what lets generation overlap with scoring.
    It samples with today's weights; in a run with `trainer.async_rollout`, where it goes on in another thread while the
    policy is updated, with those of the last `hand_over`. The passes fill columns of the groups' responses.
    """

    def hand_over(self) -> None: ...

    def rollout(self, prompts: list[Prompt], sampling: Sampling) -> Iterator[Group]: ...

    def old_logprobs(self, groups: Sequence[Group]) -> None: ...

    def ref_logprobs(self, groups: Sequence[Group]) -> None: ...

    def values(self, groups: Sequence[Group]) -> None: ...

    def update_critic(self, groups: Sequence[Group], step: int, total_steps: int) -> Metrics: ...

    def update(self, groups: Sequence[Group], step: int, total_steps: int, kl_coef: float) -> Metrics: ...

    def performance(self, timings: dict[str, float]) -> Metrics: ...

    def start_profile(self, step: int, folder: Path) -> None: ...

    def stop_profile(self, timings: dict[str, float]) -> str: ...

    def snapshot(self, *, model_only: bool, copied: bool) -> Snapshot: ...

    def load(self, folder: Path, step: int) -> None: ...

    def close(self) -> None: ...


def start_workers(
    config: Config,
    processing: Processing,
    *,
    train: bool,
    checkpoint: Path | None = None,
    weights: Path | None = None,
    images: int = 0,
    token_ceiling: int = sys.maxsize,
) -> Workers:
    """Starts what `trainer.nnodes` and `trainer.n_gpus_per_node` ask for; with one device, a worker in this process.

    Args:
        checkpoint, weights, images, token_ceiling: as in `Worker`.
    """
    options: dict[str, Any] = {
        "train": train,
        "checkpoint": checkpoint,
        "weights": weights,
        "images": images,
        "token_ceiling": token_ceiling,
    }
    if config.trainer.devices > 1:
        from foveal.cluster.ray_group import RayWorkers

        return RayWorkers(config, processing, options)
    from foveal.cluster.worker import Worker

    return Worker(config, processing, **options)
