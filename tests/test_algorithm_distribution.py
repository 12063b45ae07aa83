"""Exact entropy and KL of whole distributions."""

from __future__ import annotations

import math

import pytest
import torch

from foveal.algorithm import entropy, kl_full

MASKED = -1e30


def logits(seed, rows=3, ids=7, dtype=torch.float64):
    return torch.randn(rows, ids, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 3


def test_entropy_by_hand():
    # Uniform over four, and 1/2, 1/4, 1/4: log 4 and 1.5 log 2.
    values = torch.tensor([[1.0, 1.0, 1.0, 1.0], [math.log(2), 0.0, 0.0, MASKED]], dtype=torch.float64)
    assert entropy(values).tolist() == pytest.approx([math.log(4), 1.5 * math.log(2)], abs=1e-15)


def test_kl_by_hand():
    # (1/2, 1/2) against (1/4, 3/4): log 2 / 2 + log(2/3) / 2.
    policy, reference = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[1.0, 3.0]], dtype=torch.float64).log()
    assert kl_full(policy, reference).tolist() == pytest.approx([(math.log(2) + math.log(2 / 3)) / 2], abs=1e-15)


@pytest.mark.parametrize("seed", range(3))
def test_both_equal_a_plain_loop(seed):
    policy, reference = logits(seed), logits(seed + 10)
    for row, (h, k) in enumerate(zip(entropy(policy).tolist(), kl_full(policy, reference).tolist(), strict=True)):
        p, q = ([math.exp(x) for x in t[row].tolist()] for t in (policy, reference))
        p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
        assert h == pytest.approx(-sum(x * math.log(x) for x in p), abs=1e-10)
        assert k == pytest.approx(sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)), abs=1e-10)


def test_both_do_not_change_when_all_logits_shift():
    policy, reference = logits(1), logits(2)
    assert entropy(policy + 5).tolist() == pytest.approx(entropy(policy).tolist(), abs=1e-12)
    assert kl_full(policy + 5, reference - 3).tolist() == pytest.approx(kl_full(policy, reference).tolist(), abs=1e-12)


def test_gradients_equal_finite_differences():
    policy, reference = logits(3).requires_grad_(), logits(4)
    assert torch.autograd.gradcheck(entropy, (policy,))
    assert torch.autograd.gradcheck(lambda x: kl_full(x, reference), (policy,))


def test_reference_gets_no_gradient():
    policy, reference = logits(3).requires_grad_(), logits(4).requires_grad_()
    kl_full(policy, reference).sum().backward()
    assert reference.grad is None and policy.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked_ids_count_for_nothing(dtype):
    full, shorter = logits(5, dtype=dtype), logits(6, dtype=dtype)
    masked, ref_masked = (torch.cat((t, torch.full((3, 2), MASKED, dtype=dtype)), 1) for t in (full, shorter))
    masked.requires_grad_()
    values = entropy(masked), kl_full(masked, ref_masked)
    torch.testing.assert_close(values, (entropy(full), kl_full(full, shorter)))
    (values[0] + values[1]).sum().backward()
    assert masked.grad.isfinite().all() and masked.grad[:, -2:].abs().max() == 0


@pytest.mark.parametrize("scale", [1e4, 1e8])
def test_certain_distributions_stay_finite(scale):
    policy = torch.tensor([[scale, 0.0, -scale], [0.0, 0.0, scale]], requires_grad=True)
    values = entropy(policy) + kl_full(policy, -policy)
    values.sum().backward()
    assert values.isfinite().all() and policy.grad.isfinite().all()
    assert entropy(policy).tolist() == [0.0, 0.0]


def test_equal_distributions_have_no_kl_and_no_gradient():
    policy = logits(7, dtype=torch.float32).requires_grad_()
    values = kl_full(policy, policy.detach().clone())
    values.sum().backward()
    assert values.tolist() == [0.0] * 3 and policy.grad.abs().max() < 1e-6


def test_half_precision_is_computed_in_float32():
    half = logits(8).bfloat16()
    assert entropy(half).dtype == kl_full(half, half).dtype == torch.float32


def test_no_rows_give_nothing():
    assert entropy(torch.zeros(0, 5)).shape == kl_full(torch.zeros(0, 5), torch.zeros(0, 5)).shape == (0,)


def test_one_id_is_certain():
    assert entropy(torch.ones(2, 1)).tolist() == kl_full(torch.ones(2, 1), torch.zeros(2, 1)).tolist() == [0.0, 0.0]
