"""What each process that Ray starts for a run has, whatever it holds: a place, a log, and others to meet."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import ray
import torch
import torch.distributed as dist

from foveal.cluster.crew import Line
from foveal.cluster.delivery import Delivery, Inbox, begin_features
from foveal.cluster.failures import Whereabouts
from foveal.cluster.transport import PackedResponses, pack_responses
from foveal.data.processing import Processing
from foveal.masking import without_secrets
from foveal.rollout.engine import RolloutEngine
from foveal.track import console
from foveal.types import Group, Prompt, Sampling


class Actor(ABC):
    """One process among several of its kind. Methods of the concurrency group `control` answer while others are at
    work.

    Args:
        folder: the working directory of the run, where relative paths begin.
    """

    def __init__(self, folder: str) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)
        self.rank = -1
        self._lines: deque[Line] = deque()
        self._store: dist.TCPStore | None = None
        self._inbox = Inbox()
        self._stopped = -1  # number of the last rollout that was asked to stop

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

    def join(self, world: int, address: tuple[str, int], threads: int, timeout: float) -> None:
        """Initialises torch.distributed among those that met, where they are several.

        Args:
            threads: that PyTorch may use on the host.
            timeout: seconds that a collective may take.
        """
        console.divert(self._take_line)
        torch.set_num_threads(threads)
        if world == 1:
            return
        wait = timedelta(seconds=timeout)
        store = self._store or dist.TCPStore(*address, world, is_master=False, timeout=wait)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=world, timeout=wait)

    def rollout(
        self, number: int, delivery: Delivery, uids: list[str], sampling: Sampling, speaks: bool
    ) -> Iterator[tuple[int, PackedResponses]]:
        """Answers prompts that it has got; yields the number of each among `uids`, with its responses.

        Args:
            number: of the rollout, for `stop`.
            speaks: whether its answers are wanted: those of an engine's other processes are the same.
        """
        engine, processing = self._sampler()
        engine.stop_asked = lambda: self._stopped >= number
        self._inbox.take(delivery)
        prompts = [self._inbox.prompts[uid] for uid in uids]
        begin_features(processing, prompts)
        order = {uid: number for number, uid in enumerate(uids)}
        for group in self._sample(prompts, sampling):
            if speaks:
                yield order[group.prompt.uid], pack_responses(group.responses)

    @abstractmethod
    def _sampler(self) -> tuple[RolloutEngine, Processing]:
        """The engine, and what makes its prompts' features."""

    @abstractmethod
    def _sample(self, prompts: list[Prompt], sampling: Sampling) -> Iterator[Group]: ...

    @ray.method(concurrency_group="control")
    def stop(self, number: int) -> None:
        """Lets a rollout end at the next token, in failure."""
        self._stopped = number

    @ray.method(concurrency_group="control")
    def sees(self, path: Path) -> bool:
        return path.exists()

    @ray.method(concurrency_group="control")
    def lines(self) -> list[Line]:
        """What the process had to say since the last call."""
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def _take_line(self, kind: str, text: str) -> None:
        print(f"{kind}: {without_secrets(text)}", flush=True)  # into this process's log
        if self.rank == 0 or kind != "note":
            self._lines.append((kind, text))
