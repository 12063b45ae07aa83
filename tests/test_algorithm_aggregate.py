"""Averages over the optimizer step."""

from __future__ import annotations

import math

import pytest
import torch

from foveal.algorithm import aggregate, count

LOSSES = torch.tensor([1.0, 3.0, 8.0, 5.0])
LENGTHS = torch.tensor([3, 0, 1])
ALL = torch.ones(4, dtype=torch.bool)


def test_token_mode_is_the_mean_over_all_tokens():
    assert aggregate(LOSSES, LENGTHS, ALL, "token", 4, 2).item() == pytest.approx(17 / 4)


def test_seq_mode_is_the_mean_of_the_responses_means():
    assert aggregate(LOSSES, LENGTHS, ALL, "seq", 4, 2).item() == pytest.approx((4 + 5) / 2)


def test_seq_sum_norm_divides_each_responses_sum_by_the_constant():
    assert aggregate(LOSSES, LENGTHS, ALL, "seq_sum_norm", 4, 2, 10.0).item() == pytest.approx((12 + 5) / 10 / 2)


def test_every_token_weighs_the_same_under_seq_sum_norm():
    losses = LOSSES.clone().requires_grad_()
    aggregate(losses, LENGTHS, ALL, "seq_sum_norm", 4, 2, 10.0).backward()
    assert losses.grad.tolist() == pytest.approx([1 / 20] * 4)


@pytest.mark.parametrize("constant", [None, 0.0, math.nan])
def test_seq_sum_norm_without_a_constant_is_refused(constant):
    with pytest.raises(ValueError, match=f"needs a constant above 0 to divide by; given: {constant}"):
        aggregate(LOSSES, LENGTHS, ALL, "seq_sum_norm", 4, 2, constant)


@pytest.mark.parametrize(("mode", "expected"), [("token", 9 / 2), ("seq", 8.0 / 1), ("seq_sum_norm", 8.0 / 5)])
def test_only_masked_in_tokens_count(mode, expected):
    # Of the first response one token counts (8), of the last none; token mode also counts a token in another part.
    mask = torch.tensor([False, False, True, False])
    losses = torch.tensor([math.nan, math.inf, 9.0 if mode == "token" else 8.0, math.nan])
    assert aggregate(losses, LENGTHS, mask, mode, 2, 1, 5.0).item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", ["token", "seq", "seq_sum_norm"])
def test_nothing_to_average_is_zero_with_a_zero_gradient(mode):
    losses = torch.ones(4, requires_grad=True)
    total = aggregate(losses, LENGTHS, ~ALL, mode, 0, 0, 5.0)
    total.backward()
    assert total.item() == 0.0 and losses.grad.tolist() == [0.0] * 4


def test_gradient_of_seq_mode_is_one_over_sequences_times_length():
    losses = LOSSES.clone().requires_grad_()
    aggregate(losses, LENGTHS, ALL, "seq", 4, 2).backward()
    assert losses.grad.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])


def test_count_leaves_out_responses_without_a_written_token():
    mask = torch.tensor([True, False, True, False])
    assert count(LENGTHS, mask) == (2, 1)
    assert count(LENGTHS, ALL) == (4, 2)


def test_count_of_nothing():
    assert count(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.bool)) == (0, 0)


def test_averaged_losses_are_refused():
    with pytest.raises(ValueError, match=r"shape \(\), but must have \(4,\)"):
        aggregate(LOSSES.mean(), LENGTHS, ALL, "token", 4, 2)


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="Allowed: token, seq, seq_sum_norm"):
        aggregate(LOSSES, LENGTHS, ALL, "sequence", 4, 2)
