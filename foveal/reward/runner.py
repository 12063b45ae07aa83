"""What the trainer calls: submit groups while they come in, then finish the round and read the counts."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from foveal.config.schema_worker import RewardConfig
from foveal.errors import RewardError
from foveal.reward.contract import Failure, FunctionInfo, Outcome
from foveal.reward.loading import parse_spec
from foveal.reward.pool import RewardPool
from foveal.track.console import note
from foveal.types import Group, Metrics, Response

MIN_BATCH_LIMIT = 2.0
"""Seconds that a call of a batch function has at least, however few its answers."""


@dataclass
class _Sample:
    """One answer to score, with its 0-based index in the round."""

    index: int
    response: Response
    ground_truth: Any

    @property
    def input(self) -> dict[str, Any]:
        """What the user's function gets for it."""
        return {
            "response": self.response.text,
            "response_length": len(self.response.token_ids),
            "ground_truth": self.ground_truth,
        }

    def describe(self) -> str:
        return (
            f"  sample {self.index} (counted from 0)\n"
            f"  response: {_excerpt(self.response.text)}\n"
            f"  ground truth: {_excerpt(self.ground_truth)}"
        )


class RewardRunner:
    """Scores groups with the user's function, in processes of their own; one runner each for training and validation.

    A batch function is called once in `finish` with all answers in the order of `submit`, or once for each group from
    `submit` on where its module sets REWARD_SPLIT = "group". A sequential one is called for each answer from `submit`
    on, so that scoring overlaps generation, in up to `worker.reward.num_cpus` processes.
    """

    def __init__(self, config: RewardConfig, role: Literal["train", "val"]) -> None:
        self.config = config
        self.role = role
        self._pool: RewardPool | None = None
        self._samples: list[_Sample] = []
        self._calls: list[Future[list[Outcome]]] = []
        self._told: set[str] = set()

    def start(self) -> None:
        """Loads the function in its first process.

        Raises:
            RewardError: the file, the function, its arguments or its declarations are wrong.
        """
        if self._pool is None:
            spec = parse_spec(self.config.reward_function, self.config.reward_function_kwargs)
            self._pool = RewardPool(spec, self.config.num_cpus)

    @property
    def streams(self) -> bool:
        """Whether groups are scored as they are submitted, so that it pays to submit each as soon as it is generated.

        A batch function gets all answers of a round at once instead, in the order of submission.
        """
        return self._started.info.kind == "sequential" or self._started.info.split_groups

    def submit(self, group: Group) -> None:
        """Adds the responses of `group` to the round; baseline ones are scored too."""
        info = self._started.info
        truth = plain(group.prompt.answer)
        first = len(self._samples)
        self._samples += [_Sample(first + i, response, truth) for i, response in enumerate(group.responses)]
        added = self._samples[first:]
        if info.kind == "sequential":
            for sample in added:
                self._calls.append(self._started.submit([sample.input], self.config.time_limit))
        elif info.split_groups:
            self._call_batch(added)

    def finish(self) -> Metrics:
        """Waits for the round's scores and writes them into the responses' `rewards`.

        A response whose `overall` is NaN or infinite gets the role "left_out" and no `overall`.

        Returns:
            Counts of answers: `reward/left_out`, `reward/timeouts`, `reward/errors`; and `reward/left_out_parts`, the
            numbers beside `overall` that were NaN or infinite.

        Raises:
            RewardError: the function raised, broke its contract or lost its process and `on_error` is "raise", or a
                batch function ran out of time and `on_error` is "raise".
        """
        samples, calls = self._samples, self._calls
        if samples and not calls:
            self._call_batch(samples)
        outcomes: list[Outcome] = []
        try:
            for call in calls:
                for outcome in call.result():
                    self._take(samples[len(outcomes)], outcome, len(samples))
                    outcomes.append(outcome)
        finally:
            for call in calls:
                call.cancel()
            self._samples, self._calls = [], []
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        timeouts = [failure for failure in failures if failure.kind == "timeout"]
        if timeouts:
            self._tell(
                f"{len(timeouts)} of {len(samples)} samples {timeouts[0].text} and were scored "
                f"{self.config.timeout_score:g} (worker.reward.time_limit, worker.reward.timeout_score)"
            )
        parts = [
            value for one in outcomes if not isinstance(one, Failure) for key, value in one.items() if key != "overall"
        ]
        return {
            "reward/left_out": float(sum("overall" not in sample.response.rewards for sample in samples)),
            "reward/left_out_parts": float(sum(not math.isfinite(value) for value in parts)),
            "reward/timeouts": float(len(timeouts)),
            "reward/errors": float(len(failures) - len(timeouts)),
        }

    def close(self) -> None:
        """Ends the reward processes, whatever they are doing. May be called again."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> RewardRunner:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _started(self) -> RewardPool:
        assert self._pool is not None, "call start() first"
        return self._pool

    def _call_batch(self, samples: list[_Sample]) -> None:
        limit = max(MIN_BATCH_LIMIT, self.config.time_limit * len(samples))
        self._calls.append(self._started.submit([sample.input for sample in samples], limit))

    def _take(self, sample: _Sample, outcome: Outcome, count: int) -> None:
        """Writes one outcome into its response, or raises."""
        if isinstance(outcome, Failure):
            # A stuck answer of a sequential function has cost nothing else, so it never stops the run.
            if outcome.kind != "timeout" or self._started.info.kind == "batch":
                self._take_failure(sample, outcome, count)
            sample.response.rewards = {"overall": self.config.timeout_score}
            return
        sample.response.rewards = {key: value for key, value in outcome.items() if math.isfinite(value)}
        if "overall" not in sample.response.rewards:
            sample.response.role = "left_out"
            self._tell_once(
                "left out",
                f"returned the overall score {outcome['overall']} for this answer; it is left out, like all that "
                f"follow (metric reward/left_out)\n{sample.describe()}",
            )

    def _take_failure(self, sample: _Sample, failure: Failure, count: int) -> None:
        message = f"{failure.text}, "
        if failure.covers > 1:
            message += f"in a batch of {failure.covers} answers, the first being\n{sample.describe()}"
        else:
            message += f"on this answer of {count}:\n{sample.describe()}"
        if failure.traceback:
            message += f"\n{failure.traceback}"
        if self.config.on_error == "raise":
            raise RewardError(f"{self._started.spec.label} {message}\n{_cure(failure, self._started.info)}")
        self._tell_once(
            "failure",
            f"{message}\n  scored {self.config.timeout_score:g}, like all that follow "
            "(metrics reward/errors, reward/timeouts)",
        )

    def _tell_once(self, topic: str, message: str) -> None:
        if topic not in self._told:
            self._told.add(topic)
            self._tell(message)

    def _tell(self, message: str) -> None:
        note(f"reward ({self.role}): {self._started.spec.label} {message}")


def _cure(failure: Failure, info: FunctionInfo) -> str:
    go_on = "worker.reward.on_error=score would score such answers worker.reward.timeout_score and go on."
    if failure.kind == "timeout":
        return (
            'The limit is worker.reward.time_limit for each answer of the call. With REWARD_TYPE = "sequential" only '
            f"the answer that is stuck would be lost. {go_on}"
        )
    if not info.declares_kind and (failure.kind == "broken" or "TypeError" in failure.text):
        return (
            "The module has no REWARD_TYPE, so the function is given a list of dicts; one that takes a single dict "
            f'needs REWARD_TYPE = "sequential". {go_on}'
        )
    return go_on


def plain(value: Any) -> Any:
    """`value` with numpy scalars as numbers, and arrays and tuples as lists: what a row read from JSON would hold."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def _excerpt(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}… ({len(text)} characters)"
