"""Whole groups to workers by what they cost; where pictures are stays where it is when it may."""

from __future__ import annotations

import numpy as np
import pytest

from foveal.cluster.balance import SLACK, assign, sizes_of, training_cost
from foveal.models.flops import FlopCounter
from foveal.types import Group, Prompt, Response
from tests.rollout_models import IMAGE, VISION_END, VISION_START, tiny_model


def loads(costs: list[float], owners: list[int], workers: int) -> list[float]:
    return [sum(c for c, owner in zip(costs, owners, strict=True) if owner == worker) for worker in range(workers)]


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_loads_are_even_in_every_optimizer_step(workers: int) -> None:
    costs = np.random.default_rng(0).uniform(1, 5, 120).tolist()
    owners = assign(costs, [()] * 120, 60, workers)
    for start in (0, 60):
        step = loads(costs[start : start + 60], owners[start : start + 60], workers)
        assert max(step) < 1.1 * sum(step) / workers


def test_a_group_stays_with_its_prompt_unless_its_worker_has_too_much() -> None:
    assert assign([1.0] * 6, [[i % 2] for i in range(6)], 6, 2) == [0, 1, 0, 1, 0, 1]
    owners = assign([1.0] * 6, [[0]] * 6, 6, 2)
    assert sorted(owners) == [0, 0, 0, 1, 1, 1]
    costs = np.random.default_rng(1).uniform(1, 2, 200).tolist()
    homes = [[i % 4] for i in range(200)]
    owners = assign(costs, homes, 200, 4)
    assert sum(owner in home for owner, home in zip(owners, homes, strict=True)) > 170
    assert max(loads(costs, owners, 4)) <= SLACK * sum(costs) / 4 + 2


def test_more_workers_than_groups_leaves_some_without() -> None:
    owners = assign([2.0, 1.0], [(), ()], 2, 3)
    assert owners == [0, 1]
    assert [sizes_of(owners, 1, worker) for worker in range(3)] == [[1, 0], [0, 1], [0, 0]]


def test_sizes_add_up_to_the_optimizer_steps() -> None:
    owners = assign([1.0, 5.0, 1.0, 1.0, 2.0], [()] * 5, 2, 2)
    sizes = [sizes_of(owners, 2, worker) for worker in range(2)]
    assert [sum(step) for step in zip(*sizes, strict=True)] == [2, 2, 1]


def group(pictures: int, *lengths: int) -> Group:
    ids = [7, *[VISION_START, *[IMAGE] * 4, VISION_END] * pictures, 9]
    responses = [Response(np.arange(n), np.zeros(n, np.float32), "stop") for n in lengths]
    return Group(Prompt("p", ids, ids, [], {}, 0, None), responses)


def test_cost_counts_answers_pictures_and_copies_of_the_prompt() -> None:
    counter = FlopCounter(tiny_model("qwen3_vl"))

    def cost(pictures: int, *lengths: int, shared_prefix: bool = True) -> float:
        return training_cost(group(pictures, *lengths), counter, {IMAGE}, 2, shared_prefix=shared_prefix)

    assert cost(0, 5, 5) < cost(0, 5, 9) < cost(1, 5, 9) < cost(2, 5, 9)
    assert cost(1, 5, 9) < cost(1, 5, 9, shared_prefix=False)
    assert cost(1) == cost(1, 0) == 0
    assert cost(1, 9, shared_prefix=True) == cost(1, 9, shared_prefix=False)
