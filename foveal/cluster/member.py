"""The process of one worker, as Ray starts it."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from foveal.cluster.crew import Line
from foveal.cluster.delivery import Delivery, Inbox
from foveal.cluster.failures import Whereabouts
from foveal.cluster.topology import team_size
from foveal.cluster.transport import PackedColumn, PackedResponses, pack_responses
from foveal.cluster.worker import Worker
from foveal.config import Config
from foveal.data.processing import Processing
from foveal.models.flops import FlopCounter
from foveal.track import console
from foveal.train.place import take_place
from foveal.train.processes import saving_group
from foveal.train.snapshot import Snapshot
from foveal.types import Metrics, Sampling


class Member:
    """A worker among several. Methods of the concurrency group `control` answer while others are at work.

    Args:
        folder: the working directory of the run, where relative paths begin.
    """

    def __init__(self, folder: str) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)
        self._lines: deque[Line] = deque()
        self._inbox = Inbox()
        self._snapshot: Snapshot | None = None
        self._store: dist.TCPStore | None = None
        self._stopped = -1  # number of the last rollout that was asked to stop
        self.rank = -1

    def whereabouts(self) -> Whereabouts:
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        log = os.readlink("/proc/self/fd/2") if os.path.exists("/proc/self/fd/2") else ""
        return Whereabouts(self.rank, socket.gethostname(), context.get_node_id(), ",".join(gpus), os.getpid(), log)

    def meet(self, rank: int, world: int, timeout: float) -> tuple[str, int] | None:
        """Tells the process its rank; the first one becomes the place where all find each other, and returns where."""
        self.rank = rank
        if rank:
            return None
        host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(
            host, 0, world, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )
        return host, self._store.port

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
            threads: that PyTorch may use on the host.
            timeout: seconds that a collective may take.
            shared: arguments of every `Worker`, the last of them by name.

        Returns:
            what counts the operations of a pass through the policy.
        """
        config, processing, options = shared
        console.divert(self._take_line)
        torch.set_num_threads(threads)
        wait = timedelta(seconds=timeout)
        store = self._store or dist.TCPStore(*address, world, is_master=False, timeout=wait)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=world, timeout=wait)
        saving_group()
        place = take_place(team_size(config))
        self.worker = Worker(config, processing, place=place, **options)
        return self.worker.meter.counter(self.worker.scorer)

    # -- the trainer's calls ------------------------------------------------------------------------------------

    def rollout(
        self, number: int, delivery: Delivery, uids: list[str], sampling: Sampling, speaks: bool
    ) -> Iterator[tuple[int, PackedResponses]]:
        """Answers prompts that it has got; yields the number of each among `uids`, with its responses.

        Args:
            number: of the rollout, for `stop`.
            speaks: whether its answers are wanted: those of an engine's other processes are the same.
        """
        self.worker.engine.stop_asked = lambda: self._stopped >= number
        self._inbox.take(delivery)
        order = {uid: number for number, uid in enumerate(uids)}
        for group in self.worker.sample([self._inbox.prompts[uid] for uid in uids], sampling):
            if speaks:
                yield order[group.prompt.uid], pack_responses(group.responses)

    def run(self, stage: str, delivery: Delivery, arguments: dict[str, Any]) -> tuple[Metrics, dict[str, PackedColumn]]:
        """A pass of the worker over its groups; returns what it returns, and the columns that it has filled."""
        self._inbox.take(delivery)
        metrics: Metrics = getattr(self.worker, stage)(self._inbox.groups, **arguments) or {}
        return metrics, self._inbox.new_columns()

    def performance(self, timings: dict[str, float]) -> Metrics:
        return self.worker.performance(timings)

    def snapshot(self, model_only: bool, copied: bool) -> bool:
        """Takes what a checkpoint shall hold; returns whether it is a copy."""
        self._snapshot = self.worker.snapshot(model_only=model_only, copied=copied)
        return self._snapshot.copied

    def load(self, folder: Path, step: int) -> None:
        self.worker.load(folder, step)

    def close(self) -> None:
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

    @ray.method(concurrency_group="control")
    def stop(self, number: int) -> None:
        """Lets a rollout end at the next token, in failure."""
        self._stopped = number

    @ray.method(concurrency_group="control")
    def sees(self, path: Path) -> bool:
        return path.exists()

    @ray.method(concurrency_group="control")
    def lines(self) -> list[Line]:
        """What the worker had to say since the last call."""
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def _take_line(self, kind: str, text: str) -> None:
        print(f"{kind}: {text}", flush=True)  # into this process's log
        if self.rank == 0 or kind != "note":
            self._lines.append((kind, text))
