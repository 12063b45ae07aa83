"""Steps of several GPUs, predicted from a record of one, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.scale_check import bases, compared, measured_in, predicted
from benchmarks.scale_model import hand_over_seconds
from foveal.plan.seconds import GATHER_SECONDS, SUM_SECONDS

HAND_OVER = hand_over_seconds("3B")
CONSTANT = 500 * 0.004  # 500 decode steps: 8 GB of weights at 4 TB/s, and 2 ms
ANSWERS = 640 * 0.01
REST = 0.3
DRIVER = (32 * 128 * 5 * 500 + 2 * 128 * 400_000) / 5e9
PERFECT = 1e30
OF_GROUP = 560 + 5 * 500
UNITS = 36 + 1 + 1  # layers, the vision tower, the rest with the tied embedding
GATHER, SUM = UNITS * GATHER_SECONDS, UNITS * SUM_SECONDS


def side(**layout: Any) -> dict[str, Any]:
    one: dict[str, Any] = {"settings": []}
    one |= {"gpus": 2, "engine_gpus": 0, "tensor_parallel": 1, "ahead": False, "prompts": 128, "optimizer_steps": 4}
    return one | {"medians": {}, "pass_tokens": 32 * OF_GROUP} | layout


def alone(gen: float, **layout: Any) -> dict[str, Any]:
    seconds = {"gen": gen, "reward": 0.1, "old": 4.0, "adv": 0.2, "update_actor": 16.0}
    return side(gpus=1, medians=seconds | {"step": sum(seconds.values()) + REST}, **layout)


def record(network: float = PERFECT, **sides: dict[str, Any]) -> dict[str, Any]:
    about = {"model": "3B", "parameters": 4e9, "prompt_tokens": 560, "response_tokens": 500, "n": 5}
    about |= {"settings": [], "gather_weights": "layer"}
    found = {"one": alone(HAND_OVER + CONSTANT + ANSWERS), **sides}
    return about | {"network": {"all_gather": network}, "sides": found}


def test_one_gpu_takes_what_it_took() -> None:
    measured = record()
    one = measured["sides"]["one"]
    found = predicted(measured, one)
    assert found["gen"] == pytest.approx(one["medians"]["gen"]) and found["step"] == pytest.approx(
        one["medians"]["step"]
    )


def test_two_gpus_halve_what_goes_with_answers() -> None:
    found = predicted(record(), side())
    assert found["gen"] == pytest.approx(HAND_OVER + CONSTANT + ANSWERS / 2)
    # 64 groups are one pass, 16 of each optimizer step as well
    assert found["old"] == pytest.approx(2 + GATHER) and found["update"] == pytest.approx(8 + 4 * (2 * GATHER + SUM))
    assert found["reward"] == pytest.approx(0.1)
    assert found["step"] == pytest.approx(found["gen"] + found["old"] + found["update"] + 0.1 + 0.2 + REST + DRIVER)


def test_weights_are_gathered_as_a_side_says_or_the_record() -> None:
    once = side(settings=["worker.actor.fsdp.gather_weights=step"])
    layer, step = predicted(record(), side()), predicted(record(), once)
    assert layer["update"] - step["update"] == pytest.approx(4 * GATHER)
    assert layer["old"] == step["old"]  # a single pass


def test_passes_of_a_budget_that_was_set_are_alike_with_and_without_gradient() -> None:
    measured = record()
    assert (measured_in(measured).old_groups, measured_in(measured).update_groups) == (7 * 32, 32)
    measured["settings"] = ["worker.actor.token_budget=100000"]
    assert measured_in(measured).old_groups == 32


def test_a_slow_network_shows_where_computing_does_not_hide_it() -> None:
    """Half of 8 GB at 4 GB/s: a gathering takes one second."""
    found = predicted(record(network=4e9), side())
    assert found["old"] == pytest.approx(2 + 0.2 + GATHER)
    assert found["update"] == pytest.approx(
        4 * (2 + 2 + 2 * GATHER + SUM)
    )  # an optimizer step computes for 2 s and talks for 4
    assert found["gen"] == pytest.approx(HAND_OVER + 1 + CONSTANT + ANSWERS / 2)


def test_tensor_parallelism_divides_part_of_a_rollout() -> None:
    found = predicted(record(), side(tensor_parallel=2))
    decode_step = 0.001 + 0.002 + 72 * 20e-6  # half of the weights, the launches, two sums in each of 36 layers
    assert found["gen"] == pytest.approx(HAND_OVER + 500 * decode_step + ANSWERS * (0.4 + 0.2))


def test_a_step_ahead_takes_as_long_as_its_slower_side_and_the_hand_over() -> None:
    ahead = predicted(record(network=8e9), side(engine_gpus=1, ahead=True))
    assert ahead["gen"] == pytest.approx(CONSTANT + ANSWERS) and ahead["update"] == pytest.approx(16)
    assert ahead["step"] == pytest.approx(4 + 16 + 0.2 + REST + HAND_OVER + 1 + DRIVER)
    by_turns = predicted(record(network=8e9), side(engine_gpus=1))
    assert by_turns["step"] == pytest.approx(ahead["step"] + CONSTANT + ANSWERS + 0.1)


def test_a_side_with_fewer_prompts_tells_what_does_not_go_with_them() -> None:
    fewer = alone(HAND_OVER + 3 + ANSWERS / 2, prompts=64)
    measured = record(half=fewer)
    measured["sides"]["one"]["medians"]["gen"] = HAND_OVER + 3 + ANSWERS
    assert measured_in(measured).constant_step == pytest.approx(0.006)


def test_a_table_says_how_far_off_each_phase_is() -> None:
    seconds = {"gen": 10.0, "reward": 0.1, "old": 4.0, "update_actor": 16.0, "step": 20.0}
    rows = compared(record(two=side(medians=seconds), failed=side()))
    off = {row["phase"]: row["off"] for row in rows}
    assert {row["side"] for row in rows} == {"two"}
    assert off["old"] == pytest.approx((2 + GATHER) / 4 - 1)
    assert off["update_actor"] == pytest.approx((8 + 4 * (2 * GATHER + SUM)) / 16 - 1)
    assert [row["phase"] for row in rows if not row["counts"]] == ["reward"]  # a hundredth of the step


def test_nothing_is_predicted_without_a_side_of_one_gpu() -> None:
    with pytest.raises(SystemExit, match="one GPU"):
        bases(record() | {"sides": {"two": side(medians={"gen": 1.0})}})
