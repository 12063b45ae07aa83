"""Dr. GRPO, OPO, MaxRL, GDPO and REINFORCE++ with a baseline, by hand and against plain loops."""

from __future__ import annotations

import math

import pytest

from foveal.algorithm import get_advantage
from foveal.errors import ConfigError
from tests.advantage_support import Config, advantages, random_step, step

# --- worked out by hand ---


def test_dr_grpo_only_subtracts_the_mean():
    batch = step([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0], [1, 2, 1, 1])
    assert advantages("dr_grpo", batch) == [0.75, -0.25, -0.25, -0.25, -0.25]


def test_opo_weighs_the_baseline_by_length():
    # Baseline (3 · 1 + 1 · 0) / 4 = 3/4 instead of 1/2.
    batch = step([1.0, 0.0], [0, 0], [3, 1])
    assert advantages("opo", batch) == pytest.approx([0.25, 0.25, 0.25, -0.75], abs=1e-15)


def test_opo_counts_only_what_the_model_wrote():
    batch = step([1.0, 0.0], [0, 0], [3, 1], mask=[True, False, False, True])
    assert advantages("opo", batch) == pytest.approx([0.5, 0.0, 0.0, -0.5], abs=1e-15)


def test_opo_gives_an_empty_response_no_weight():
    batch = step([1.0, 0.0, 9.0], [0, 0, 0], [1, 1, 0])
    assert advantages("opo", batch) == pytest.approx([0.5, -0.5], abs=1e-15)


def test_maxrl_divides_by_the_mean():
    # One success in four: (1 − 1/4) / (1/4) = 3 and −1; three in four: 1/3 and −1.
    batch = step([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0], [0] * 4 + [1] * 4, [1] * 8)
    third = 1 / 3
    assert advantages("maxrl", batch) == pytest.approx([3.0, -1.0, -1.0, -1.0, third, third, third, -1.0])


def test_maxrl_estimates_the_gradient_of_the_truncated_likelihood():
    # Success probability p = σ(θ), so the score function is 1 − p for a success and −p for a failure, and
    # d/dθ Σ_{k < n} pass@k / k with pass@k = 1 − (1 − p)^k is Σ_{k < n} (1 − p)^{k−1} · p (1 − p).
    n, p = 4, 0.3
    expected = sum((1 - p) ** (k - 1) for k in range(1, n)) * p * (1 - p)
    mean = 0.0
    for outcome in range(2**n):
        scores = [float(outcome >> i & 1) for i in range(n)]
        weights = advantages("maxrl", step(scores, [0] * n, [1] * n))
        gradient = sum(a * (1 - p if s else -p) for a, s in zip(weights, scores, strict=True)) / n
        mean += p ** sum(scores) * (1 - p) ** (n - sum(scores)) * gradient
    assert mean == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("scores", [[0.0, 0.0], [-1.0, 0.5], [-1.0, 1.0]])
def test_maxrl_gives_zero_when_the_mean_is_not_above_zero(scores):
    assert advantages("maxrl", step(scores, [0, 0], [1, 1])) == [0.0, 0.0]


def test_maxrl_is_bounded_where_negative_scores_bring_the_mean_near_zero():
    # The mean is 1e-9, the floor (1 + 2e-9) / 2.
    batch = step([1.0 + 2e-9, -1.0], [0, 0], [1, 1])
    assert advantages("maxrl", batch) == pytest.approx([2.0, -2.0], abs=1e-6)


def test_gdpo_tells_apart_what_the_sum_does_not():
    # Two groups whose sums are 0, 1 and 0, 2: grpo gives both ±1/√2. Within groups of two every varying part is ±1/√2,
    # so S = ±1/√2 and ±2/√2, variance (1/2 + 1/2 + 2 + 2) / 3 = 5/3.
    parts = {"a": [0.0, 1.0, 0.0, 1.0], "b": [0.0, 0.0, 0.0, 1.0]}
    batch = step([0.0, 1.0, 0.0, 2.0], [0, 0, 1, 1], [1] * 4, parts=parts)
    one = math.sqrt(0.5) / math.sqrt(5 / 3)
    result = advantages("gdpo", batch, reward_parts={"a": 1.0, "b": 1.0})
    assert result == pytest.approx([-one, one, -2 * one, 2 * one], rel=1e-5)


def test_gdpo_does_not_care_for_the_scale_of_a_part():
    small = step([0.0] * 3, [0] * 3, [1, 2, 1], parts={"a": [0.0, 1.0, 1.0], "b": [3.0, 1.0, 2.0]})
    large = step([0.0] * 3, [0] * 3, [1, 2, 1], parts={"a": [0.0, 1.0, 1.0], "b": [3e3, 1e3, 2e3]})
    weights = {"a": 1.0, "b": 0.5}
    expected = advantages("gdpo", small, reward_parts=weights)
    assert advantages("gdpo", large, reward_parts=weights) == pytest.approx(expected, abs=1e-5)


def test_gdpo_leaves_an_answer_without_a_part_out_of_its_statistics():
    nan = math.nan
    parts = {"a": [0.0, 1.0, nan, nan]}
    result = advantages("gdpo", step([0.0] * 4, [0] * 4, [1] * 4, parts=parts), reward_parts={"a": 1.0})
    # S = ∓1/√2, 0, 0; variance (1/2 + 1/2) / 3.
    assert result == pytest.approx([-math.sqrt(1.5), math.sqrt(1.5), 0.0, 0.0], rel=1e-5)


