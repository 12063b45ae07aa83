"""KL estimators and the coefficient's controller."""

from __future__ import annotations

import math

import pytest
import torch

from foveal.algorithm import KLController, kl_penalty
from foveal.errors import ConfigError

KINDS = ["kl", "abs", "mse", "low_var_kl"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("kl", [math.log(2), -math.log(2)]),
        ("abs", [math.log(2), math.log(2)]),
        ("mse", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2]),
        ("low_var_kl", [0.5 - 1 + math.log(2), 2 - 1 - math.log(2)]),
    ],
)
def test_estimators_at_ratios_two_and_a_half(kind, expected):
    logprobs = torch.tensor([0.5, 0.25], dtype=torch.float64).log()
    reference = torch.tensor([0.25, 0.5], dtype=torch.float64).log()
    assert kl_penalty(logprobs, reference, kind).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", ["kl", "low_var_kl"])
def test_estimator_is_unbiased(kind):
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = float((p * (p / q).log()).sum())
    assert float((p * kl_penalty(p.log(), q.log(), kind)).sum()) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_equals_finite_differences(kind):
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(6, dtype=torch.float64, generator=generator, requires_grad=True)
    reference = torch.randn(6, dtype=torch.float64, generator=generator)
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, reference, kind), (logprobs,))


@pytest.mark.parametrize("kind", KINDS)
def test_extremes_stay_finite(kind):
    logprobs = torch.tensor([-1e4, 0.0, -100.0], requires_grad=True)
    values = kl_penalty(logprobs, torch.tensor([0.0, -1e4, -100.0]), kind)
    values.sum().backward()
    assert values.isfinite().all() and logprobs.grad.isfinite().all()


def test_low_var_kl_is_at_most_ten():
    assert kl_penalty(torch.tensor([-50.0]), torch.tensor([0.0]), "low_var_kl").tolist() == [10.0]


def test_low_var_kl_keeps_tiny_differences():
    # d²/2 = 5e-13; exp(−d) − 1 + d in float32 would be 0 or noise of 1e-7.
    value = kl_penalty(torch.tensor([1e-6]), torch.tensor([0.0]), "low_var_kl").item()
    assert 0.0 <= value < 1e-10


def test_half_precision_is_computed_in_float32():
    assert kl_penalty(torch.zeros(1).bfloat16(), torch.zeros(1).bfloat16(), "kl").dtype == torch.float32


@pytest.mark.parametrize("kind", ["full", "k4"])
def test_other_kinds_are_refused_with_the_list(kind):
    with pytest.raises(ConfigError, match=f"kl_penalty={kind} .*Allowed: kl, abs, mse, low_var_kl"):
        kl_penalty(torch.zeros(1), torch.zeros(1), kind)


def test_fixed_coefficient_stays():
    controller = KLController(0.01)
    controller.update(100.0, 512)
    assert controller.kl_coef == 0.01


@pytest.mark.parametrize(("current", "factor"), [(0.2, 1.02), (0.11, 1.01), (0.0, 0.98), (0.1, 1.0)])
def test_adaptive_coefficient_moves_towards_the_target(current, factor):
    # 1,000 responses of a horizon of 10,000: a tenth of the clipped relative error (1 → 0.2, 0.1, −1 → −0.2, 0).
    controller = KLController(0.5, "adaptive", kl_target=0.1, kl_horizon=10000)
    controller.update(current, 1000)
    assert controller.kl_coef == pytest.approx(0.5 * factor)


def test_adaptive_coefficient_goes_on_from_a_saved_state():
    saved = KLController(0.5, "adaptive")
    saved.update(1.0, 1000)
    resumed = KLController(0.5, "adaptive")
    resumed.load_state_dict(saved.state_dict())
    assert resumed.kl_coef == saved.kl_coef != 0.5


def test_fixed_coefficient_follows_the_configuration_on_resume():
    resumed = KLController(0.1)
    resumed.load_state_dict({"kl_coef": 0.5})
    assert resumed.kl_coef == 0.1


@pytest.mark.parametrize("wrong", [{"kl_target": 0.0}, {"kl_horizon": 0}])
def test_adaptive_controller_refuses_zero_target_or_horizon(wrong):
    with pytest.raises(ConfigError, match="kl_target and kl_horizon above 0"):
        KLController(0.1, "adaptive", **wrong)
