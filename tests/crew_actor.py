"""A process of a crew in its tests; a file of its own, without torch, so that it starts in a second."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import ray

from foveal.cluster.failures import Whereabouts
from foveal.errors import DataError, EngineError, FovealError


class Actor:
    """As `Member`, with stages of its own."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.stopped = -1

    def whereabouts(self) -> Whereabouts:
        node = ray.get_runtime_context().get_node_id()
        return Whereabouts(self.rank, "here", node, "", os.getpid(), os.readlink("/proc/self/fd/2"))

    def double(self, value: int) -> int:
        return 2 * value

    def fail(self, how: str, rank: int) -> None:
        print("something of use", file=sys.stderr, flush=True)
        if self.rank != rank:
            if how != "sleep":
                time.sleep(0.2 if how == "die" else 60)
                raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
            return
        if how == "die":
            time.sleep(1)
            os._exit(3)
        if how == "sleep":
            time.sleep(60)
        raise DataError("the user's mistake") if how == "mistake" else ZeroDivisionError("a bug")

    def count(self, number: int, upto: int) -> Iterator[int]:
        for value in range(upto):
            if self.stopped >= number:
                raise FovealError("stopped")
            if self.rank == 1 and value == 3 and upto == 4:
                raise DataError("the user's mistake")
            time.sleep(0.01)
            yield value

    def hand_over(self) -> None:
        if self.rank == 0:
            time.sleep(60)  # it waits for the other end
        raise EngineError("no room for the weights")

    @ray.method(concurrency_group="control")
    def stop(self, number: int) -> None:
        self.stopped = number

    def close(self) -> None:
        pass

    @ray.method(concurrency_group="control")
    def lines(self) -> list[tuple[str, str]]:
        return [("note", f"from {self.rank}")]