def test_gdpo_counts_responses_and_not_tokens_in_the_last_step():
    parts = {"a": [0.0, 1.0]}
    result = advantages("gdpo", step([0.0, 1.0], [0, 0], [9, 1], parts=parts), reward_parts={"a": 1.0})
    assert result == pytest.approx([-math.sqrt(0.5)] * 9 + [math.sqrt(0.5)], rel=1e-5)


def test_gdpo_of_parts_that_cancel_is_zero():
    parts = {"a": [0.1, 0.7, 0.3], "b": [0.9, 0.3, 0.7]}
    result = advantages("gdpo", step([1.0] * 3, [0] * 3, [1] * 3, parts=parts), reward_parts={"a": 1.0, "b": 1.0})
    assert result == pytest.approx([0.0] * 3, abs=1e-9)


@pytest.mark.parametrize("weights", [{}, {"accuracy": 1.0, "speed": 1.0}])
def test_gdpo_names_the_parts_that_there_are(weights):
    with pytest.raises(ConfigError, match=r"algorithm\.reward_parts=.*it returned accuracy, format"):
        advantages("gdpo", step([1.0, 0.0], [0, 0], [1, 1]), reward_parts=weights)


def test_reinforce_plus_plus_baseline_whitens_over_tokens_of_all_groups():
    # Scores less their group's means: 1/2 (twice), −1/2, 0; mean 1/8, squared differences 2 · 9/64 + 25/64 + 1/64.
    batch = step([1.0, 0.0, 7.0], [0, 0, 1], [2, 1, 1])
    result = get_advantage("reinforce_plus_plus_baseline")(batch, Config())
    scale = math.sqrt(44 / 64 / 3 + 1e-8)
    assert result.returns.tolist() == [0.5, 0.5, -0.5, 0.0]
    assert result.advantages.tolist() == pytest.approx([x / scale for x in (3 / 8, 3 / 8, -5 / 8, -1 / 8)])


def test_reinforce_plus_plus_baseline_reaches_back_over_tokens_that_the_model_did_not_write():
    mask = [True, False, True, True]
    batch = step([1.0, 0.0], [0, 0], [3, 1], mask=mask)
    result = get_advantage("reinforce_plus_plus_baseline")(batch, Config(gamma=0.5))
    assert result.returns.tolist() == [0.25, 0.0, 0.5, -0.5]


def test_reinforce_plus_plus_baseline_leaves_no_rounding_on_a_group_of_equal_scores():
    batch = step([0.1, 0.1, 0.1], [0, 0, 0], [1, 1, 1])
    assert get_advantage("reinforce_plus_plus_baseline")(batch, Config()).returns.tolist() == [0.0] * 3


# --- against loops ---


def loop(name, batch, config):
    lengths, mask, group = batch.lengths.tolist(), batch.mask.tolist(), batch.group.tolist()
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    spans = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    rewards, scores = batch.token_rewards.tolist(), batch.scores.tolist()
    if name == "reinforce_plus_plus_baseline":
        return loop_reinforce(scores, rewards, mask, group, spans, config.gamma)
    totals = [sum(rewards[t] for t in s) if len(s) else score for s, score in zip(spans, scores, strict=True)]
    written = [sum(mask[t] for t in span) for span in spans]
    values = []
    for i, total in enumerate(totals):
        members = [j for j in range(len(totals)) if group[j] == group[i]]
        mean = sum(totals[j] for j in members) / len(members)
        if name == "dr_grpo":
            values.append(total - mean)
        elif name == "opo":
            weight = sum(written[j] for j in members)
            values.append(total - (sum(written[j] * totals[j] for j in members) / weight if weight else mean))
        elif name == "maxrl":
            floor = max(totals[j] for j in members) / len(members)
            values.append((total - mean) / max(mean, floor) if mean > 0 else 0.0)
        else:
            values.append(loop_parts(i, batch, members, config.reward_parts))
    if name == "gdpo":
        values = loop_whiten(values)
    return [values[i] if mask[t] else 0.0 for i, span in enumerate(spans) for t in span]


def loop_parts(i, batch, members, weights):
    total = 0.0
    for part, weight in weights.items():
        numbers = batch.parts[part].tolist()
        known = [numbers[j] for j in members if not math.isnan(numbers[j])]
        if math.isnan(numbers[i]) or len(known) < 2:
            continue
        mean = sum(known) / len(known)
        std = math.sqrt(sum((x - mean) ** 2 for x in known) / (len(known) - 1))
        total += weight * (numbers[i] - mean) / (std + 1e-6)
    return total


def loop_reinforce(scores, rewards, mask, group, spans, gamma):
    """The baseline is taken from the last written token, where `rewards_per_token` puts the score."""
    returns = []
    for i, span in enumerate(spans):
        members = [s for s, g in zip(scores, group, strict=True) if g == group[i]]
        written = [t for t in span if mask[t]]
        for t in span:
            later = [u for u in written if u >= t]
            value = sum(gamma**place * rewards[u] for place, u in enumerate(later))
            if later:
                value -= gamma ** (len(later) - 1) * sum(members) / len(members)
            returns.append(value)
    kept = iter(loop_whiten([r for r, m in zip(returns, mask, strict=True) if m]))
    return [next(kept) if m else 0.0 for m in mask]


def loop_whiten(values):
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["dr_grpo", "opo", "maxrl", "gdpo", "reinforce_plus_plus_baseline"])
def test_equals_a_plain_loop_on_ragged_batches(name, seed, gaps):
    batch, config = random_step(seed, gaps=gaps), Config(gamma=0.9)
    if seed % 2:
        batch.token_rewards.abs_()  # a group with a negative mean teaches nothing of maxrl
    result = get_advantage(name)(batch, config).advantages.tolist()
    assert result == pytest.approx(loop(name, batch, config), abs=1e-10)
