"""What the trainer calls: submit groups while they come in, then finish the round and read the counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from foveal.config.schema_reward import RewardConfig
from foveal.reward.contract import Failure, Rewards
from foveal.reward.failures import FailureLog
from foveal.reward.part import RewardPart, parts_for, start_parts, weighted
from foveal.reward.sample import RewardSample, samples_of
from foveal.types import Group, Metrics, Prompt


class PromptDecoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any: ...


class RewardRunner:
    """Scores groups with the user's functions, in processes of their own; one runner each for training and validation.

    A batch function is called once in `finish` with all answers, or once for each group from `submit` on where its
    module sets REWARD_SPLIT = "group". A sequential one is called for each answer from `submit` on, so that scoring
    overlaps generation, in up to `worker.reward.num_cpus` processes.

    Args:
        tokenizer: turns prompts into text for the functions; without one they get "".

    Attributes:
        step: of the trainer, told to the functions; whoever submits groups keeps it up to date.
    """

    def __init__(
        self, config: RewardConfig, role: Literal["train", "val"], tokenizer: PromptDecoder | None = None
    ) -> None:
        self.config = config
        self.step = 0
        self._tokenizer = tokenizer
        self._failures = FailureLog(config, role)
        self._parts: list[RewardPart] = []
        self._groups: list[tuple[Group, list[RewardSample]]] = []
        self._restarts = 0

    def start(self) -> None:
        """Loads each function in its first process.

        Raises:
            RewardError: a file, a function, its arguments or its declarations are wrong.
        """
        if not self._parts:
            self._parts = start_parts(self.config)

    def submit(self, group: Group) -> None:
        """Adds the responses of `group` to the round; baseline ones are scored too.

        Raises:
            RewardError: no function scores its row.
        """
        samples = samples_of(group, self._text(group.prompt), self.step)
        parts = parts_for(self._parts, group.prompt, self.config.route_by)
        self._groups.append((group, samples))
        for part in parts:
            part.add(samples)

    def finish(self, order: Sequence[Group] = ()) -> Metrics:
        """Waits for the round's scores and writes them into the responses' `rewards`.

        A response whose `overall` is NaN or infinite gets the role "left_out" and no `overall`.

        Args:
            order: the groups in the order in which batch functions get them; that of `submit` without it.

        Returns:
            Counts of answers: `reward/left_out`, `reward/timeouts`, `reward/errors`; `reward/left_out_parts`, the
            numbers beside `overall` that were NaN or infinite; `reward/restarts`, the processes that were replaced.

        Raises:
            RewardError: a function raised, broke its contract or lost its process and `on_error` is "raise"; a batch
                function ran out of time and `on_error` is "raise"; or failures are beyond `max_error_rate`.
        """
        samples = self._numbered(order)
        failures: list[Failure] = []
        try:
            for part in self._parts:
                part.call_rest()
            for part in self._parts:
                failures += self._take(part, len(samples))
        finally:
            for part in self._parts:
                part.clear()
            self._groups = []
        bad_parts = sum(self._write(sample) for sample in samples)
        self._failures.check_rate()
        timeouts = sum(failure.kind == "timeout" for failure in failures)
        restarts = sum(part.restarts for part in self._parts)
        new_restarts, self._restarts = restarts - self._restarts, restarts
        return {
            "reward/left_out": float(sum("overall" not in sample.response.rewards for sample in samples)),
            "reward/left_out_parts": float(bad_parts),
            "reward/timeouts": float(timeouts),
            "reward/errors": float(len(failures) - timeouts),
            "reward/restarts": float(new_restarts),
        }

    def close(self) -> None:
        """Ends the reward processes, whatever they are doing. May be called again."""
        for part in self._parts:
            part.close()
        self._parts = []

    def __enter__(self) -> RewardRunner:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _text(self, prompt: Prompt) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(prompt.token_ids, skip_special_tokens=self.config.skip_special_tokens))

    def _numbered(self, order: Sequence[Group]) -> list[RewardSample]:
        """All samples of the round, numbered in the order of the groups in `order`."""
        places = {id(group): place for place, group in enumerate(order)}
        groups = sorted(self._groups, key=lambda pair: places.get(id(pair[0]), len(places)))
        samples = [sample for _, samples in groups for sample in samples]
        for index, sample in enumerate(samples):
            sample.index = index
        return samples

    def _take(self, part: RewardPart, count: int) -> list[Failure]:
        """Takes the results of `part` into the samples, of which there are `count`; returns those that are failures."""
        failures: list[Failure] = []
        for sample, outcome in part.results():
            sample.results[part.name] = outcome
            if isinstance(outcome, Failure):
                failures.append(outcome)
                self._failures.failed(part, sample, outcome, count)
            else:
                self._failures.scored()
        self._failures.tell_timeouts(part, [one for one in failures if one.kind == "timeout"], count)
        return failures

    def _write(self, sample: RewardSample) -> int:
        """Writes the numbers of `sample` into its response; returns how many beside `overall` are not finite."""
        failed: Rewards = {"overall": self.config.timeout_score}
        results = {name: failed if isinstance(one, Failure) else one for name, one in sample.results.items()}
        rewards = weighted(results, {part.name: part.weight for part in self._parts})
        finite = {key: value for key, value in rewards.items() if math.isfinite(value)}
        sample.response.rewards = finite
        if "overall" not in finite:
            sample.response.role = "left_out"
            odd = [name for name, one in results.items() if not math.isfinite(one["overall"])] or list(results)
            self._failures.tell_once(
                next(part for part in self._parts if part.name == odd[0]),
                "left out",
                f"returned the overall score {results[odd[0]]['overall']} for this answer; it is left out, like all "
                f"that follow (metric reward/left_out)\n{sample.describe()}",
            )
        return len(rewards) - len(finite) - ("overall" not in finite)
