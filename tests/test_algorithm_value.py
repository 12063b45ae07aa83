"""The clipped value loss against cases worked out by hand, a plain loop and finite differences."""

from __future__ import annotations

import random

import pytest
import torch

from foveal.algorithm.value import value_loss


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def random_case(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = random.Random(seed)
    values, old, returns = (tensor(*(rng.gauss(0, 1) for _ in range(40))) for _ in range(3))
    return values.requires_grad_(), old, returns, torch.tensor([rng.random() < 0.8 for _ in range(40)])


def everywhere(values: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(values, dtype=torch.bool)


def test_cases_worked_out_by_hand() -> None:
    # From old value 0 with c = 0.5. Return 1: at 0.4 nothing is cut, ½·0.6²; at 0.9 it counts as 0.5, ½·0.5², which is
    # more than ½·0.1². Return −1: at 0.9 the value itself is further off, ½·1.9². At −0.7 it counts as −0.5.
    values = tensor(0.4, 0.9, 0.9, -0.7).requires_grad_()
    losses, stats = value_loss(values, torch.zeros_like(values), tensor(1, 1, -1, -1), everywhere(values), 0.5)
    assert losses.tolist() == pytest.approx([0.18, 0.125, 1.805, 0.125])
    assert stats["vf_clipfrac"].item() == 2 and stats["vpred_mean"].item() == pytest.approx(1.5)
    assert torch.autograd.grad(losses.sum(), values)[0].tolist() == pytest.approx([-0.6, 0.0, 1.9, 0.0])


def test_a_value_that_has_not_moved_has_the_plain_squared_error() -> None:
    values = tensor(0.3, -2.0).requires_grad_()
    losses, stats = value_loss(values, values.detach(), tensor(1.0, 5.0), everywhere(values), 0.1)
    assert losses.tolist() == pytest.approx([0.245, 24.5]) and stats["vf_clipfrac"].item() == 0
    assert torch.autograd.grad(losses.sum(), values)[0].tolist() == pytest.approx([-0.7, -7.0])


@pytest.mark.parametrize("seed", range(3))
def test_against_a_loop(seed: int) -> None:
    values, old, returns, mask = random_case(seed)
    losses, stats = value_loss(values, old, returns, mask, 0.5)
    clipped, total = 0, 0.0
    for v, o, r, kept, found in zip(*(x.tolist() for x in (values, old, returns, mask, losses)), strict=True):
        near = min(max(v, o - 0.5), o + 0.5)
        assert found == pytest.approx(max((v - r) ** 2, (near - r) ** 2) / 2 if kept else 0.0, abs=1e-12)
        clipped += kept and (near - r) ** 2 > (v - r) ** 2
        total += v if kept else 0.0
    assert stats["vf_clipfrac"].item() == clipped > 0 and stats["vpred_mean"].item() == pytest.approx(total)


def test_gradient_against_finite_differences() -> None:
    values, old, returns, mask = random_case(7)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, mask, 0.5)[0], values)


def test_nan_outside_the_mask_reaches_nothing() -> None:
    values = tensor(0.4, float("nan")).requires_grad_()
    losses, stats = value_loss(values, tensor(0.0, float("nan")), tensor(1.0, 1.0), torch.tensor([True, False]), 0.5)
    assert losses.tolist() == pytest.approx([0.18, 0.0]) and stats["vpred_mean"].item() == pytest.approx(0.4)
    assert torch.autograd.grad(losses.sum(), values)[0].tolist() == pytest.approx([-0.6, 0.0])


def test_no_tokens() -> None:
    losses, stats = value_loss(tensor(), tensor(), tensor(), torch.zeros(0, dtype=torch.bool), 0.5)
    assert losses.shape == (0,) and stats["vf_clipfrac"].item() == 0


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"returns has shape \(1,\), but must have \(2,\)"):
        value_loss(tensor(1, 2), tensor(1, 2), tensor(1), torch.ones(2, dtype=torch.bool), 0.5)
