"""One reward function with its processes and its calls of a round; and the sum of several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from foveal.config.schema_reward import RewardConfig
from foveal.errors import RewardError
from foveal.reward.contract import FunctionInfo, FunctionSpec, Outcome, Rewards
from foveal.reward.loading import parse_spec
from foveal.reward.pool import RewardPool
from foveal.reward.process import GB, Call
from foveal.reward.sample import RewardSample
from foveal.types import Prompt

TIME_LIMIT = 30.0
"""Seconds for an answer where neither `worker.reward.time_limit` nor the function says otherwise."""
MIN_BATCH_LIMIT = 2.0
"""Seconds that a call of a batch function has at least, however few its answers."""


@dataclass
class RewardPart:
    """A function, which rows it scores, and the calls of the round that is under way.

    Attributes:
        name: "" for the only one, `worker.reward.reward_function`.
        only_for: values of the column `worker.reward.route_by` that it scores; empty: all.
    """

    config: RewardConfig
    spec: FunctionSpec
    name: str = ""
    weight: float = 1.0
    only_for: tuple[str, ...] = ()
    _pool: RewardPool | None = None
    _waiting: list[RewardSample] = field(default_factory=list)
    _calls: list[tuple[list[RewardSample], Future[list[Outcome]]]] = field(default_factory=list)

    def start(self) -> None:
        """Loads the function in its first process; RewardError if that fails."""
        if self._pool is None:
            limit = self.config.memory_limit_gb
            self._pool = RewardPool(self.spec, self.config.num_cpus, limit and limit * GB)

    def close(self) -> None:
        """Ends its processes, whatever they are doing. May be called again."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @property
    def info(self) -> FunctionInfo:
        return self._started.info

    @property
    def time_limit(self) -> float:
        """Seconds that an answer may take."""
        return self.config.time_limit or self.info.time_limit or TIME_LIMIT

    @property
    def restarts(self) -> int:
        """How often a process was replaced since the start."""
        return self._started.restarts

    def add(self, samples: list[RewardSample]) -> None:
        """Takes the answers of one group: calls the function, or keeps them for the one call of a batch function."""
        if self.info.kind == "sequential":
            for sample in samples:
                self._call([sample], self.time_limit)
        elif self.info.split_groups:
            self._call_batch(samples)
        else:
            self._waiting += samples

    def call_rest(self) -> None:
        """Calls a batch function with all answers that wait, in the order of their `index`."""
        if self._waiting:
            self._call_batch(sorted(self._waiting, key=lambda sample: sample.index))
            self._waiting = []

    def results(self) -> Iterator[tuple[RewardSample, Outcome]]:
        """Waits for the round's calls, in the order they were made."""
        for samples, future in self._calls:
            yield from zip(samples, future.result(), strict=True)

    def clear(self) -> None:
        """Forgets the round; calls that have not begun are not made."""
        for _, future in self._calls:
            future.cancel()
        self._calls, self._waiting = [], []

    @property
    def _started(self) -> RewardPool:
        assert self._pool is not None, "call start() first"
        return self._pool

    def _call_batch(self, samples: list[RewardSample]) -> None:
        limit = max(MIN_BATCH_LIMIT, self.time_limit * len(samples))
        self._call(samples, min(limit, self.config.batch_time_limit))

    def _call(self, samples: list[RewardSample], limit: float) -> None:
        call = Call([one.input for one in samples], [one.question.media for one in samples], limit)
        self._calls.append((samples, self._started.submit(call)))


def make_parts(config: RewardConfig) -> list[RewardPart]:
    """The functions that `worker.reward` names, not yet started.

    Raises:
        RewardError: none is named, or a file is missing.
    """
    told: dict[str, Any] = {"concurrency": config.concurrency, "kind": config.reward_type}
    if not config.functions:
        spec = parse_spec(config.reward_function, config.reward_function_kwargs)
        return [RewardPart(config, replace(spec, **told))]
    parts = []
    for name, one in config.functions.items():
        spec = replace(parse_spec(one.function, one.kwargs, f"functions.{name}.function"), **told)
        parts.append(RewardPart(config, spec, name, one.weight, tuple(one.only_for)))
    return parts


def start_parts(config: RewardConfig) -> list[RewardPart]:
    """The functions that `worker.reward` names, each loaded in its first process; none is left where one cannot be.

    Raises:
        RewardError: a file, a function, its arguments or its declarations are wrong.
    """
    parts = make_parts(config)
    try:
        for part in parts:
            part.start()
    except BaseException:
        for part in parts:
            part.close()
        raise
    return parts


def parts_for(parts: list[RewardPart], prompt: Prompt, column: str | None) -> list[RewardPart]:
    """Those of the started functions that score the answers to `prompt`.

    Args:
        column: `worker.reward.route_by`.

    Raises:
        RewardError: no function scores its row.
    """
    assert parts, "call start() first"
    if column is None:
        return parts
    if column not in prompt.row:
        raise RewardError(
            f"worker.reward.route_by: row {prompt.row_index} has no column {column!r}; it has "
            f"{', '.join(prompt.row) or 'none'}"
        )
    value = str(prompt.row[column])
    found = [part for part in parts if not part.only_for or value in part.only_for]
    if not found:
        known = sorted({value for part in parts for value in part.only_for})
        raise RewardError(
            f"worker.reward.functions: none scores row {prompt.row_index}, whose {column!r} is {value!r}; their "
            f"only_for hold {', '.join(known)}. Add {value!r} to one of them, or a function without only_for"
        )
    return found


def weighted(results: Mapping[str, Rewards], weights: Mapping[str, float]) -> Rewards:
    """One set of numbers of those that each function gave for an answer.

    `overall` is the sum of theirs times their weights. Where one function scored the answer its other numbers keep
    their names; where several did, NAME holds the `overall` of each as it gave it, NAME_KEY its other numbers.
    """
    rewards: Rewards = {"overall": sum(weights[name] * one["overall"] for name, one in results.items())}
    for name, one in results.items():
        parts = {key: value for key, value in one.items() if key != "overall"}
        if len(results) == 1:
            rewards |= parts
        else:
            rewards |= {name: one["overall"], **{f"{name}_{key}": value for key, value in parts.items()}}
    return rewards
