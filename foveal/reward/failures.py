"""What the run does about answers without a score: stop, or tell it once and count, up to a rate."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

from foveal.config.schema_reward import RewardConfig
from foveal.errors import RewardError
from foveal.reward.contract import Failure
from foveal.reward.part import RewardPart
from foveal.reward.sample import RewardSample
from foveal.track.console import note

WINDOW = 500
"""Answers over which `worker.reward.max_error_rate` is taken."""
WORDS = {
    "timeout": "ran out of time",
    "raised": "raised",
    "unscored": "had none to get",
    "broken": "broke the contract",
    "died": "ended the process",
    "memory": "took too much memory",
}
UNDECLARED = (
    "The module has no REWARD_TYPE, so the function is given a list of dicts; one that takes a single dict needs "
    'REWARD_TYPE = "sequential", or worker.reward.reward_type=sequential'
)


@dataclass
class FailureLog:
    """Failures of one runner: told once each kind, counted, and the end of the run when they are too many."""

    config: RewardConfig
    role: Literal["train", "val"]
    _told: set[tuple[str, str]] = field(default_factory=set)
    _recent: deque[str] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _first: dict[str, str] = field(default_factory=dict)

    def scored(self) -> None:
        """Notes an answer that got its score."""
        self._recent.append("")

    def failed(self, part: RewardPart, sample: RewardSample, failure: Failure, count: int) -> None:
        """Notes an answer without a score.

        Args:
            count: answers of the round.

        Raises:
            RewardError: `on_error` is "raise". An answer of a sequential function that ran out of time or has no score
                through no fault of the function has cost nothing else, so that it never ends the run by itself.
        """
        self._recent.append(failure.kind)
        alone = failure.kind in ("timeout", "unscored") and part.info.kind == "sequential"
        stops = self.config.on_error == "raise" and not alone
        if not stops and (part.name, failure.kind) in self._told:
            return  # told before, and the account kept
        message = _explain(sample, failure, count)
        account = f"{part.spec.label} {message}\n{_cure(failure, part)}"
        if stops:
            raise RewardError(account)
        self._first.setdefault(failure.kind, account)
        self.tell_once(
            part,
            failure.kind,
            f"{message}\n  scored {self.config.timeout_score:g} (worker.reward.timeout_score), like all that follow "
            "(metrics reward/errors, reward/timeouts)",
        )

    def tell_once(self, part: RewardPart, topic: str, message: str) -> None:
        """Says something about a function the first time that it happens."""
        if (part.name, topic) not in self._told:
            self._told.add((part.name, topic))
            note(f"reward ({self.role}): {part.spec.label} {message}")

    def tell_timeouts(self, part: RewardPart, late: list[Failure], count: int) -> None:
        """Says how many of a round's `count` answers ran out of time."""
        if late:
            note(
                f"reward ({self.role}): {part.spec.label}: {len(late)} of {count} samples {late[0].text} and were "
                f"scored {self.config.timeout_score:g} (worker.reward.time_limit, worker.reward.timeout_score)"
            )

    def check_rate(self) -> None:
        """Raises a RewardError with an account when too many of the last answers have no score."""
        kinds = Counter(kind for kind in self._recent if kind)
        failed = kinds.total()
        if failed <= self.config.max_error_rate * WINDOW:
            return
        account = ", ".join(f"{count} {WORDS[kind]}" for kind, count in kinds.most_common())
        examples = "\n".join(self._first[kind] for kind in kinds if kind in self._first)
        raise RewardError(
            f"reward ({self.role}): {failed} of the last {len(self._recent)} answers got no score: {account}. The run "
            f"stops at {self.config.max_error_rate * WINDOW:g} of {WINDOW} (worker.reward.max_error_rate="
            f"{self.config.max_error_rate:g}). The first of each kind:\n{examples}"
        )


def _explain(sample: RewardSample, failure: Failure, count: int) -> str:
    message = f"{failure.text}, "
    if failure.covers > 1:
        message += f"in a batch of {failure.covers} answers, the first being\n{sample.describe()}"
    else:
        message += f"on this answer of {count}:\n{sample.describe()}"
    return f"{message}\n{failure.traceback}" if failure.traceback else message


def _cure(failure: Failure, part: RewardPart) -> str:
    go_on = "worker.reward.on_error=score would score such answers worker.reward.timeout_score and go on."
    if failure.cure:
        return f"{failure.cure} {go_on}"
    if failure.kind == "timeout":
        return (
            "The limit is worker.reward.time_limit for each answer of the call, and worker.reward.batch_time_limit for "
            'a call. With REWARD_TYPE = "sequential" only the answer that is stuck would be lost. '
            f"{go_on}"
        )
    if not part.info.declares_kind and may_take_one(failure):
        return f"{UNDECLARED}. {go_on}"
    return go_on


def may_take_one(failure: Failure) -> bool:
    """Whether it is what a function that takes a single dict does with a list of them."""
    return failure.kind == "broken" or "TypeError" in failure.text or "AttributeError" in failure.text
