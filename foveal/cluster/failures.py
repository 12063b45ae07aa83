"""What went wrong in which worker, as one message."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from foveal.errors import FovealError, WorkerError

_TAIL = 15
"""Lines of a worker's output, and as many of its errors, in a message."""
_READING = 20.0
"""Seconds in which another machine must have read a log. Ray needs about as many to know that a machine is gone."""
_AGAIN = (
    "Start the same command again to go on from the last checkpoint, or set trainer.max_restarts to have that done."
)


@dataclass(frozen=True)
class Whereabouts:
    """Of a worker's process.

    Attributes:
        rank: its number; -1 before it has one.
        host: its machine, and node: Ray's id of it, or nothing before it has told.
        gpu: the number of its GPU there, or nothing.
        pid: its id, and log: the file of its errors, on its machine; a pattern for those of Ray's files before it has
            told.
    """

    rank: int
    host: str
    node: str
    gpu: str
    pid: int
    log: str

    def with_rank(self, rank: int) -> Whereabouts:
        return replace(self, rank=rank)

    def is_lost(self) -> bool:
        """Whether its machine is none of the cluster's any more."""
        return bool(self.node) and not any(node["NodeID"] == self.node and node["Alive"] for node in ray.nodes())

    def end_of_log(self) -> str:
        """The last lines of its log, read by a task on its machine."""
        if not self.node:
            return "Where its log is it could not tell."
        strategy = NodeAffinitySchedulingStrategy(self.node, soft=False)
        remote: Any = ray.remote
        read = remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(_tail)
        try:
            lines: list[str] = ray.get(read.remote(self.log), timeout=_READING)
        except (RayError, GetTimeoutError):
            lines = ["(its machine does not answer)"]
        return "\n".join([f"The end of its log, {self.host}:{self.log}:", *(f"  {line}" for line in lines)])


def describe(place: Whereabouts) -> str:
    if place.rank < 0:
        return f"a worker ({place.host}, process {place.pid})" if place.pid else f"a worker ({place.host})"
    gpu = f"GPU {place.gpu}, " if place.gpu else ""
    return f"worker {place.rank} ({place.host}, {gpu}process {place.pid})"


def lead_to(failures: Mapping[int, RayError]) -> int | None:
    """The rank whose failure explains the others': it died, or raised something that isn't about another process."""
    for rank, error in failures.items():
        if isinstance(error, RayActorError):
            return rank
    return next((rank for rank, error in failures.items() if not _is_of_another(_cause(error))), None)


def explain(stage: str, failures: Mapping[int, RayError], places: Sequence[Whereabouts]) -> Exception:
    """The error to raise for what failed in some workers: what the user can cure as it is, all else as WorkerError.

    Args:
        stage: in which it happened.
        failures: by rank, in the order in which they were seen.
    """
    rank = lead_to(failures)
    if rank is None:
        rank = next(iter(failures))
    place, cause = places[rank], _cause(failures[rank])
    if isinstance(cause, RayActorError):
        place = _found(place, str(cause))
        log = place.end_of_log()  # first: until it gives up, Ray may learn that the machine is gone
        if place.is_lost():
            return WorkerError(
                f"{describe(place)} was lost during {stage}: its machine, node {place.node[:12]}, has left the Ray "
                f"cluster. {_AGAIN}"
            )
        return WorkerError(
            f"{describe(place)} died during {stage}: {_reason(cause)}\n{log}\n"
            f"Without a reason there the system may have ended it for want of memory. {_AGAIN}"
        )
    if isinstance(cause, FovealError):
        several = len({other.host for other in places}) > 1
        if several:
            cause.args = (f"{cause} [{describe(place)}]",)
        return cause
    if isinstance(cause, OSError):
        return cause
    return WorkerError(f"{describe(place)} failed during {stage}:\n{str(failures[rank]).strip()}\n{place.end_of_log()}")


def _found(place: Whereabouts, told: str) -> Whereabouts:
    """Where a process was that ended before it could tell: what Ray says of its end."""
    pid, ip = re.search(r"\bpid[:=]\s*(\d+)", told), re.search(r"\bip[:=]\s*([\w.:]+)", told)
    if place.node or not pid or not ip:
        return place
    node = next((node for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == ip[1]), None)
    if node is None:
        return place
    name, number = node["NodeManagerHostname"], pid[1]
    return replace(place, host=name, node=node["NodeID"], pid=int(number), log=f"worker-*-{number}.err")


def _tail(path: str) -> list[str]:
    """The last lines of what a process wrote to its output and its errors."""
    lines: list[str] = []
    if not os.path.isabs(path):  # beside that of this process
        folder = os.path.dirname(os.readlink("/proc/self/fd/2")) if os.path.exists("/proc/self/fd/2") else ""
        path = next(glob.iglob(os.path.join(glob.escape(folder), path)), path)
    for name in (path.removesuffix(".err") + ".out", path):
        try:
            with open(name, "rb") as file:
                file.seek(max(0, file.seek(0, 2) - 16_384))
                text = file.read().decode(errors="replace")
        except OSError as error:
            lines.append(f"({name}: {error.strerror})")
            continue
        lines += [line for line in text.splitlines() if not line.startswith(":")][-_TAIL:]  # what Ray notes for itself
    return lines


def _cause(error: RayError) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) else error


def _reason(error: RayActorError) -> str:
    text = str(error)
    start = text.find("Worker exit type")
    if start < 0:
        return text.strip().splitlines()[-1]
    return " ".join(text[start:].split(". Some common causes")[0].split()) + "."


def _is_of_another(cause: BaseException) -> bool:
    """Whether it says that another process is gone or late."""
    text = f"{type(cause).__name__}: {cause}".lower()
    return any(word in text for word in ("connection closed", "connection reset", "gloo", "nccl", "distbackend"))
