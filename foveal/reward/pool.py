"""Reward processes, each driven by a thread of its own: calls go in, lists of outcomes come out."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future

from foveal.reward.contract import Failure, FunctionSpec, Outcome
from foveal.reward.flow import Flow, Queued
from foveal.reward.process import Call, RewardProcess


class RewardPool:
    """Up to `size` reward processes that take calls in the order of `submit`.

    The first starts here, others when calls wait for them. A batch function has one, which keeps its state. One of an
    async function of one dict works on `concurrency` calls at a time (`Flow`).

    Args:
        memory_limit: bytes that each process may take, or None.

    Raises:
        RewardError: the function can't be loaded.
    """

    def __init__(self, spec: FunctionSpec, size: int, memory_limit: float | None = None) -> None:
        self.spec = spec
        self.restarts = 0
        self._memory_limit = memory_limit
        self._calls: queue.SimpleQueue[Queued | None] = queue.SimpleQueue()
        self._closed = False
        first = RewardProcess(spec, memory_limit)
        try:
            self.info = first.load()
        except BaseException:
            first.close()
            raise
        self._processes: list[RewardProcess | None] = [first]
        if self.info.kind == "sequential":
            self._processes += [None] * (size - 1)
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

    def _serve(self, slot: int) -> None:
        flow = Flow(lambda: self._living_process(slot), self.spec.concurrency, lambda: self._closed)
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
            process = self._living_process(slot)
            outcomes = process.call(call)
            if process.outgrown and isinstance(outcomes[0], Failure):  # earlier calls filled it, not this one
                outcomes = self._living_process(slot).call(call)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(outcomes)

    def _living_process(self, slot: int) -> RewardProcess:
        process = self._processes[slot]
        if process is not None and process.alive:
            return process
        if process is not None:
            self.restarts += 1
            process.close()
        process = self._processes[slot] = RewardProcess(self.spec, self._memory_limit)
        if self._closed:  # `close` may have looked just before
            process.kill()
        process.load()
        return process
