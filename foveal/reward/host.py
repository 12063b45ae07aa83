"""A reward process on another machine of the Ray cluster, used like one that runs here."""

from __future__ import annotations

import hashlib
import os
import queue
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from foveal.cluster.machines import Machine
from foveal.errors import RewardError
from foveal.reward.contract import FunctionInfo, FunctionSpec, Outcome, PictureRequest
from foveal.reward.places import PlaceLost
from foveal.reward.process import START_LIMIT, Call, RewardProcess
from foveal.track import console

_APPEARING = 60.0
"""Seconds in which a CPU must be free and a process of Ray's started."""
_GRACE = 60.0
"""Seconds beyond the time limit, which is kept over there, until a silent machine is given up."""
_CLOSING = 5.0
"""The same for a machine whose process was to end."""
_LOOK = 1.0

Line = tuple[str, str]


@dataclass(frozen=True)
class Reply:
    """What one call did to the process.

    Attributes:
        lines: kind and text of what there is to say in the terminal.
    """

    outcomes: list[Outcome]
    alive: bool
    outgrown: bool
    lines: list[Line]


class HostActor:
    """Owns the reward process over there; what is local for it keeps limits and ends what hangs.

    Pictures are asked for one by one, as a process does: most functions look at none.
    """

    def __init__(self, folder: str, search: Sequence[str], environment: dict[str, str]) -> None:
        with suppress(OSError):  # then a file or a module is missing here, and `load` says which
            os.chdir(folder)
        sys.path.extend(path for path in search if path not in sys.path)
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        self._process: RewardProcess | None = None
        self._thread = ThreadPoolExecutor(1)
        self._replies: queue.SimpleQueue[PictureRequest | Future[Reply]] = queue.SimpleQueue()
        self._given: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._lines: list[Line] = []
        console.divert(lambda kind, text: self._lines.append((kind, text)))

    def load(self, spec: FunctionSpec, digest: str, memory_limit: float | None) -> FunctionInfo | RewardError:
        """Replaces the process by a fresh one, in which the function is loaded."""
        self.close()
        if file_digest(spec) != digest:
            return RewardError(
                f"{spec.path} is not there, or not the same; put it where all machines see it under this path"
            )
        self._process = RewardProcess(spec, memory_limit)
        try:
            return self._process.load()
        except RewardError as error:
            return error

    def call(self, call: Call) -> Reply | PictureRequest:
        """As `RewardProcess.call`, up to the first picture that it asks for; `give` goes on."""
        future = self._thread.submit(self._call, call)
        future.add_done_callback(self._replies.put)
        return self._next()

    def give(self, picture: bytes) -> Reply | PictureRequest:
        self._given.put(picture)
        return self._next()

    def kill(self) -> None:
        """May be called during any other call."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _call(self, call: Call) -> Reply:
        assert self._process is not None
        outcomes = self._process.call(call, self._fetch)
        lines, self._lines = self._lines, []
        return Reply(outcomes, self._process.alive, self._process.outgrown, lines)

    def _next(self) -> Reply | PictureRequest:
        reply = self._replies.get()
        return reply if isinstance(reply, PictureRequest) else reply.result()

    def _fetch(self, request: PictureRequest) -> bytes:
        self._replies.put(request)
        return self._given.get()


class Host:
    """The actor that owns the processes of one slot, one after the other; it takes a CPU of its machine.

    Raises (each method that waits):
        PlaceLost: the machine left, or Ray cannot run the actor there.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._appeared = False
        self._ending: float | None = None
        remote: Any = ray.remote
        strategy = NodeAffinitySchedulingStrategy(machine.node, soft=False)
        options = {"num_cpus": 1, "max_restarts": 0, "max_concurrency": 2, "scheduling_strategy": strategy}
        self._actor = remote(HostActor).options(**options).remote(os.getcwd(), list(sys.path), _environment())

    def ask(self, method: str, *arguments: Any, limit: float) -> Any:
        """Calls a method of the actor and waits for its result for at most `limit` seconds."""
        if not self._appeared:
            self._wait(self._actor.__ray_ready__.remote(), _APPEARING, "no CPU is free there")
            self._appeared = True
        return self._wait(getattr(self._actor, method).remote(*arguments), limit, "nothing came back")

    def kill(self) -> None:
        """Has the process and everything it started ended for good, without waiting for that."""
        self._ending = time.monotonic()
        with suppress(RayError, ValueError):
            self._actor.kill.remote()

    def end(self) -> None:
        """Ends the actor, and with it its process."""
        with suppress(RayError, ValueError):
            ray.kill(self._actor, no_restart=True)

    def _wait(self, reference: Any, limit: float, otherwise: str) -> Any:
        end = time.monotonic() + limit
        while True:
            try:
                return ray.get(reference, timeout=_LOOK)
            except GetTimeoutError:
                now = time.monotonic()
                if now > end or (self._ending is not None and now > self._ending + _CLOSING):
                    raise PlaceLost(f"{otherwise} within {limit:.0f} s") from None
            except (RayError, ValueError) as error:  # Ray itself may have ended
                told = str(error).strip().splitlines()[0]
                raise PlaceLost(f"that machine left, or ended what Ray ran there ({told})") from error


class HostedProcess:
    """As `RewardProcess`, on another machine.

    Raises (each method that waits):
        PlaceLost: as `Host`; or the function cannot be loaded there, though it can here.
    """

    def __init__(self, spec: FunctionSpec, memory_limit: float | None, host: Host) -> None:
        self.spec = spec
        self.alive = False
        self.outgrown = False
        self._memory_limit = memory_limit
        self._host = host

    def load(self) -> FunctionInfo:
        arguments = self.spec, file_digest(self.spec), self._memory_limit
        found = self._host.ask("load", *arguments, limit=START_LIMIT + _GRACE)
        if isinstance(found, RewardError):
            raise PlaceLost(str(found)) from found
        self.alive = True
        info: FunctionInfo = found
        return info

    def call(self, call: Call) -> list[Outcome]:
        limit = call.limit + _GRACE
        try:
            reply = self._host.ask("call", replace(call, pictures=()), limit=limit)
            while isinstance(reply, PictureRequest):
                reply = self._host.ask("give", call.pictures[reply.sample][reply.picture], limit=limit)
        except PlaceLost:
            self.alive = False
            raise
        self.alive, self.outgrown = reply.alive, reply.outgrown
        for kind, text in reply.lines:
            show = console.note if kind == "note" else console.warn
            show(f"{self._host.machine.name}: {text}")
        outcomes: list[Outcome] = reply.outcomes
        return outcomes

    def kill(self) -> None:
        self._host.kill()

    def close(self) -> None:
        self.alive = False
        with suppress(PlaceLost):
            self._host.ask("close", limit=_CLOSING)


def file_digest(spec: FunctionSpec) -> str:
    """Other for another file; "" for a module's name, and where there is no file."""
    if not os.path.isabs(spec.path):
        return ""
    try:
        with open(spec.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return "missing"


def _environment() -> dict[str, str]:
    """What a function may read, as a key; Ray's own variables are those of each machine."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
