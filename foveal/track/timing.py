"""How long the parts of a step take."""

from __future__ import annotations

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
