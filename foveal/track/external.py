"""Keeps the run safe from outside trackers: they work in threads of their own and may fail, stall or be missing."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from foveal.masking import without_secrets
from foveal.track.backends import Backend, RunInfo
from foveal.track.console import warn
from foveal.track.names import LegalNames
from foveal.track.samples import Sample
from foveal.types import Metrics

QUEUE_LENGTH = 1000
CLOSE_SECONDS = 10.0
STALL_SECONDS = 60.0
"""Of one call, after which it is said that the tracker does not answer."""
WAITING_TABLES = 8
"""Of samples, which hold pictures."""

Job = Callable[[], None]


class Background:
    """One outside tracker behind a queue and a thread; no call ever raises or waits, except `close`.

    Of failures the first is a warning, later ones are counted; what does not fit into the queue is dropped and counted.

    Args:
        name: the tracker's name in `trainer.logger`.
        opened: called with the tracker's own id of the run once it has one.
        queue_length: calls that may wait.
    """

    def __init__(
        self, name: str, backend: Backend, run: RunInfo, opened: Callable[[str], None], queue_length: int = QUEUE_LENGTH
    ) -> None:
        self._name = name
        self._backend = backend
        self._names = LegalNames(backend.illegal, backend.folders)
        self._jobs: queue.Queue[Job | None] = queue.Queue(queue_length)
        self._alive = True
        self._failed = 0
        self._dropped = 0
        self._busy_since: float | None = time.monotonic()
        self._told_of_stall = False
        self._free_tables = threading.Semaphore(WAITING_TABLES)
        # A daemon: a tracker that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, args=(run, opened), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, metrics: Metrics, step: int) -> None:
        """Hands metrics on, under legal names and without what is not finite."""
        legal = {self._names(name): float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._put(lambda: self._backend.log(legal, step))

    def log_samples(self, samples: list[Sample], step: int) -> None:
        """Hands samples on, with their pictures: of a tracker that is behind, few of these wait."""

        def job() -> None:
            try:
                self._backend.log_samples(samples, step)
            finally:
                self._free_tables.release()

        if not self._free_tables.acquire(blocking=False):
            self._drop()
        elif not self._put(job):
            self._free_tables.release()

    def close(self, deadline: float) -> None:
        """Waits for what is queued, until `deadline` on `time.monotonic()`'s clock, then gives up with a warning."""
        # Full until the deadline means that it hangs: the warning below says so.
        with suppress(queue.Full):
            self._jobs.put(None, timeout=max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            waiting = self._jobs.qsize()
            warn(
                f"{self._name} did not answer in time; {waiting} or more of its entries are lost. The run's own files "
                f"have everything. Check that its server can be reached, or {self._backend.cure}."
            )
        elif self._alive and self._failed + self._dropped > 0:
            warn(f"{self._name} lacks {self._failed + self._dropped} entries; the run's own files have everything.")

    def _put(self, job: Job) -> bool:
        if not self._alive:
            return False
        self._tell_of_stall()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._drop()
            return False
        return True

    def _tell_of_stall(self) -> None:
        since = self._busy_since
        if since is not None and time.monotonic() - since > STALL_SECONDS and not self._told_of_stall:
            self._told_of_stall = True
            warn(f"{self._name} has not answered for {STALL_SECONDS:.0f} s; the run goes on, its entries wait.")

    def _drop(self) -> None:
        if self._alive:
            self._dropped += 1
            if self._dropped == 1:
                warn(f"{self._name} is too slow or hangs: entries are dropped from here on until it catches up.")

    def _work(self, run: RunInfo, opened: Callable[[str], None]) -> None:
        try:
            run_id = self._backend.open(run)
            if run_id is not None:
                opened(run_id)
        except (Exception, SystemExit) as error:
            self._alive = False
            warn(f"{self._name} is off for this run: {_reason(error)}. To use it, {self._cure(error, run)}.")
            self._forget_waiting()
            return
        finally:
            self._busy_since = None
        while (job := self._jobs.get()) is not None:
            self._do(job)
        self._do(self._backend.close)

    def _forget_waiting(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()

    def _do(self, job: Job) -> None:
        self._busy_since = time.monotonic()
        try:
            job()
        except (Exception, SystemExit) as error:
            self._failed += 1
            if self._failed == 1:
                warn(f"{self._name} refused an entry ({_reason(error)}); the run goes on.")
        finally:
            self._busy_since = None

    def _cure(self, error: BaseException, run: RunInfo) -> str:
        if isinstance(error, ImportError):
            return f"install it: pip install {self._backend.package}"
        again = f" (or delete {run.run_dir / 'trackers.json'} to start a new run there)" if run.run_id else ""
        return f"{self._backend.cure}{again}"


def _reason(error: BaseException) -> str:
    """The first line of an error, short enough for one line, and without anybody's key."""
    lines = without_secrets(str(error)).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}…"


def close_all(trackers: list[Background], seconds: float = CLOSE_SECONDS) -> None:
    """Closes trackers side by side, within `seconds` for all of them."""
    deadline = time.monotonic() + seconds
    closers = [threading.Thread(target=tracker.close, args=(deadline,), daemon=True) for tracker in trackers]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
