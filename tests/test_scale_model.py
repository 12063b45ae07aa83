"""The scaling model gives back what was measured on one device, and behaves as its assumptions say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.scale_model import Network, Work, measured, step_seconds

ONE = measured("7B")
EVEN = Work(prompts=256, spread=0.0)


def test_one_device_takes_what_was_measured() -> None:
    found = step_seconds(ONE, EVEN, Network(), 1)
    assert found["rollout"] == pytest.approx(ONE.prefill_seconds + ONE.decode_seconds, rel=1e-6)
    assert found["old"] == pytest.approx(ONE.old_seconds * 256 / ONE.groups, rel=1e-6)
    assert found["update"] == pytest.approx(ONE.update_seconds * 256 / ONE.groups + 4 * ONE.optimizer_seconds, rel=1e-6)
    assert found["driver"] == 0


def test_with_a_perfect_network_the_passes_scale_with_the_devices() -> None:
    perfect = Network(nvlink=1e30, fabric=1e30, driver=1e30, unit_gather=0, unit_sum=0)
    alone, eight = (step_seconds(ONE, EVEN, perfect, gpus) for gpus in (1, 8))
    assert eight["old"] == pytest.approx(alone["old"] / 8) and eight["update"] == pytest.approx(alone["update"] / 8)
    assert eight["rollout"] > alone["rollout"] / 8  # a decode step's constant part stays


def test_uneven_answers_and_slow_networks_cost_time() -> None:
    uneven, slow = replace(EVEN, spread=0.9), Network(fabric=1e9)
    for gpus in (16, 64):
        even = step_seconds(ONE, EVEN, Network(), gpus)
        assert step_seconds(ONE, uneven, Network(), gpus)["rollout"] > even["rollout"]
        assert step_seconds(ONE, EVEN, slow, gpus)["update"] > even["update"]


def test_weights_gathered_once_a_step_save_the_host_time_and_traffic() -> None:
    """32 groups an optimizer step on each of two devices, in passes of three: six passes, with two gatherings each."""
    alone = Network(nvlink=1e30, fabric=1e30, unit_gather=0.001, unit_sum=0)
    layer, step = (
        step_seconds(ONE, replace(EVEN, prompts=128, gather_weights=by), alone, 2) for by in ("layer", "step")
    )
    assert ONE.units == 28 + 3  # layers, vision tower, embedding, the rest
    assert layer["update"] - step["update"] == pytest.approx(31 * 0.001 * 4 * (6 * 2 - 1))
    assert layer["old"] - step["old"] == pytest.approx(31 * 0.001 * (math.ceil(64 / ONE.old_groups) - 1))
    assert replace(EVEN, gather_weights="auto").gathers_once(8e9) and not EVEN.gathers_once(14e9)


def test_whole_weights_are_gathered_at_the_rate_of_the_slowest_link() -> None:
    network = Network(gpus_of_node=8, nvlink=100e9, fabric=10e9)
    assert network.gather_seconds(8e9, 8) == pytest.approx(0.07)
    assert network.gather_seconds(8e9, 16) == pytest.approx(0.07 + 0.05)
