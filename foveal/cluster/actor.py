"""What each process that Ray starts for a run has, whatever it holds: a place, a log, and others to meet."""

from __future__ import annotations

import os
import socket
from collections import deque
from datetime import timedelta
from pathlib import Path

import ray
import torch
import torch.distributed as dist

from foveal.cluster.crew import Line
from foveal.cluster.failures import Whereabouts
from foveal.track import console


class Actor:
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
        print(f"{kind}: {text}", flush=True)  # into this process's log
        if self.rank == 0 or kind != "note":
            self._lines.append((kind, text))
