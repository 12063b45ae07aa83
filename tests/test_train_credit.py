"""From scores to columns of the responses."""

from __future__ import annotations

import numpy as np
import pytest

from foveal.algorithm import KLController
from foveal.config import load_config
from foveal.errors import RewardError
from foveal.train.credit import assign_credit
from foveal.types import Group, Prompt, Response


def groups(*rewards: dict[str, float]) -> list[Group]:
    """One group, one answer of two tokens for each of the rewards."""
    answers = [Response(np.arange(2), np.zeros(2, dtype=np.float32), "stop", rewards=one) for one in rewards]
    return [Group(Prompt("train-0-0", [1], [1], [], {}, 0, None), answers)]


def credit(answers: list[Group], *argv: str) -> list[float]:
    config = load_config(
        [
            "worker.rollout.n=2",
            "algorithm.disable_kl=true",
            "algorithm.adv_estimator=gdpo",
            "algorithm.reward_parts={accuracy: 1, format: 1}",
            *argv,
        ]
    )
    assign_credit(answers, config, KLController(0.0))
    return [float(r.columns["advantages"][0]) for g in answers for r in g.responses]


@pytest.mark.parametrize("other", [{"acuracy": 1.0, "format": 0.0}, {}])
def test_a_part_that_the_reward_function_never_gives_is_refused(other: dict[str, float]) -> None:
    answers = groups({"overall": 1.0, **other}, {"overall": 0.0, **other})
    with pytest.raises(RewardError, match=r"algorithm\.reward_parts: no answer of this step has accuracy.*overall"):
        credit(answers)


def test_an_answer_may_lack_a_part() -> None:
    answers = groups({"overall": 1.0, "accuracy": 1.0, "format": 1.0}, {"overall": 0.0, "accuracy": 0.0})
    first, second = credit(answers)
    assert first > 0 > second


def test_a_step_whose_calls_all_failed_goes_on() -> None:
    assert credit(groups({"overall": 0.0}, {"overall": 0.0}), "worker.reward.on_error=score") == [0.0, 0.0]
