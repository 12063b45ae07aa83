"""How long the parts of a step take, and how long something is at work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def timer(timings: dict[str, float], name: str) -> Iterator[None]:
    """Adds the seconds spent inside to `timings[name]`, also when the inside raises."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timings[name] = timings.get(name, 0.0) + time.perf_counter() - start


class BusyClock:
    """Knows when something was at work, in whatever thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began: float | None = None
        self._ended: list[tuple[float, float]] = []

    @contextmanager
    def busy(self) -> Iterator[None]:
        """It is at work inside; one such block at a time."""
        began = time.perf_counter()
        with self._lock:
            self._began = began
        try:
            yield
        finally:
            with self._lock:
                self._ended.append((began, time.perf_counter()))
                self._began = None

    def idle(self, seconds: float) -> float:
        """For how many of the last `seconds` it did nothing; forgets what was before them."""
        now = time.perf_counter()
        since = now - seconds
        with self._lock:
            self._ended = [(begin, end) for begin, end in self._ended if end > since]
            spans = self._ended + ([] if self._began is None else [(self._began, now)])
        return max(0.0, seconds - sum(end - max(begin, since) for begin, end in spans))
