"""Reward processes, each driven by a thread of its own: calls go in, lists of outcomes come out."""

from __future__ import annotations

import math
import queue
import threading
from concurrent.futures import Future
from typing import TypeAlias

from foveal.reward.contract import Failure, FunctionSpec, Outcome
from foveal.reward.places import PlaceLost, Places, Process
from foveal.reward.process import Call, RewardProcess

_Queued: TypeAlias = tuple[Call, "Future[list[Outcome]]"]


class RewardPool:
    """Up to `size` reward processes that take calls in the order of `submit`.

    The first starts here, others when calls wait for them, where `Places` has them. A batch function has one, which
    keeps its state. A process of an async function of one dict takes all calls that wait at once; when they end it,
    they are tried again by halves until only those are lost that do.

    Args:
        memory_limit: bytes that each process may take, or None.

    Raises:
        RewardError: the function can't be loaded.
    """

    def __init__(self, spec: FunctionSpec, size: int, memory_limit: float | None = None) -> None:
        self.spec = spec
        self.restarts = 0
        self._calls: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._closed = False
        first = RewardProcess(spec, memory_limit)
        try:
            self.info = first.load()
        except BaseException:
            first.close()
            raise
        count = size if self.info.kind == "sequential" else 1
        self._places = Places(spec, memory_limit, count)
        self._processes: list[Process | None] = [first, *[None] * (count - 1)]
        self._threads = [
            threading.Thread(target=self._serve, args=(slot,), name=f"reward-{slot}", daemon=True)
            for slot in range(len(self._processes))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Call) -> Future[list[Outcome]]:
        """Queues one call. Its result has one outcome for each input."""
        future: Future[list[Outcome]] = Future()
        self._calls.put((call, future))
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
        self._places.close()

    def _serve(self, slot: int) -> None:
        while (queued := self._calls.get()) is not None:
            taken = [queued, *self._waiting()] if self._together else [queued]
            if self._closed:
                for _, future in taken:
                    future.cancel()
            taken = [(call, future) for call, future in taken if future.set_running_or_notify_cancel()]
            if taken:
                self._run(slot, taken)
        process = self._processes[slot]
        if process is not None:
            self._processes[slot] = None
            process.close()

    @property
    def _together(self) -> bool:
        return self.info.is_async and self.info.kind == "sequential"

    def _waiting(self) -> list[_Queued]:
        """The calls that nobody has taken yet, without waiting for any."""
        waiting: list[_Queued] = []
        while True:
            try:
                queued = self._calls.get_nowait()
            except queue.Empty:
                return waiting
            if queued is None:  # the sign for a thread to end: hand it back
                self._calls.put(None)
                return waiting
            waiting.append(queued)

    def _run(self, slot: int, taken: list[_Queued]) -> None:
        calls = [call for call, _ in taken]
        call = calls[0] if len(calls) == 1 else self._merged(calls)
        try:
            outcomes = self._scored(slot, call)
        except BaseException as error:
            for _, future in taken:
                future.set_exception(error)
            return
        if len(taken) > 1 and not self._closed and _is_fatal(outcomes[0]):
            middle = len(taken) // 2
            self._run(slot, taken[:middle])
            self._run(slot, taken[middle:])
            return
        done = 0
        for call, future in taken:
            future.set_result(outcomes[done : done + len(call.inputs)])
            done += len(call.inputs)

    def _scored(self, slot: int, call: Call) -> list[Outcome]:
        while True:
            try:
                process = self._living_process(slot)
                outcomes = process.call(call)
                if process.outgrown and isinstance(outcomes[0], Failure):  # earlier calls filled it, not this one
                    outcomes = self._living_process(slot).call(call)
                return outcomes
            except PlaceLost as lost:
                if self._closed:
                    raise
                self._places.leave(slot, lost)

    def _merged(self, calls: list[Call]) -> Call:
        """One call for all. The event loop keeps each answer's limit; this one ends a loop that no longer turns."""
        inputs = [one for call in calls for one in call.inputs]
        pictures = [one for call in calls for one in call.pictures]
        rounds = math.ceil(len(inputs) / self.spec.concurrency)
        return Call(inputs, pictures, (rounds + 1) * calls[0].limit)

    def _living_process(self, slot: int) -> Process:
        process = self._processes[slot]
        if process is not None and process.alive:
            return process
        if process is not None:
            self.restarts += 1
            process.close()
        process = self._processes[slot] = self._places.start(slot)
        if self._closed:  # `close` may have looked just before
            process.kill()
        process.load()
        return process


def _is_fatal(outcome: Outcome) -> bool:
    """Whether a call ended its process; a time-out is none, for each half would wait for the limit again."""
    return isinstance(outcome, Failure) and outcome.kind in ("died", "memory")
