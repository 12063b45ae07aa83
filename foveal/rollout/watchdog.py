"""Notices work that makes no progress, says so, and ends the process rather than let it hang for days."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from foveal.track.console import error, warn

EXIT_STATUS = 70


class Watchdog:
    """Watches a stage of the run from a thread.

    A call into the device that never returns cannot be interrupted from within, so after `limit` seconds without a sign
    of life the process prints where every thread stands and exits (the last checkpoint is whole).

    Args:
        stage: what is watched, for the messages.
        limit: seconds without progress after which it ends; half of that earns a warning.
        give_up: replaces the exit, in tests.
    """

    def __init__(self, stage: str, limit: float, give_up: Callable[[], None] | None = None) -> None:
        self.stage = stage
        self.limit = limit
        self.give_up = give_up or (lambda: os._exit(EXIT_STATUS))
        self._beats = 0

    def beat(self) -> None:
        """A sign of progress."""
        self._beats += 1

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watches until the block ends."""
        over = threading.Event()
        self.beat()
        thread = threading.Thread(target=self._run, args=(over,), name=f"watchdog of {self.stage}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _run(self, over: threading.Event) -> None:
        pause, beats, silence, warned = min(1.0, self.limit / 16), self._beats, 0.0, False
        # Time is counted in pauses of this thread, so that a process that was stopped (Ctrl-Z, a batch system that
        # suspends it) does not look stuck when it goes on.
        while not over.wait(pause):
            if beats != self._beats:
                beats, silence, warned = self._beats, 0.0, False
                continue
            silence += pause
            if silence > self.limit / 2 and not warned:
                warned = True
                warn(f"{self.stage}: no progress for {silence:.0f} s; the run ends after {self.limit:.0f} s.")
            if silence > self.limit:
                error(
                    f"error: {self.stage}: no progress for {silence:.0f} s, so the process ends. Where each thread "
                    "stands follows; start the same command again to go on from the last checkpoint."
                )
                faulthandler.dump_traceback(file=2, all_threads=True)  # sys.stderr may have no descriptor
                self.give_up()
                return
