"""Importance weights between engine and trainer, and the measures of their gap."""

from __future__ import annotations

import math
import random
from typing import get_args

import pytest
import torch

from foveal.algorithm import gap_metrics, importance_weights
from foveal.algorithm.correction import KINDS
from foveal.config.schema_data import CORRECTION_BOUNDS, AlgorithmConfig
from foveal.errors import ConfigError


def weigh(ratios, kind, low=0.5, high=2.0, lengths=None, mask=None):
    old = torch.tensor(ratios, dtype=torch.float64).log() - 1
    weights, stats = importance_weights(
        old,
        torch.full_like(old, -1.0),
        torch.tensor([len(ratios)] if lengths is None else lengths),
        torch.tensor([True] * len(ratios) if mask is None else mask),
        kind,
        low,
        high,
    )
    return weights.tolist(), {name: value.item() for name, value in stats.items()}


# --- worked out by hand ---


def test_none_weighs_every_written_token_one():
    weights, stats = weigh([3.0, 0.1, 9.0], "none", mask=[True, True, False])
    assert weights == [1.0, 1.0, 0.0]
    assert stats == {"is_weight": 2.0, "is_cut": 0.0}


def test_tis_cuts_each_token_above_only():
    weights, stats = weigh([3.0, 0.1, 1.5], "tis")
    assert weights == pytest.approx([2.0, 0.1, 1.5])
    assert stats == {"is_weight": pytest.approx(3.6), "is_cut": 1.0}


def test_tis_seq_cuts_the_ratio_of_the_response():
    # 1.5 · 1.2 = 1.8 and 1.5 · 2 = 3.
    weights, stats = weigh([1.5, 1.2, 1.5, 2.0], "tis_seq", lengths=[2, 2])
    assert weights == pytest.approx([1.8, 1.8, 2.0, 2.0])
    assert stats["is_cut"] == 2.0


def test_mis_leaves_out_responses_beyond_the_bounds():
    # Ratios of the responses: 1.8, 3 and 0.25.
    weights, stats = weigh([1.5, 1.2, 1.5, 2.0, 0.25], "mis", lengths=[2, 2, 1])
    assert weights == pytest.approx([1.8, 1.8, 0.0, 0.0, 0.0])
    assert stats == {"is_weight": pytest.approx(3.6), "is_cut": 3.0}


def test_mis_with_low_zero_has_no_lower_bound():
    assert weigh([0.25], "mis", low=0.0)[0] == pytest.approx([0.25])


def test_icepop_leaves_out_tokens_beyond_the_bounds():
    weights, stats = weigh([1.5, 0.4, 6.0, 0.6], "icepop", 0.5, 5.0)
    assert weights == pytest.approx([1.5, 0.0, 0.0, 0.6])
    assert stats["is_cut"] == 2.0


def test_tokens_outside_the_mask_are_no_part_of_a_responses_ratio():
    weights, stats = weigh([1.5, math.nan, 1.2], "tis_seq", mask=[True, False, True])
    assert weights == pytest.approx([1.8, 0.0, 1.8])
    assert stats == {"is_weight": pytest.approx(3.6), "is_cut": 0.0}


def test_only_written_tokens_count_as_cut():
    assert weigh([3.0, 1.0, 1.0], "tis_seq", mask=[True, False, True])[1]["is_cut"] == 2.0


# --- against a loop ---


def loop(old, rollout, lengths, mask, kind, low, high):
    result, start = [], 0
    for length in lengths:
        tokens = range(start, start + length)
        start += length
        whole = math.prod(math.exp(old[t] - rollout[t]) for t in tokens if mask[t])
        for t in tokens:
            ratio = whole if kind in ("tis_seq", "mis") else math.exp(old[t] - rollout[t])
            kept = {"none": 1.0, "tis": min(ratio, high), "tis_seq": min(ratio, high)}
            result.append(kept.get(kind, ratio if low <= ratio <= high else 0.0) if mask[t] else 0.0)
    return result


def random_pair(seed):
    rng = random.Random(seed)
    lengths = [0, 1, *(rng.randint(0, 6) for _ in range(6))]
    old = [-rng.random() for _ in range(sum(lengths))]
    rollout = [value + rng.gauss(0, 0.5) for value in old]
    return old, rollout, lengths, [rng.random() < 0.8 for _ in old]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_weights_equal_a_plain_loop_on_ragged_batches(kind, seed):
    old, rollout, lengths, mask = random_pair(seed)
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (old, rollout)]
    weights, stats = importance_weights(*tensors, torch.tensor(lengths), torch.tensor(mask), kind, 0.6, 1.7)
    expected = loop(old, rollout, lengths, mask, kind, 0.6, 1.7)
    assert weights.tolist() == pytest.approx(expected, abs=1e-10)
    assert stats["is_weight"].item() == pytest.approx(sum(expected), abs=1e-10)


