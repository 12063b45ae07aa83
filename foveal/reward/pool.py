"""Reward processes, each driven by a thread of its own: calls go in, lists of outcomes come out."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any, TypeAlias

from foveal.errors import RewardError
from foveal.reward.contract import Failure, FunctionInfo, FunctionSpec, Outcome
from foveal.track.console import note

START_LIMIT = 600.0
"""Seconds that importing the user's file may take (it may load a model)."""
FIRST_NOTICE = 60.0
"""Seconds after which a call that is still running says so; then at each doubling."""

Inputs: TypeAlias = list[dict[str, Any]]
_Call: TypeAlias = tuple[Inputs, float, "Future[list[Outcome]]"]


class RewardProcess:
    """One process that runs the user's function; `load` comes first, then any number of `call`.

    It is started as a program, not forked and not by `multiprocessing`, which would import the run's `__main__` again.
    It leads a process group of its own: Ctrl-C in the terminal doesn't reach it, and what it started ends with it.
    One thread uses it; only `kill` may come from another.
    """

    def __init__(self, spec: FunctionSpec) -> None:
        self.spec = spec
        self._connection, theirs = Pipe()
        their_life_line, self._life_line = os.pipe()
        code = (
            "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from foveal.reward.worker import main; main()"
        )
        descriptors = (theirs.fileno(), their_life_line)
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, descriptors), json.dumps([str(path) for path in sys.path])],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,
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
            raise RewardError(f"{self.spec.path}: the reward process {reply.text} while the file was imported")
        if isinstance(reply, RewardError):
            raise reply
        return reply

    def call(self, inputs: Inputs, limit: float) -> list[Outcome]:
        """Scores `inputs` in at most `limit` seconds; after a timeout or a death the process is no longer `alive`."""
        reply = self._exchange(inputs, limit, f"scoring {len(inputs)} answers")
        if not isinstance(reply, Failure):
            return reply
        self.kill()
        self._process.wait()
        return [replace(reply, covers=len(inputs))] * len(inputs)

    def kill(self) -> None:
        """Ends the process and everything it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the process and frees what it took."""
        self.kill()
        self._process.wait()
        self._connection.close()
        os.close(self._life_line)

    def _exchange(self, message: Any, limit: float, doing: str) -> Any:
        """Sends one message and returns the reply, or a Failure when the process is too slow or dies."""
        begin = time.monotonic()
        notice = FIRST_NOTICE
        try:
            self._connection.send(message)
            while not self._connection.poll(min(0.5, max(0.0, begin + limit - time.monotonic()))):
                waited = time.monotonic() - begin
                if self._process.poll() is not None and not self._connection.poll(0):
                    return self._death()
                if waited >= limit:
                    return Failure("timeout", f"ran longer than {limit:g} s")
                if waited >= notice:
                    note(f"{self.spec.label} is still {doing} after {waited:.0f} s (limit {limit:g} s)")
                    notice *= 2
            return self._connection.recv()
        except (EOFError, OSError):
            return self._death()

    def _death(self) -> Failure:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return Failure("died", "closed its connection to the run")
        if code >= 0:
            return Failure("died", f"ended its process with exit code {code}")
        hint = "; the system does that when memory runs out" if code == -signal.SIGKILL else ""
        return Failure("died", f"ended its process by signal {-code} ({signal.strsignal(-code)}{hint})")


class RewardPool:
    """Up to `size` reward processes that take calls in the order of `submit`.

    The first starts here, others when calls wait for them. A batch function has one, which keeps its state.

    Raises:
        RewardError: the function can't be loaded.
    """

    def __init__(self, spec: FunctionSpec, size: int) -> None:
        self.spec = spec
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._closed = False
        first = RewardProcess(spec)
        try:
            self.info = first.load()
        except BaseException:
            first.close()
            raise
        self._processes: list[RewardProcess | None] = [first]
        if self.info.kind == "sequential":
            self._processes += [None] * (size - 1)
        # Daemons: a thread that waits for a stuck function must not keep a failing run from ending.
        self._threads = [
            threading.Thread(target=self._serve, args=(slot,), name=f"reward-{slot}", daemon=True)
            for slot in range(len(self._processes))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, inputs: Inputs, limit: float) -> Future[list[Outcome]]:
        """Queues one call of at most `limit` seconds. Its result has one outcome for each input."""
        future: Future[list[Outcome]] = Future()
        self._calls.put((inputs, limit, future))
        return future

    def close(self) -> None:
        """Kills the processes, whatever they are doing. May be called again."""
        self._closed = True
        for process in self._processes:
            if process is not None:
                process.kill()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, slot: int) -> None:
        while (call := self._calls.get()) is not None:
            inputs, limit, future = call
            if self._closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._living_process(slot).call(inputs, limit))
            except BaseException as error:
                future.set_exception(error)
        process = self._processes[slot]
        if process is not None:
            self._processes[slot] = None
            process.close()

    def _living_process(self, slot: int) -> RewardProcess:
        process = self._processes[slot]
        if process is not None and process.alive:
            return process
        if process is not None:
            process.close()
        process = self._processes[slot] = RewardProcess(self.spec)
        if self._closed:  # `close` may have looked just before
            process.kill()
        process.load()
        return process
