"""The process of one worker, as Ray starts it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch

from foveal.cluster.actor import Actor
from foveal.cluster.delivery import Delivery
from foveal.cluster.topology import team_size
from foveal.cluster.transport import PackedColumn
from foveal.cluster.weight_channel import WeightChannel, WeightSender
from foveal.cluster.worker import Worker
from foveal.config import Config
from foveal.data.processing import Processing
from foveal.masking import remember
from foveal.models.flops import FlopCounter
from foveal.rollout.engine import RolloutEngine
from foveal.train.place import Place, take_place
from foveal.train.processes import saving_group
from foveal.train.snapshot import Snapshot
from foveal.types import Group, Metrics, Prompt, Sampling


class Member(Actor):
    """A worker among several."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._snapshot: Snapshot | None = None
        self._sender: WeightSender | None = None

    def start(
        self,
        world: int,
        address: tuple[str, int],
        threads: int,
        timeout: float,
        shared: tuple[Config, Processing, dict[str, Any]],
    ) -> FlopCounter:
        """Joins the others and builds the worker.

        Args:
            world, address, threads, timeout: as of `Actor.join`.
            shared: arguments of every `Worker`, the last of them by name.

        Returns:
            what counts the operations of a pass through the policy.
        """
        config, processing, options = shared
        remember(config.model_dump())  # for this process's log
        self.join(world, address, threads, timeout)
        saving_group()
        place = take_place(team_size(config)) if world > 1 else Place()
        self.worker = Worker(config, processing, place=place, **options)
        return self.worker.meter.counter(self.worker.scorer)

    def connect(
        self, address: tuple[str, int], ends: int, timeout: float, dtype: torch.dtype | None, takes_adapters: bool
    ) -> None:
        """Takes the sending end of the channel to engines elsewhere, in the first process.

        Args:
            ends: of the channel, this one and the engines'.
            dtype, takes_adapters: the engines'.
        """
        first = self.rank == 0
        channel = WeightChannel(address, 0, ends, self.worker.device, timeout) if first else None
        self._sender = WeightSender(channel, dtype, takes_adapters)

    def hand_over(self) -> None:
        """Sends today's weights to the engines elsewhere; all processes together."""
        assert self._sender is not None
        self._sender.begin()
        self.worker.hand_over_weights(self._sender, has_base=self._sender.has_base)
        self._sender.end()

    # -- the trainer's calls ------------------------------------------------------------------------------------

    def _sampler(self) -> tuple[RolloutEngine, Processing]:
        assert self.worker.engine is not None
        return self.worker.engine, self.worker.processing

    def _sample(self, prompts: list[Prompt], sampling: Sampling) -> Iterator[Group]:
        return self.worker.sample(prompts, sampling)

    def run(self, stage: str, delivery: Delivery, arguments: dict[str, Any]) -> tuple[Metrics, dict[str, PackedColumn]]:
        """A pass of the worker over its groups; returns what it returns, and the columns that it has filled."""
        if delivery.groups is not None and self.worker.engine is None:  # another step, also if the last had no update
            self.worker.forget_step()
        self._inbox.take(delivery)
        metrics: Metrics = getattr(self.worker, stage)(self._inbox.groups, **arguments) or {}
        return metrics, self._inbox.new_columns()

    def performance(self, timings: dict[str, float]) -> Metrics:
        return self.worker.performance(timings)

    def start_profile(self, step: int, folder: Path) -> None:
        """The first worker is recorded: the others do the same on other rows."""
        if self.rank == 0:
            self.worker.start_profile(step, folder)

    def stop_profile(self, timings: dict[str, float]) -> str:
        return self.worker.stop_profile(timings) if self.rank == 0 else ""

    def snapshot(self, model_only: bool, copied: bool) -> bool:
        """Takes what a checkpoint shall hold; returns whether it is a copy."""
        self._snapshot = self.worker.snapshot(model_only=model_only, copied=copied)
        return self._snapshot.copied

    def load(self, folder: Path, step: int) -> None:
        self.worker.load(folder, step)
        if self._sender is not None:
            self._sender.has_base = False

    def close(self) -> None:
        if hasattr(self, "worker"):  # else it did not start
            self.worker.close()

    # -- beside them --------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="saving")
    def write(self, folder: Path) -> None:
        """Writes this process's part of the checkpoint that `snapshot` took."""
        assert self._snapshot is not None
        try:
            self._snapshot.write(folder)
        finally:
            self._snapshot = None
