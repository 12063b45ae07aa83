"""Reward processes, each driven by a thread of its own: calls go in, lists of outcomes come out."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future

from foveal.reward.contract import Failure, FunctionSpec, Outcome
from foveal.reward.flow import Flow, Queued
from foveal.reward.places import PlaceLost, Places, Process
from foveal.reward.process import Call, RewardProcess


class RewardPool:
    """Up to `size` reward processes that take calls in the order of `submit`.

    The first starts here, others when calls wait for them, where `Places` has them. A batch function has one, which
    keeps its state. One of an async function of one dict works on `concurrency` calls at a time (`Flow`); as those
    mostly wait, all of them are here.

    Args:
        memory_limit: bytes that each process may take, or None.

    Raises:
        RewardError: the function can't be loaded.
    """

    def __init__(self, spec: FunctionSpec, size: int, memory_limit: float | None = None) -> None:
        self.spec = spec
        self.restarts = 0
        self._calls: queue.SimpleQueue[Queued | None] = queue.SimpleQueue()
        self._closed = False
        first = RewardProcess(spec, memory_limit)
        try:
            self.info = first.load()
        except BaseException:
            first.close()
            raise
        count = size if self.info.kind == "sequential" else 1
        self._places = Places(spec, memory_limit, count, here=self.info.flows)
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
        flow = Flow(lambda: self._process_here(slot), self.spec.concurrency, lambda: self._closed)
        while (queued := self._calls.get()) is not None:
            if not self._begins(queued):
                continue
            if self.info.flows:
                flow.run([queued], self._waiting)
            else:
                self._run(slot, *queued)
        process = self._processes[slot]
        if process is not None:
            self._processes[slot] = None
            process.close()

    def _begins(self, queued: Queued) -> bool:
        """Whether the call is to be made, and not cancelled meanwhile."""
        if self._closed:
            queued[1].cancel()
        return queued[1].set_running_or_notify_cancel()

    def _waiting(self, most: int) -> list[Queued]:
        """Up to `most` of the calls that nobody has taken yet, without waiting for any."""
        waiting: list[Queued] = []
        while len(waiting) < most:
            try:
                queued = self._calls.get_nowait()
            except queue.Empty:
                break
            if queued is None:  # the sign for a thread to end: hand it back
                self._calls.put(None)
                break
            if self._begins(queued):
                waiting.append(queued)
        return waiting

    def _run(self, slot: int, call: Call, future: Future[list[Outcome]]) -> None:
        try:
            future.set_result(self._scored(slot, call))
        except BaseException as error:
            future.set_exception(error)

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

    def _process_here(self, slot: int) -> RewardProcess:
        process = self._living_process(slot)
        assert isinstance(process, RewardProcess)
        return process

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
