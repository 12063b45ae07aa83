"""Many workers, each in a process of its own on its own device, under Ray; and engines on devices of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray

from foveal.cluster.balance import training_cost
from foveal.cluster.crew import Crew
from foveal.cluster.dispatch import Dispatch
from foveal.cluster.engine_member import EngineMember
from foveal.cluster.engines import Engines, sampled
from foveal.cluster.launch import gather, start
from foveal.cluster.member import Member
from foveal.cluster.ray_cluster import Cluster
from foveal.cluster.topology import engine_size, team_size
from foveal.config import Config
from foveal.data.processing import Processing
from foveal.errors import ConfigError
from foveal.models.flops import FlopCounter
from foveal.track.timing import BusyClock
from foveal.train.meter import combined
from foveal.types import Group, Metrics, Prompt, Sampling

_CLOSING = 20.0
"""Seconds in which engines may end by themselves."""


class RayWorkers:
    """As `Workers`, over Ray actors with one device each.

    Args:
        options: further arguments of `Worker`.

    Raises:
        ConfigError, WorkerError: as `Cluster`.
        FovealError: what a worker raised when it was built.
    """

    def __init__(self, config: Config, processing: Processing, options: dict[str, Any]) -> None:
        self.config = config
        self.processing = processing
        self._engine_size = engine_size(config)
        self._cluster = Cluster(config)
        self._crew: Crew | None = None
        self._engines: Engines | None = None
        trained, apart = config.training_devices, config.cluster.rollout_devices > 0
        in_step = self._engine_size > 1
        try:
            self._crew = gather(config, self._cluster, Member, range(trained), in_step=in_step)
            if options["train"]:
                self._check_folder(config.trainer.checkpoint_dir.absolute())
            if apart:
                own = range(trained, config.trainer.devices)
                self._engines = Engines(config, gather(config, self._cluster, EngineMember, own, in_step=in_step))
            counter = self._start(options)
        except BaseException:
            self._end(0)  # whoever is still busy with starting would not hear
            raise
        self._ahead = options["train"] and config.trainer.async_rollout
        self._clock = BusyClock()
        self._dispatch = Dispatch(
            trained,
            team_size=team_size(config),
            engine_size=1 if apart else self._engine_size,
            cost=self._cost_by(counter),
            batch_size=config.worker.actor.global_batch_size,
            with_logprobs=config.algorithm.correction != "none",
        )

    def _cost_by(self, counter: FlopCounter) -> Callable[[Group], float]:
        processing = self.processing
        media = set(processing.placeholders.values())
        shared_prefix = self.config.worker.actor.shared_prefix
        merge = math.isqrt(processing.merge_length)
        return partial(training_cost, counter=counter, media_ids=media, merge=merge, shared_prefix=shared_prefix)

    def _check_folder(self, folder: Path) -> None:
        """Raises ConfigError where a machine doesn't see the run's folder, which all workers write into."""
        with TemporaryDirectory(prefix=".seen_", dir=folder) as mark:
            found = self._running.call("looking at the run's folder", "sees", lambda rank: (Path(mark),))
        blind = sorted({place.host for place, sees in zip(self._running.places, found, strict=True) if not sees})
        if blind:
            raise ConfigError(
                f"trainer.save_checkpoint_path: {folder} is not on a file system that {', '.join(blind)} shares, and "
                "all machines write checkpoints into it; give a folder that all of them see."
            )

    def _start(self, options: dict[str, Any]) -> FlopCounter:
        shared = ray.put((self.config, self.processing, options))
        if self._engines is None:
            results, _ = start(self.config, [self._running], shared)
        else:
            results, addresses = start(self.config, [self._running, self._engines.crew], shared)
            self._engines.connect(self._running, addresses[0], results[1][0])
        counter: FlopCounter = results[0][0]
        return counter

    # -- the trainer's calls ------------------------------------------------------------------------------------

    def rollout(self, prompts: list[Prompt], sampling: Sampling) -> Iterator[Group]:
        """As `Workers.rollout`; each prompt goes to one engine.

        Raises:
            EngineError: beside what an engine raises, where one of its own devices has died: the weights are safe.
        """
        if self._engines is None:
            answers = sampled(self._running, self._dispatch, prompts, sampling)
        else:
            if not self._ahead:
                self.hand_over()
            answers = self._engines.rollout(prompts, sampling)
        skip = self.config.worker.reward.skip_special_tokens
        for group in answers:
            self.processing.decode(group, skip_special_tokens=skip)
            yield group

    def hand_over(self) -> None:
        """As `Workers.hand_over`; without devices of their own engines take the weights when they wake up."""
        if self._engines is not None:
            with self._clock.busy():
                self._engines.hand_over()

    def old_logprobs(self, groups: Sequence[Group]) -> None:
        self._run("old_logprobs", "the pass for old_logprobs", groups, {"old_logprobs"})

    def ref_logprobs(self, groups: Sequence[Group]) -> None:
        self._run("ref_logprobs", "the pass for ref_logprobs", groups, {"ref_logprobs"})

    def values(self, groups: Sequence[Group]) -> None:
        self._run("values", "the critic's values", groups, {"values"})

    def update_critic(self, groups: Sequence[Group], step: int, total_steps: int) -> Metrics:
        arguments = {"step": step, "total_steps": total_steps}
        batch = self.config.worker.critic.global_batch_size
        return self._run("update_critic", "the critic's update", groups, {"values", "returns"}, arguments, batch)

    def update(self, groups: Sequence[Group], step: int, total_steps: int, kl_coef: float) -> Metrics:
        arguments = {"step": step, "total_steps": total_steps, "kl_coef": kl_coef}
        needed = {"old_logprobs", "ref_logprobs", "advantages"}
        batch = self.config.worker.actor.global_batch_size
        metrics = self._run("update", "the policy's update", groups, needed, arguments, batch)
        self._dispatch.end_step()
        self._weights_changed()
        return metrics

    def _run(
        self,
        method: str,
        stage: str,
        groups: Sequence[Group],
        needed: set[str],
        arguments: dict[str, Any] | None = None,
        batch_size: int | None = None,
    ) -> Metrics:
        """One pass of all workers.

        Args:
            method: of `Worker`, with its arguments; stage: what it is, for messages.
            needed: columns that it reads, or fills where they are absent.
            batch_size: groups of an optimizer step, where it takes some.
        """
        deliveries = self._dispatch.to_train(groups, needed)

        def of_rank(rank: int) -> tuple[Any, ...]:
            sizes = {} if batch_size is None else {"sizes": self._dispatch.sizes(rank, batch_size)}
            return method, deliveries[rank], {**(arguments or {}), **sizes}

        with self._clock.busy():
            results = self._running.call(stage, "run", of_rank)
        self._dispatch.take_columns([columns for _, columns in results])
        metrics: Metrics = results[0][0]  # of all workers together
        return metrics

    def performance(self, timings: dict[str, float]) -> Metrics:
        """Of all workers together: rates added up, shares of the peak averaged, the highest memory; with engines apart
        also for how much of the step (`timings`) either side did nothing."""
        found = self._running.call("measuring", "performance", lambda rank: (timings,))
        metrics = combined(found, team_size=self._dispatch.team_size, engine_size=self._dispatch.engine_size)
        if self._engines is not None:
            metrics |= self._engines.performance()
            if seconds := timings.get("step"):
                metrics["perf/idle_s/trainer"] = self._clock.idle(seconds)
                metrics["perf/idle_s/engine"] = self._engines.clock.idle(seconds)
        return metrics

    def start_profile(self, step: int, folder: Path) -> None:
        """As `Worker.start_profile`, of the first worker."""
        self._running.call("starting a profile", "start_profile", lambda rank: (step, folder))

    def stop_profile(self, timings: dict[str, float]) -> str:
        found: list[str] = self._running.call("writing the profile", "stop_profile", lambda rank: (timings,))
        return found[0]

    def snapshot(self, *, model_only: bool, copied: bool) -> RemoteSnapshot:
        """As `Worker.snapshot`; the states stay where they are."""
        taken = self._running.call("taking a snapshot", "snapshot", lambda rank: (model_only, copied))
        return RemoteSnapshot(self._running, all(taken))

    def load(self, folder: Path, step: int) -> None:
        self._running.call("loading the checkpoint", "load", lambda rank: (folder.absolute(), step))
        self._weights_changed()

    def close(self) -> None:
        """Ends the engines, the processes, and what was started of Ray."""
        self._end(_CLOSING)

    def _end(self, patience: float) -> None:
        engines, self._engines = self._engines, None
        if engines is not None:
            engines.close(patience)
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close(patience)
        self._cluster.close()

    def _weights_changed(self) -> None:
        if self._engines is not None:
            self._engines.are_stale = True

    @property
    def _running(self) -> Crew:
        assert self._crew is not None, "the workers are closed"
        return self._crew


@dataclass(frozen=True)
class RemoteSnapshot:
    """What the workers took; as `Snapshot`."""

    crew: Crew
    copied: bool

    def write(self, folder: Path) -> None:
        """Lets every worker write its part.

        Raises:
            OSError: the disk refused.
            WorkerError: a worker failed.
        """
        self.crew.call(f"saving {folder.stem}", "write", lambda rank: (folder.absolute(),), beside=self.copied)
