"""One reward process as the run sees it: start, load, call, watch, kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeAlias

from foveal.errors import RewardError
from foveal.reward.contract import Answer, Failure, FunctionInfo, FunctionSpec, Outcome, PictureRequest
from foveal.track.console import note

START_LIMIT = 600.0
"""Seconds that importing the user's file may take (it may load a model)."""
FIRST_NOTICE = 60.0
"""Seconds after which a call that is still running says so; then at each doubling."""
WATCH_EVERY = 0.1
"""Seconds between two looks at a working process: is it alive, too slow, too large?"""
GB = 1e9
MARK = "FOVEAL_REWARD_PROCESS"
"""Environment variable of a reward process, inherited by what it starts, by which that is found again."""

Inputs: TypeAlias = list[dict[str, Any]]
Pictures: TypeAlias = Sequence[Sequence[bytes]]
Fetch: TypeAlias = Callable[[PictureRequest], bytes]


@dataclass(frozen=True)
class Call:
    """What one call of the function gets.

    Attributes:
        inputs: one dict for each answer, with the names of its pictures under "images".
        pictures: for each input the encoded bytes of its pictures, sent only when the function asks for them.
        limit: seconds that it may take.
    """

    inputs: Inputs
    pictures: Pictures
    limit: float


class RewardProcess:
    """One process that runs the user's function; `load` comes first, then any number of `call`, or of `trade`.

    It is started as a program, not forked and not by `multiprocessing`, which would import the run's `__main__` again.
    It leads a process group of its own: Ctrl-C in the terminal doesn't reach it, and what it started ends with it, on
    Linux also what left the group.
    One thread uses it; only `kill` may come from another.

    Args:
        memory_limit: bytes of its own memory (`private_bytes`) that it may take, or None.

    Attributes:
        outgrown: ended because several calls together took too much memory.
    """

    def __init__(self, spec: FunctionSpec, memory_limit: float | None = None) -> None:
        self.spec = spec
        self._memory_limit = memory_limit
        self._calls = 0
        self.outgrown = False
        self._connection, theirs = Pipe()
        their_life_line, self._life_line = os.pipe()
        code = (
            "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from foveal.reward.worker import main; main()"
        )
        descriptors = (theirs.fileno(), their_life_line)
        self._mark = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, descriptors), json.dumps([str(path) for path in sys.path])],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,
            env={**os.environ, MARK: self._mark},
        )
        theirs.close()
        os.close(their_life_line)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def load(self) -> FunctionInfo:
        """Waits until the user's file is imported.

        Raises:
            RewardError: it can't be imported, or lacks the function.
        """
        reply = self._exchange(self.spec, START_LIMIT, "being imported")
        if isinstance(reply, Failure):
            cure = f"\n{reply.cure}" if reply.cure else ""
            raise RewardError(f"{self.spec.path}: the reward process {reply.text} while the file was imported{cure}")
        if isinstance(reply, RewardError):
            raise reply
        return reply

    def call(self, call: Call, fetch: Fetch | None = None) -> list[Outcome]:
        """Scores the inputs of `call`; after a timeout, a death or too much memory the process is not `alive`.

        Args:
            fetch: gets the pictures that the function asks for, in the place of `call.pictures`.
        """
        count = len(call.inputs)
        fetch = fetch or (lambda asked: call.pictures[asked.sample][asked.picture])
        reply = self._judged(self._exchange(call.inputs, call.limit, f"scoring {count} answers", fetch))
        return [replace(reply, covers=count)] * count if isinstance(reply, Failure) else reply

    def trade(
        self, new: dict[int, Answer], pictures: Mapping[int, Sequence[bytes]], limit: float
    ) -> dict[int, Outcome] | Failure:
        """Hands answers to a function that works on several at a time, and takes the outcomes of others.

        A call is made of several trades: the first hands it over, and each of the others takes what is done since.
        After a timeout, a death or too much memory the process is not `alive`, and what it worked on has no outcome.

        Args:
            new: answers to begin with, by number.
            pictures: of all that it works on, by number.
            limit: seconds after which the function should have answered.
        """
        doing = f"scoring {len(pictures)} answers"
        reply = self._exchange(new, limit, doing, lambda asked: pictures[asked.sample][asked.picture])
        return self._judged(self._too_large() or reply if reply == {} else reply)

    def _judged(self, reply: Any) -> Any:
        """The reply; ends a process that has failed, or has grown too large from call to call."""
        if isinstance(reply, Failure):
            self._end()
            self.outgrown = reply.kind == "memory" and self._calls > 0
        elif self._too_large():
            self._end()
            self.outgrown = True
        if self.outgrown:
            note(
                f"{self.spec.label}: its reward process grew from call to call beyond worker.reward.memory_limit_gb "
                f"({(self._memory_limit or 0) / GB:g}); it probably keeps what it should let go. A fresh process goes "
                "on, without the module's state"
            )
        self._calls += reply != {}
        return reply

    def kill(self) -> None:
        """Ends the process and everything it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for pid in _marked(self._mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the process and frees what it took."""
        self._end()
        self._connection.close()
        os.close(self._life_line)

    def _end(self) -> None:
        self.kill()
        self._process.wait()

    def _exchange(self, message: Any, limit: float, doing: str, fetch: Fetch | None = None) -> Any:
        """Sends one message and returns the reply, or a Failure when the process is too slow, too large, or dies."""
        begin = time.monotonic()
        notice = FIRST_NOTICE
        try:
            self._connection.send(message)
            while True:
                while not self._connection.poll(min(WATCH_EVERY, max(0.0, begin + limit - time.monotonic()))):
                    waited = time.monotonic() - begin
                    if failure := self._failure(waited, limit):
                        return failure
                    if waited >= notice:
                        note(f"{self.spec.label} is still {doing} after {waited:.0f} s (limit {limit:g} s)")
                        notice *= 2
                reply = self._connection.recv()
                if fetch is None or not isinstance(reply, PictureRequest):
                    return reply
                self._connection.send(fetch(reply))
        except (EOFError, OSError):
            return self._death()

    def _failure(self, waited: float, limit: float) -> Failure | None:
        """What is wrong with a process that has not answered after `waited` seconds, if anything."""
        if self._process.poll() is not None and not self._connection.poll(0):
            return self._death()
        if waited >= limit:
            return Failure("timeout", f"ran longer than {limit:g} s")
        return self._too_large()

    def _too_large(self) -> Failure | None:
        if self._memory_limit and (held := private_bytes(self.pid)) > self._memory_limit:
            return Failure(
                "memory",
                f"took {held / GB:.1f} GB of memory",
                cure=f"The limit is worker.reward.memory_limit_gb ({self._memory_limit / GB:g}); raise it if the "
                "function needs that much, or look for what it keeps from call to call.",
            )
        return None

    def _death(self) -> Failure:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return Failure("died", "closed its connection to the run")
        if code >= 0:
            return Failure("died", f"ended its process with exit code {code}")
        hint = "; the system does that when memory runs out" if code == -signal.SIGKILL else ""
        return Failure("died", f"ended its process by signal {-code} ({signal.strsignal(-code)}{hint})")


def _marked(mark: str) -> Iterator[int]:
    """Processes that have the mark in their environment; none where the system has no /proc."""
    entry = f"{MARK}={mark}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # somebody else's, or just gone
            if entry in environment.read_bytes().split(b"\0"):
                yield int(environment.parent.name)


def private_bytes(pid: int) -> int:
    """Memory that the process holds and shares with no file or other process; 0 where the system does not tell."""
    try:
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    except (OSError, ValueError):  # not Linux, or just gone
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
