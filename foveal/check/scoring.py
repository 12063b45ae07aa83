"""Scores tries with the run's own reward functions, in processes of their own; finds the answers that they fail on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Self

import numpy as np

from foveal.check.tries import Case, Try
from foveal.config.schema_reward import RewardConfig
from foveal.reward.contract import Failure, Outcome
from foveal.reward.part import RewardPart, parts_for, start_parts, weighted
from foveal.reward.sample import RewardSample, samples_of
from foveal.types import Group, Response

TIME_LIMIT = 3.0
"""Seconds for one answer, where a run would wait longer."""
SERVER_LIMIT = 40.0
"""Seconds for one answer of a function that works on several at a time: it waits for a server."""
CALL_LIMIT = 40.0
"""Seconds for one call of a batch function, in the same way."""
FIRST_LIMIT = 15.0
"""Seconds for each of the first answers: functions import and open things when they are first called."""
DEADLINE = 50.0
"""Seconds after loading, after which no further call is made: some answers stay without an outcome then."""
TOGETHER = 8
"""Answers of a function that is called for each, between two looks at the clock."""
MOST_CALLS = 60
"""Further calls that may be made to find the answers that a batch function fails on."""


class Scorer:
    """The reward functions of a configuration, with shorter limits.

    Args:
        count: tokens of a text.

    Attributes:
        config: as the run has it, but for the limit of a batch.
    """

    def __init__(self, config: RewardConfig, cases: Sequence[Case], count: Callable[[str], int]) -> None:
        self.config = config.model_copy(update={"batch_time_limit": min(config.batch_time_limit, CALL_LIMIT)})
        self.cases = cases
        self._count = count
        self._parts: list[RewardPart] = []
        self._rounds: list[tuple[int, float]] = []  # answers and seconds of each that was timed
        self._calls_left = MOST_CALLS
        self._deadline = 0.0

    def __enter__(self) -> Self:
        """Loads the functions; RewardError if one cannot be."""
        self._parts = start_parts(self.config)
        self._wait_for(TIME_LIMIT)
        self._deadline = time.monotonic() + DEADLINE
        return self

    def __exit__(self, *exception: object) -> None:
        for part in self._parts:
            part.close()

    @property
    def is_batch(self) -> bool:
        """Whether a function is called once with all answers, when the last one is there."""
        return any(part.info.kind == "batch" and not part.info.split_groups for part in self._parts)

    @property
    def undeclared(self) -> bool:
        """Whether a function doesn't say how it wants to be called."""
        return any(not part.info.declares_kind for part in self._parts)

    @property
    def places(self) -> int:
        """How many answers functions that wait for a server work on at a time; 0 where there is none."""
        return self.config.num_cpus * self.config.concurrency * any(part.info.flows for part in self._parts)

    @property
    def waits_less(self) -> bool:
        """Whether a run would wait longer for a server than this check does."""
        return any(part.info.flows and self._own_limit(part) > SERVER_LIMIT for part in self._parts)

    @property
    def pace(self) -> float:
        """Seconds for an answer; 0 before the first.

        With a server the time of one answer says nothing: a round that leaves places empty takes as long as a full one.
        """
        full = [one for one in self._rounds if one[0] >= self.places] or self._rounds
        return sum(seconds for _, seconds in full) / max(sum(max(count, self.places) for count, _ in full), 1)

    def warm_up(self, tries: Sequence[Try]) -> None:
        """Scores an answer for each process, all of them by a batch function; not timed."""
        self._wait_for(FIRST_LIMIT)
        self._round(tries if self._has_batch else tries[: self.config.num_cpus])
        self._wait_for(TIME_LIMIT)

    def _wait_for(self, seconds: float) -> None:
        for part in self._parts:
            most = SERVER_LIMIT if part.info.flows else seconds
            part.config = self.config.model_copy(update={"time_limit": min(self._own_limit(part), most)})

    def _own_limit(self, part: RewardPart) -> float:
        """Seconds for an answer in a run."""
        return replace(part, config=self.config).time_limit

    @property
    def _has_batch(self) -> bool:
        return any(part.info.kind == "batch" for part in self._parts)

    def score(self, tries: Sequence[Try]) -> None:
        """Writes the outcome of each try, all of them scored together as the answers of a step are.

        Past the deadline, and once all of a call's answers have timed out, tries stay without an outcome.
        """
        size = len(tries) if self._has_batch else self.places or TOGETHER * self.config.num_cpus
        for start in range(0, len(tries), max(size, 1)):
            begin = time.monotonic()
            if begin > self._deadline:
                return
            self._round(tries[start : start + size])
            self._rounds.append((len(tries[start : start + size]), time.monotonic() - begin))
            if all(isinstance(one.outcome, Failure) and one.outcome.kind == "timeout" for one in tries[start:][:size]):
                self._deadline = 0.0
        failed = [one for one in tries if isinstance(one.outcome, Failure) and one.outcome.covers > 1]
        kinds = {one.kind for one in failed}
        for kind in kinds if len(failed) > 1 else ():
            self._narrow([one for one in failed if one.kind == kind])

    def _narrow(self, tries: list[Try]) -> None:
        """Scores tries that failed together in smaller and smaller parts, until those that are to blame stand alone."""
        if self._calls_left <= 0 or time.monotonic() > self._deadline:
            return
        self._calls_left -= 1
        self._round(tries)
        failure = tries[0].outcome
        if not isinstance(failure, Failure) or failure.kind == "timeout" or len(tries) == 1:
            return
        half = len(tries) // 2
        self._narrow(tries[:half])
        self._narrow(tries[half:])

    def _round(self, tries: Sequence[Try]) -> None:
        samples: list[tuple[Try, RewardSample]] = []
        for place, of_row in groupby(tries, key=lambda one: one.case):
            case, own = self.cases[place], list(of_row)
            group = Group(case.prompt, [self._response(one) for one in own])
            made = samples_of(group, case.text, 0)
            for part in parts_for(self._parts, case.prompt, self.config.route_by):
                part.add(made)
            samples += zip(own, made, strict=True)
        for index, (_, sample) in enumerate(samples):
            sample.index = index
        try:
            for part in self._parts:
                part.call_rest()
            for part in self._parts:
                for sample, outcome in part.results():
                    sample.results[part.name] = outcome
        finally:
            for part in self._parts:
                part.clear()
        weights = {part.name: part.weight for part in self._parts}
        for one, sample in samples:
            one.outcome = _sum(sample, weights)

    def _response(self, one: Try) -> Response:
        length = self._count(one.text) if one.length is None else one.length
        ids = np.zeros(length, np.int64)
        finish = "length" if one.kind in ("long without end", "cut off") else "stop"
        return Response(ids, np.zeros(length, np.float32), finish, one.text)  # type: ignore[arg-type]


def _sum(sample: RewardSample, weights: dict[str, float]) -> Outcome:
    failure = next((one for one in sample.results.values() if isinstance(one, Failure)), None)
    if failure is not None:
        return failure
    return weighted({name: one for name, one in sample.results.items() if isinstance(one, dict)}, weights)