# --- edges ---


@pytest.mark.parametrize("kind", KINDS)
def test_equal_logprobs_weigh_exactly_one(kind):
    logprobs = torch.tensor([-0.1, -7.0, -3.0], requires_grad=True)
    mask = torch.ones(3, dtype=torch.bool)
    weights, stats = importance_weights(logprobs, logprobs.detach(), torch.tensor([2, 1]), mask, kind, 0.5, 2.0)
    assert weights.tolist() == [1.0] * 3 and stats["is_cut"].item() == 0.0
    assert not weights.requires_grad and weights.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_extremes_stay_finite(kind):
    old, rollout = torch.tensor([-1e4, 0.0, -1e30]), torch.tensor([0.0, -1e4, -1e30])
    weights, stats = importance_weights(
        old, rollout, torch.tensor([1, 1, 1]), torch.ones(3).bool(), kind, 0.0, math.inf
    )
    assert weights.isfinite().all() and all(value.isfinite() for value in stats.values())


@pytest.mark.parametrize("kind", KINDS)
def test_batch_without_tokens_has_no_weights(kind):
    nothing = torch.zeros(0)
    weights, stats = importance_weights(nothing, nothing, torch.tensor([0, 0]), nothing.bool(), kind, 0.5, 2.0)
    assert weights.shape == (0,) and {value.item() for value in stats.values()} == {0.0}


def test_other_kinds_are_refused_with_the_list():
    with pytest.raises(ConfigError, match=r"correction=tiz .*Allowed: none, tis, tis_seq, mis, icepop"):
        weigh([1.0], "tiz")


def test_configuration_has_these_kinds_with_their_bounds():
    assert set(get_args(AlgorithmConfig.model_fields["correction"].annotation)) == set(KINDS) == set(CORRECTION_BOUNDS)


# --- the gap ---


def gap(old, rollout, lengths, mask=None):
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (old, rollout)]
    return gap_metrics(*tensors, torch.tensor(lengths), torch.tensor([True] * len(old) if mask is None else mask))


def test_gap_worked_out_by_hand():
    # Differences log π_old − log μ: log 2 and 0 in one response, −log 2 in the other. Perplexity ratios 1/√2 and 2.
    # k3 with ratio π_old / μ: 2 − 1 − log 2, 0 and 1/2 − 1 + log 2, in all 1/2.
    two = math.log(2)
    assert gap([-1 + two, -1.0, -1 - two], [-1.0] * 3, [2, 1]) == pytest.approx(
        {
            "rollout/logprob_gap/mean": 2 * two / 3,
            "rollout/logprob_gap/max": two,
            "rollout/ppl_ratio": (1 / math.sqrt(2) + 2) / 2,
            "rollout/kl": 0.5 / 3,
        }
    )


@pytest.mark.parametrize("seed", range(3))
def test_gap_equals_a_plain_loop_on_ragged_batches(seed):
    old, rollout, lengths, mask = random_pair(seed)
    differences, ratios, start = [], [], 0
    for length in lengths:
        own = [old[t] - rollout[t] for t in range(start, start + length) if mask[t]]
        start += length
        differences += own
        ratios += [math.exp(-sum(own) / len(own))] if own else []
    count = len(differences)
    assert gap(old, rollout, lengths, mask) == pytest.approx(
        {
            "rollout/logprob_gap/mean": sum(abs(d) for d in differences) / count,
            "rollout/logprob_gap/max": max(abs(d) for d in differences),
            "rollout/ppl_ratio": sum(ratios) / len(ratios),
            "rollout/kl": sum(math.exp(d) - 1 - d for d in differences) / count,
        },
        abs=1e-10,
    )


def test_gap_outside_the_mask_does_not_count():
    assert gap([-1.0, math.nan], [-1.0, 0.0], [2], [True, False])["rollout/logprob_gap/max"] == 0.0


def test_gap_of_equal_logprobs_is_nothing():
    assert gap([-1.0], [-1.0], [1]) == {
        "rollout/logprob_gap/mean": 0.0,
        "rollout/logprob_gap/max": 0.0,
        "rollout/ppl_ratio": 1.0,
        "rollout/kl": 0.0,
    }


def test_gap_extremes_stay_finite():
    assert all(math.isfinite(value) for value in gap([-1e4, 0.0], [0.0, -1e4], [1, 1]).values())


@pytest.mark.parametrize(("values", "mask"), [([], []), ([-1.0], [False])])
def test_no_written_token_has_no_gap(values, mask):
    assert gap(values, values, [len(values)], mask) == {}
