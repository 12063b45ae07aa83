"""Alarms: each is raised by its own trouble, once, and none by a run that learns."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from foveal.track.alarms import Alarms, repeated, signs
from foveal.types import Group, Metrics, Prompt, Response

FORTY = 40


def healthy(step: int, rng: np.random.Generator) -> Metrics:
    """A run that learns: reward and form rise, entropy falls, KL grows slowly, lengths grow."""
    done = step / 200
    return {
        "reward/overall": 0.2 + 0.6 * done + rng.normal(0, 0.02),
        "reward/format": min(1.0, 0.3 + 2 * done) - abs(rng.normal(0, 0.03)),
        "reward/groups_without_variance": min(0.9, 0.2 + 0.6 * done + rng.normal(0, 0.05)),
        "response_length/clip_ratio": max(0.0, 0.4 - done + rng.normal(0, 0.05)),
        "response_length/repeating": abs(rng.normal(0.02, 0.02)),
        "actor/entropy": 0.6 * math.exp(-2 * done) + abs(rng.normal(0, 0.01)),
        "actor/kl_loss": 0.4 * done + abs(rng.normal(0, 0.005)),
    }


def run(change: Callable[[int, Metrics], Metrics], steps: int = FORTY) -> tuple[list[str], list[Metrics]]:
    """The lines said and the metrics of each step; `change` spoils a healthy step."""
    said: list[str] = []
    alarms, rng = Alarms(said.append), np.random.default_rng(0)
    found = [alarms.look(step, change(step, healthy(step, rng))) for step in range(1, steps + 1)]
    return said, found


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_learns_raises_none(seed: int) -> None:
    said: list[str] = []
    alarms, rng = Alarms(said.append), np.random.default_rng(seed)
    found = [alarms.look(step, healthy(step, rng)) for step in range(1, 201)]
    assert said == []
    assert all(value == 0 for one in found for value in one.values())
    assert len(found[-1]) == 7


@pytest.mark.parametrize(
    ("alarm", "trouble", "key"),
    [
        ("reward_stuck", {"reward/overall": 0.1, "reward/groups_without_variance": 0.9}, "reward.reward_function"),
        ("no_variance", {"reward/groups_without_variance": 1.0}, "worker.rollout.n"),
        ("cut_off", {"response_length/clip_ratio": 0.99}, "data.max_response_length"),
        ("format_collapse", {"reward/format": 0.0}, "worker.actor.optim.lr"),
        ("entropy_collapse", {"actor/entropy": 0.001}, "worker.actor.clip_ratio_high"),
        ("kl_explosion", {"actor/kl_loss": 40.0}, "algorithm.kl_coef"),
        ("kl_explosion", {"actor/kl_loss": float("nan")}, "algorithm.kl_coef"),
        ("repeated_text", {"response_length/repeating": 0.8}, "worker.reward.functions"),
    ],
)
def test_trouble_is_said_once_with_its_key(alarm: str, trouble: Metrics, key: str) -> None:
    said, found = run(lambda step, metrics: metrics | trouble if step > 12 else metrics)
    assert len(said) == 1
    assert key in said[0]
    raised = [name for name, value in found[-1].items() if value]
    assert raised == [f"alarm/{alarm}"]
    assert not any(found[11].values())


def test_an_alarm_that_was_off_for_long_is_said_again() -> None:
    bad = {"response_length/clip_ratio": 1.0}
    said, _ = run(lambda step, metrics: metrics | bad if step < 6 or step > 30 else metrics)
    assert [line.split(":")[0] for line in said] == ["step 3", "step 33"]


def test_a_single_bad_step_is_none() -> None:
    said, _ = run(lambda step, metrics: metrics | {"actor/kl_loss": 30.0} if step == 20 else metrics)
    assert said == []


def test_scores_that_compare_answers_have_a_constant_mean_and_are_not_stuck() -> None:
    said, _ = run(lambda step, metrics: metrics | {"reward/overall": 0.5, "reward/groups_without_variance": 0.0})
    assert said == []


@pytest.mark.parametrize("name", ["format", "format_reward", "right_format", "form", "accuracy"])
def test_parts_of_the_reward_that_are_a_form(name: str) -> None:
    said, found = run(lambda step, metrics: {"reward/overall": step / 100, f"reward/{name}": 0.9 if step < 20 else 0.1})
    assert [line.split(" has")[0] for line in said] == ([] if name == "accuracy" else [f"step 22: reward/{name}"])
    assert ("alarm/format_collapse" in found[-1]) == (name != "accuracy")


def test_an_error_rate_that_falls_is_no_format_collapse() -> None:
    said, _ = run(lambda step, metrics: metrics | {"reward/format_error": 1.0 if step < 15 else 0.0})
    assert said == []


def test_an_entropy_that_is_no_number_has_not_collapsed() -> None:
    said, _ = run(lambda step, metrics: metrics | {"actor/entropy": math.nan} if step > 20 else metrics)
    assert said == []


def test_a_few_steps_of_even_groups_are_chance_where_groups_are_few() -> None:
    flat = {"reward/groups_without_variance": 1.0}
    said, _ = run(lambda step, metrics: metrics | flat if 10 < step < 15 else metrics)
    assert said == []


def test_metrics_that_are_not_there_make_no_alarm() -> None:
    assert Alarms(print).look(1, {"reward/overall": 0.5}) == {"alarm/reward_stuck": 0.0}


def test_signs_of_groups() -> None:
    prompt = Prompt("train-0-0", [1], [1], [], {}, 0, "7")
    loop, text = np.tile(np.arange(5), 20), np.arange(100)

    def response(tokens: np.ndarray, score: float) -> Response:
        return Response(tokens, np.zeros(len(tokens), np.float32), "stop", rewards={"overall": score})

    flat = Group(prompt, [response(loop, 0.0), response(text, 0.0)])
    mixed = Group(prompt, [response(text, 0.0), response(text, 1.0)])
    assert signs([flat, mixed]) == {"reward/groups_without_variance": 0.5, "response_length/repeating": 0.25}
    assert signs([]) == {}


def test_repetition_counts_runs_of_four_tokens() -> None:
    assert repeated(np.arange(50)) == 0
    assert repeated(np.tile(np.arange(10), 4)) == pytest.approx(1 - 10 / 37)
    assert repeated(np.zeros(10, np.int64)) == 0  # too short to say
