"""Stopping a run on Ctrl-C or SIGTERM without losing what it learned."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(BaseException):
    """The run was asked to stop. Not an `Exception`, so that no handler of ordinary errors swallows it.

    Attributes:
        signum: the signal that asked.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class StopSignals:
    """Turns SIGINT and SIGTERM into `Stopped`, at moments where nothing is half done.

    Inside `interruptible` (generation, scoring, validation) `Stopped` is raised at once; anywhere else (an update, a
    save) it waits for the next `check` or `interruptible`. A second signal ends the process the ordinary way.
    """

    def __init__(self) -> None:
        self._asked: int | None = None
        self._interruptible = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        self._asked = signum
        self._restore()
        if self._interruptible:
            self._interruptible = False
            raise Stopped(signum)

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self._asked is not None

    def check(self) -> None:
        """Raises `Stopped` if a signal has come."""
        if self._asked is not None:
            raise Stopped(self._asked)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Marks a stretch in which nothing is lost by leaving at any point."""
        self._interruptible = True  # before the check, or a signal in between would wait for the end of the stretch
        try:
            self.check()
            yield
        except (SystemError, SystemExit):  # what Ray's compiled code makes of a Stopped that is raised inside it
            self.check()
            raise
        finally:
            self._interruptible = False
