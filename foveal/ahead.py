"""Collecting the groups of a step while the policy learns from those of the step before (`trainer.async_rollout`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from foveal.rollout.collect import Collector
from foveal.types import Group, Metrics

_PATIENCE = 10.0
"""Seconds that a collecting has for its end once workers and reward processes are gone."""


class Ahead:
    """Collects in a thread, with the weights that the engines have when it begins.

    `start` follows `take`, so that one collecting is under way at most and answers are one step old at most. What goes
    wrong in the thread is raised where its groups are waited for.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._collecting: _Collecting | None = None

    def start(self, step: int) -> None:
        """Gives the engines today's weights, and begins to collect the groups of a step."""
        self._collector.workers.hand_over()
        self._collecting = _Collecting(self._collector, step)

    def take(self, step: int, timings: dict[str, float], advance: Callable[[int], None]) -> tuple[list[Group], Metrics]:
        """As `Collector.collect`; waits for what was started, or starts it."""
        if self._collecting is None:
            self.start(step)
        collecting = self._under_way
        assert collecting.step == step
        groups, metrics = collecting.wait(advance)
        self._collecting = None
        for name, seconds in collecting.timings.items():
            timings[name] = timings.get(name, 0.0) + seconds
        return groups, metrics

    def settle(self) -> None:
        """Waits for what is under way, whose groups `take` gives later, and gives the engines today's weights."""
        if self._collecting is not None:
            self._collecting.wait(lambda n: None)
        self._collector.workers.hand_over()

    def position(self) -> tuple[dict[str, Any], list[Group]]:
        """As of the collector, before what is under way: a resumed run collects that again."""
        return self._collector.position() if self._collecting is None else self._collecting.position

    def join(self) -> None:
        """Waits for the thread, after everything that it could wait for was closed."""
        if self._collecting is not None:
            self._collecting.join(_PATIENCE)

    @property
    def _under_way(self) -> _Collecting:
        assert self._collecting is not None
        return self._collecting


class _Collecting:
    """One step's, from its start on.

    Attributes:
        position: of the collector before it.
        timings: as `Collector.collect` fills them.
    """

    def __init__(self, collector: Collector, step: int) -> None:
        self.step = step
        self.position = collector.position()
        self.timings: dict[str, float] = {}
        self._collector = collector
        self._result: tuple[list[Group], Metrics] | None = None
        self._failure: BaseException | None = None
        self._finished = 0
        self._shown = 0
        # A daemon, so that a second stop signal ends the process whatever the thread waits for.
        self._thread = threading.Thread(target=self._run, name=f"answers of step {step}", daemon=True)
        self._thread.start()

    def wait(self, advance: Callable[[int], None]) -> tuple[list[Group], Metrics]:
        """Its groups and metrics; `advance` is told of groups that finish meanwhile, and of those before."""
        while self._thread.is_alive():
            self._thread.join(0.1)
            finished = self._finished
            advance(finished - self._shown)
            self._shown = finished
        if self._failure is not None:
            raise self._failure
        assert self._result is not None
        return self._result

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._result = self._collector.collect(self.step, self.timings, self._advance)
        except BaseException as error:
            self._failure = error

    def _advance(self, count: int) -> None:
        self._finished += count
