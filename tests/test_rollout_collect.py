"""Filling the batch of a step: what happens to scores between the reward function and the credit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from foveal.config import load_config
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

    def submit(self, group: Group) -> None:
        for index, response in enumerate(group.responses):
            if self.fail and index == 0:
                response.role = "left_out"
            else:
                response.rewards = {"overall": 1.0}

    def finish(self, order: Sequence[Group] = ()) -> Metrics:
        return {}


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
