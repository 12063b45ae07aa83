"""Many workers, each in a process of its own on its own device, under Ray."""

from __future__ import annotations

import math
import os
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
from foveal.cluster.failures import Whereabouts
from foveal.cluster.member import Member
from foveal.cluster.ray_cluster import Cluster
from foveal.cluster.topology import engine_size, team_size
from foveal.cluster.transport import unpack_responses
from foveal.config import Config
from foveal.data.processing import Processing
from foveal.errors import CheckpointError, ConfigError, WorkerError
from foveal.models.flops import FlopCounter
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
        try:
            self._crew = self._gather()
            if options["train"]:
                self._check_folder(config.trainer.checkpoint_dir.absolute())
            counter = self._start(options)
        except BaseException:
            self.close()
            raise

        self._dispatch = Dispatch(
            config.trainer.devices,
            team_size=team_size(config),
            engine_size=self._engine_size,
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

    def _gather(self) -> Crew:
        """Starts the processes; ranks go by machine, and on each by GPU."""
        trainer = self.config.trainer
        remote: Any = ray.remote
        actor_class = remote(concurrency_groups={"control": 1, "saving": 1})(Member)
        actors = [
            self._cluster.start(actor_class, node, os.getcwd())
            for node in range(trainer.nnodes)
            for _ in range(trainer.n_gpus_per_node)
        ]
        unplaced = [Whereabouts(-1, "a machine of the cluster", "", "", 0, "")] * len(actors)
        self._crew = Crew(actors, unplaced, trainer.stage_timeout)  # to be ended where this fails
        places = self._crew.call("the start of the processes", "whereabouts")
        order = sorted(
            range(len(actors)), key=lambda i: (places[i].host, places[i].node, len(places[i].gpu), places[i].gpu, i)
        )
        return Crew(
            [actors[i] for i in order],
            [places[i].with_rank(rank) for rank, i in enumerate(order)],
            trainer.stage_timeout,
            stoppable=self._engine_size == 1,  # the processes of one engine would stop at different tokens
        )

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
        crew, config = self._running, self.config
        timeout = config.trainer.stage_timeout + 60.0  # the trainer is to notice first
        world = config.trainer.devices
        address = crew.call("the start of the workers", "meet", lambda rank: (rank, world, timeout))[0]
        threads = max(1, (os.cpu_count() or 1) // config.trainer.n_gpus_per_node)
        shared = ray.put((config, self.processing, options))

        def arguments(rank: int) -> tuple[Any, ...]:
            return world, address, threads, timeout, shared

        counter: FlopCounter = crew.call("the start of the workers", "start", arguments)[0]
        return counter

    # -- the trainer's calls ------------------------------------------------------------------------------------

    def rollout(self, prompts: list[Prompt], sampling: Sampling) -> Iterator[Group]:
        """As `Workers.rollout`; each prompt goes to one engine."""
        shares = self._dispatch.share_prompts(prompts)

        def arguments(rank: int) -> tuple[Any, ...]:
            own = shares[rank]
            speaks = rank % self._dispatch.engine_size == 0
            return self._dispatch.to_sample(rank, own), [prompt.uid for prompt in own], sampling, speaks

        skip = self.config.worker.reward.skip_special_tokens
        for rank, (number, packed) in self._running.stream("sampling", "rollout", arguments):
            group = Group(shares[rank][number], unpack_responses(packed))
            self.processing.decode(group, skip_special_tokens=skip)
            yield group

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

        results = self._running.call(stage, "run", of_rank)
        self._dispatch.take_columns([columns for _, columns in results])
        metrics: Metrics = results[0][0]  # of all workers together
        return metrics

    def performance(self, timings: dict[str, float]) -> Metrics:
        """Of all workers together: rates added up, shares of the peak averaged, the highest memory."""
        found = self._running.call("measuring", "performance", lambda rank: (timings,))
        return combined(found, team_size=self._dispatch.team_size, engine_size=self._dispatch.engine_size)

    def snapshot(self, *, model_only: bool, copied: bool) -> RemoteSnapshot:
        """As `Worker.snapshot`; the states stay where they are."""
        taken = self._running.call("taking a snapshot", "snapshot", lambda rank: (model_only, copied))
        return RemoteSnapshot(self._running, all(taken))

    def load(self, folder: Path, step: int) -> None:
        self._running.call("loading the checkpoint", "load", lambda rank: (folder.absolute(), step))

    def close(self) -> None:
        """Ends the engines, the processes, and what was started of Ray."""
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close(_CLOSING)
        self._cluster.close()

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
            CheckpointError: a worker failed.
        """
        try:
            self.crew.call("saving", "write", lambda rank: (folder.absolute(),), beside=self.copied)
        except WorkerError as error:
            raise CheckpointError(f"the checkpoint is not written: {error}") from error


def combined(found: Sequence[Metrics], *, team_size: int, engine_size: int) -> Metrics:
    """The metrics of workers as one: rates added up, shares of the device's peak averaged, the highest memory.

    Args:
        team_size, engine_size: workers that share each sequence in a pass, or an engine, and count the same work.
    """
    metrics: Metrics = {}
    for name in sorted({name for own in found for name in own}):
        size = engine_size if name.endswith("/gen") else team_size
        values = [own.get(name, 0.0) for own in found]
        if "memory" in name:
            metrics[name] = max(values)
        else:
            total = sum(values) / size
            metrics[name] = total / len(found) if "mfu_" in name else total
    return metrics
