"""Filling the batch of a step: what happens to scores between the reward function and the credit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from foveal.config import load_config
from foveal.errors import DataError, RewardError
from foveal.rollout.collect import Collector
from foveal.types import Group, Metrics, Prompt, Response, Sampling


class Loader:
    def take(self, count: int) -> list[Prompt]:
        return [Prompt(f"train-0-{row}", [1], [1], [], {}, row, None) for row in range(count)]


class Workers:
    """Every answer has 10 tokens, the most there may be."""

    def rollout(self, prompts: list[Prompt], sampling: Sampling) -> Iterator[Group]:
        for prompt in prompts:
            answers = [
                Response(np.arange(10), np.zeros(10, dtype=np.float32), "length", weight_spans=[])
                for _ in range(sampling.n)
            ]
            yield Group(prompt, answers)


class Rewards:
    """1 for every answer, except that the first of each group has no score where `fail` is set."""

    step = 0

    def __init__(self, fail: bool = False) -> None:
        self.fail = fail
        self.counts: Metrics = {}

    def submit(self, group: Group) -> None:
        for index, response in enumerate(group.responses):
            if self.fail and index == 0:
                response.role = "left_out"
            else:
                response.rewards = {"overall": 1.0}

    def finish(self, order: Sequence[Group] = ()) -> Metrics:
        return self.counts


class ByRow(Rewards):
    """Every answer to the first row is right, one in two to the others; the key is `accuracy` and the score ten."""

    def submit(self, group: Group) -> None:
        for index, response in enumerate(group.responses):
            right = float(group.prompt.row_index == 0 or index == 0)
            response.rewards = {"overall": 10 * right, "accuracy": right}


def make_collector(rewards: Rewards, *argv: str) -> Collector:
    config = load_config(
        [
            "data.rollout_batch_size=2",
            "data.max_response_length=10",
            "worker.actor.global_batch_size=2",
            "worker.rollout.n=2",
            "worker.reward.overlong_buffer=4",
            *argv,
        ]
    )
    return Collector(config, *cast(Any, (Loader(), Workers(), rewards)))


def collect(rewards: Rewards, *argv: str) -> list[Group]:
    return make_collector(rewards, *argv).collect(1, {}, lambda _: None)[0]


def test_the_greedy_answer_is_punished_for_its_length_like_any_other() -> None:
    groups = collect(Rewards(), "algorithm.adv_estimator=remax")
    assert [[r.role for r in g.responses] for g in groups] == [["trained", "trained", "baseline"]] * 2
    assert {r.rewards["overall"] for g in groups for r in g.responses} == {0.0}


def test_an_answer_without_a_score_is_not_punished() -> None:
    for group in collect(Rewards(fail=True)):
        assert group.responses[0].rewards == {}
        assert group.responses[1].rewards == {"overall": 0.0, "overlong_penalty": pytest.approx(-1.0)}


def test_groups_left_over_wait_for_the_next_step_with_the_samplers_logprobs() -> None:
    argv = ["algorithm.online_filtering=true", "algorithm.filter_key=overall", "algorithm.filter_high=2"]
    collector = make_collector(Rewards(), *argv, "data.mini_rollout_batch_size=3")
    collector.collect(1, {}, lambda _: None)
    (waiting,) = collector.surplus
    first, second = collector.collect(2, {}, lambda _: None)[0]
    assert first is waiting and first.prompt.uid == "train-0-2" and second.prompt.uid == "train-0-0"
    assert all(r.columns["old_logprobs"] is r.logprobs for r in first.responses)  # an earlier policy wrote them
    assert all("old_logprobs" not in r.columns for r in second.responses)
    assert {r.rewards["overall"] for g in (first, second) for r in g.responses} == {0.0}  # punished once


FILTER = ["algorithm.online_filtering=true", "algorithm.filter_key=accuracy"]


def test_rewards_are_those_of_all_answers_that_were_sampled() -> None:
    """As in EasyR1: the mean over groups that were kept for their mean would say nothing of the model."""
    collector = make_collector(ByRow(), *FILTER)
    groups, metrics = collector.collect(1, {}, lambda _: None)
    assert [g.prompt.row_index for g in groups] == [1, 1]  # of two tries, each with the rows 0 and 1
    assert metrics["reward/accuracy"] == 0.75 and metrics["reward/overall"] == 6.5  # one off each for length
    assert metrics["filter/tries"] == 2 and metrics["filter/kept_share"] == 0.5


def test_a_key_that_no_answer_has_ends_the_run_at_once() -> None:
    collector = make_collector(ByRow(), FILTER[0], "algorithm.filter_key=acc")
    with pytest.raises(
        RewardError, match=r"filter_key=acc: none of the answers to 2 prompts has it.*accuracy, overall"
    ):
        collector.collect(1, {}, lambda _: None)


def test_a_key_is_not_missed_where_calls_failed_or_answers_had_it_before() -> None:
    rewards = Rewards()
    collector = make_collector(rewards, *FILTER, "trainer.max_try_make_batch=1")
    rewards.counts = {"reward/timeouts": 4.0}
    with pytest.raises(DataError, match=r"kept 0 of 2 groups.*2 without the key \(what was scored has overall\)"):
        collector.collect(1, {}, lambda _: None)
    collector.rewards = cast(Any, ByRow())
    collector.collect(2, {}, lambda _: None)
    collector.rewards = cast(Any, Rewards())
    with pytest.raises(DataError, match="kept 0 of 2 groups"):
        collector.collect(3, {}, lambda _: None)
