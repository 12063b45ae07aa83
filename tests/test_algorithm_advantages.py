"""Advantage estimators against cases worked out by hand and against plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from foveal.algorithm import get_advantage
from tests.advantage_support import Config, advantages, random_step, step

NAMES = ["grpo", "grpo_passk", "rloo", "reinforce_plus_plus", "remax", "gae"]


# --- worked out by hand ---


def test_grpo_divides_by_the_unbiased_std():
    # Scores 1, 0, 0, 1: mean 1/2, unbiased variance 4 · (1/4) / 3 = 1/3. Lengths 1, 2, 1, 1.
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    batch = step([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0], [1, 2, 1, 1])
    assert advantages("grpo", batch) == pytest.approx([expected, -expected, -expected, -expected, expected], rel=1e-12)


def test_grpo_takes_the_kl_in_the_token_rewards_into_account():
    # Totals 1 − 0.5 = 0.5 and 0.1 − 0.1 = 0: mean 0.25, unbiased std sqrt(2 · 0.0625) = 0.25 · sqrt(2).
    batch = step([1.0, 0.1], [0, 0], [2, 1], rewards=[-0.5, 1.0, 0.0])
    expected = 0.25 / (0.25 * math.sqrt(2) + 1e-6)
    assert advantages("grpo", batch) == pytest.approx([expected, expected, -expected], rel=1e-12)


def test_grpo_keeps_groups_apart():
    batch = step([1.0, 5.0, 0.0, 7.0], [3, 8, 3, 8], [1, 1, 1, 1])
    low, high = 0.5 / (math.sqrt(0.5) + 1e-6), 1.0 / (math.sqrt(2.0) + 1e-6)
    assert advantages("grpo", batch) == pytest.approx([low, -high, -low, high], rel=1e-12)


def test_passk_moves_only_the_best():
    # Best 0.9, second 0.5; mean 0.5, unbiased variance (0.16 + 0 + 0.16) / 2 = 0.16, so the std is 0.4.
    batch = step([0.1, 0.9, 0.5], [0, 0, 0], [1, 2, 1])
    expected = 0.4 / (0.4 + 1e-6)
    assert advantages("grpo_passk", batch) == pytest.approx([0.0, expected, expected, 0.0], rel=1e-12)


def test_passk_moves_none_when_the_best_score_is_shared():
    batch = step([1.0, 1.0, 0.0, 0.0], [0, 0, 0, 0], [1, 1, 1, 1])
    assert advantages("grpo_passk", batch) == [0.0] * 4


def test_rloo_subtracts_the_mean_of_the_others():
    batch = step([1.0, 0.0, 0.5], [0, 0, 0], [1, 1, 2])
    assert advantages("rloo", batch) == pytest.approx([0.75, -0.75, 0.0, 0.0], abs=1e-15)


def test_reinforce_plus_plus_discounts_and_whitens():
    # γ = 1/2: returns 1/4, 1/2, 1 and 0; mean 7/16, sum of squared differences 35/64, unbiased variance 35/192.
    batch = step([1.0, 0.0], [0, 1], [3, 1])
    result = get_advantage("reinforce_plus_plus")(batch, Config(gamma=0.5))
    scale = math.sqrt(35 / 192 + 1e-8)
    assert result.returns.tolist() == [0.25, 0.5, 1.0, 0.0]
    assert result.advantages.tolist() == pytest.approx([x / scale for x in (-3 / 16, 1 / 16, 9 / 16, -7 / 16)])


def test_reinforce_plus_plus_cuts_the_return_at_a_token_that_the_model_did_not_write():
    batch = step([1.0], [0], [4], rewards=[0.0, 0.25, 0.0, 1.0], mask=[True, True, False, True])
    assert get_advantage("reinforce_plus_plus")(batch, Config()).returns.tolist() == [0.25, 0.25, 0.0, 1.0]


def test_remax_subtracts_the_greedy_answers_score():
    batch = step([1.0, 0.0], [0, 1], [2, 1], baselines=[0.25, 0.5])
    result = get_advantage("remax")(batch, Config())
    assert result.advantages.tolist() == [0.75, 0.75, -0.5]
    assert result.returns.tolist() == [1.0, 1.0, 0.0]


def test_remax_leaves_a_prompt_without_a_baseline_alone():
    batch = step([1.0, 1.0], [0, 1], [1, 1], baselines=[math.nan, 0.5])
    assert advantages("remax", batch) == [0.0, 0.5]


def test_gae_sums_discounted_temporal_differences():
    # γ = 1/2, λ = 1/2, values 1, 2, rewards 0, 4: δ = (0 + 1 − 1, 4 − 2) = (0, 2); A = (0 + 2/4, 2), returns A + V.
    batch = step([4.0], [0], [2], values=[1.0, 2.0])
    result = get_advantage("gae")(batch, Config(gamma=0.5, lam=0.5))
    assert result.returns.tolist() == [1.5, 4.0]
    # Mean 1.25, differences ∓0.75, unbiased variance 2 · 0.5625 = 1.125.
    scale = math.sqrt(1.125 + 1e-8)
    assert result.advantages.tolist() == pytest.approx([-0.75 / scale, 0.75 / scale])


def test_gae_steps_over_tokens_that_the_model_did_not_write():
    mask = [True, False, False, True]
    gapped = step([1.0], [0], [4], mask=mask, values=[0.5, 9.0, 9.0, 0.25])
    short = step([1.0], [0], [2], values=[0.5, 0.25])
    config = Config(gamma=0.9, lam=0.8)
    result, expected = get_advantage("gae")(gapped, config), get_advantage("gae")(short, config)
    assert result.returns[torch.tensor(mask)].tolist() == pytest.approx(expected.returns.tolist())
    assert result.advantages[torch.tensor(mask)].tolist() == pytest.approx(expected.advantages.tolist())


# --- against loops ---


def loop_group(name, totals, group):
    result = []
    for i, total in enumerate(totals):
        others = [t for j, t in enumerate(totals) if group[j] == group[i] and j != i]
        members = [*others, total]
        if not others:
            result.append(0.0)
            continue
        mean = sum(members) / len(members)
        std = math.sqrt(sum((t - mean) ** 2 for t in members) / (len(members) - 1))
        if name == "grpo":
            result.append((total - mean) / (std + 1e-6))
        elif name == "rloo":
            result.append(total - sum(others) / len(others))
        else:
            result.append(max(total - max(others), 0.0) / (std + 1e-6))
    return result


def loop_whiten(values, mask):
    kept = [v for v, m in zip(values, mask, strict=True) if m]
    mean = sum(kept) / len(kept)
    variance = sum((v - mean) ** 2 for v in kept) / (len(kept) - 1)
    return [(v - mean) / math.sqrt(variance + 1e-8) if m else 0.0 for v, m in zip(values, mask, strict=True)]


def loop_token(name, rewards, mask, values, gamma, lam):
    """Advantages before whitening (of one response), from the definitions as sums."""
    result = []
    for t in range(len(rewards)):
        total = 0.0
        if name == "reinforce_plus_plus":
            for k in range(t, len(rewards)):
                if k > t and not mask[k]:
                    break
                total += gamma ** (k - t) * rewards[k]
        else:
            written = [k for k in range(t, len(rewards)) if mask[k]]
            for place, k in enumerate(written):
                after = values[written[place + 1]] if place + 1 < len(written) else 0.0
                total += (gamma * lam) ** place * (rewards[k] + gamma * after - values[k])
        result.append(total)
    return result


def loop(name, batch, gamma, lam):
    lengths, mask = batch.lengths.tolist(), batch.mask.tolist()
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    spans = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    rewards = batch.token_rewards.tolist()
    if name in ("reinforce_plus_plus", "gae"):
        values = batch.values.tolist()
        pieces = [loop_token(name, rewards[s], mask[s], values[s], gamma, lam) for s in spans]
        return loop_whiten([a for piece in pieces for a in piece], mask)
    scores = batch.scores.tolist()
    totals = [sum(rewards[s]) if n else score for s, n, score in zip(spans, lengths, scores, strict=True)]
    if name == "remax":
        per_response = [total - base for total, base in zip(totals, batch.baselines.tolist(), strict=True)]
    else:
        per_response = loop_group(name, totals, batch.group.tolist())
    repeated = [a for a, length in zip(per_response, lengths, strict=True) for _ in range(length)]
    return [a if m else 0.0 for a, m in zip(repeated, mask, strict=True)]


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NAMES)
def test_equals_a_plain_loop_on_ragged_batches(name, seed, gaps):
    batch = random_step(seed, gaps=gaps)
    result = advantages(name, batch, gamma=0.9, lam=0.7)
    assert result == pytest.approx(loop(name, batch, 0.9, 0.7), abs=1e-10)
