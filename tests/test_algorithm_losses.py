"""Policy losses against cases worked out by hand, plain loops and finite differences."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch

from foveal.algorithm import LossBatch, aggregate, count, get_loss

NAMES = ["default", "gspo", "gspo_token", "cispo", "sapo", "policy_gradient"]
CLIPPING = ["default", "gspo", "gspo_token"]


@dataclass
class Config:
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.3
    clip_ratio_dual: float = 3.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05


def make(ratios, advantages, lengths=None, mask=None, old=-1.0, dtype=torch.float64):
    """A batch whose tokens have these ratios to an old log-probability of −1."""
    old_logprobs = torch.full((len(ratios),), old, dtype=dtype)
    return LossBatch(
        logprobs=(old_logprobs + torch.tensor(ratios, dtype=dtype).log()).requires_grad_(),
        old_logprobs=old_logprobs,
        advantages=torch.tensor(advantages, dtype=dtype),
        lengths=torch.tensor([len(ratios)] if lengths is None else lengths, dtype=torch.int64),
        mask=torch.tensor([True] * len(ratios) if mask is None else mask, dtype=torch.bool),
    )


def random_batch(seed, spread=0.4):
    """Ragged, with an empty and a one-token response and tokens outside the mask."""
    rng = random.Random(seed)
    lengths = [0, 1, *(rng.randint(0, 6) for _ in range(5))]
    tokens = sum(lengths)
    logprobs = torch.tensor([-rng.random() - 0.1 for _ in range(tokens)], dtype=torch.float64)
    return LossBatch(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=logprobs.detach() + torch.tensor([rng.gauss(0, spread) for _ in range(tokens)]).double(),
        advantages=torch.tensor([rng.gauss(0, 1) for _ in range(tokens)]).double(),
        lengths=torch.tensor(lengths),
        mask=torch.tensor([rng.random() < 0.8 for _ in range(tokens)]),
    )


def gradient(name, batch, config=None):
    losses, _ = get_loss(name)(batch, config or Config())
    return torch.autograd.grad(losses.sum(), batch.logprobs)[0].tolist()


# --- worked out by hand ---


def test_default_clips_per_side():
    # A = +1: ratio 1.5 is cut at 1.3 and 0.5 is not; A = −1: 0.5 is cut at 0.8 and 1.5 is not.
    batch = make([1.5, 0.5, 0.5, 1.5, 1.1], [1.0, 1.0, -1.0, -1.0, 2.0])
    losses, stats = get_loss("default")(batch, Config())
    assert losses.tolist() == pytest.approx([-1.3, -0.5, 0.8, 1.5, -2.2])
    assert (stats["pg_clipfrac_higher"].item(), stats["pg_clipfrac_lower"].item()) == (2.0, 0.0)


def test_default_has_no_gradient_where_it_clips():
    batch = make([1.5, 0.5, 0.5, 1.5, 1.1], [1.0, 1.0, -1.0, -1.0, 2.0])
    assert gradient("default", batch) == pytest.approx([0.0, -0.5, 0.0, 1.5, -2.2])


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    batch = make([5.0, 5.0], [-2.0, 2.0])
    losses, stats = get_loss("default")(batch, Config(clip_ratio_high=9.0))
    assert losses.tolist() == pytest.approx([6.0, -10.0])
    assert stats["pg_clipfrac_lower"].item() == 1.0
    assert gradient("default", batch, Config(clip_ratio_high=9.0)) == pytest.approx([0.0, -10.0])


def test_gspo_uses_the_geometric_mean_of_the_ratios():
    # sqrt(1.1 · 1.1³) = 1.21, inside the clip; its gradient is shared by both tokens: −s/2 from each of two losses.
    batch = make([1.1, 1.331], [1.0, 1.0])
    losses, _ = get_loss("gspo")(batch, Config())
    assert losses.tolist() == pytest.approx([-1.21, -1.21])
    assert gradient("gspo", batch) == pytest.approx([-1.21, -1.21])


def test_gspo_spreads_one_tokens_advantage_and_gspo_token_does_not():
    batch = make([1.1, 1.331], [1.0, 0.0])
    assert gradient("gspo", batch) == pytest.approx([-0.605, -0.605])
    assert gradient("gspo_token", batch) == pytest.approx([-1.21, 0.0])


def test_gspo_mean_leaves_tokens_outside_the_mask_out():
    batch = make([1.1, 7.0, 1.331], [1.0, 1.0, 1.0], mask=[True, False, True])
    losses, _ = get_loss("gspo")(batch, Config())
    assert losses.tolist() == pytest.approx([-1.21, 0.0, -1.21])


def test_gspo_keeps_the_dual_clip():
    batch = make([4.0, 4.0], [-1.0, -1.0])
    losses, _ = get_loss("gspo")(batch, Config())
    assert losses.tolist() == pytest.approx([3.0, 3.0])


def test_cispo_caps_the_weight_but_keeps_the_gradient():
    # log π = −1 + log 2 at the first token, −1 + log 0.5 at the second; weights 1.3 and 0.8.
    batch = make([2.0, 0.5], [1.0, -1.0])
    losses, _ = get_loss("cispo")(batch, Config())
    assert losses.tolist() == pytest.approx([-1.3 * (math.log(2) - 1), 0.8 * (-math.log(2) - 1)])
    assert gradient("cispo", batch) == pytest.approx([-1.3, 0.8])


def test_cispo_with_low_zero_has_weights_from_one_to_five():
    batch = make([0.01, 3.0, 100.0], [1.0, 1.0, 1.0])
    assert gradient("cispo", batch, Config(clip_ratio_low=0.0, clip_ratio_high=4.0)) == pytest.approx([-1, -3, -5])


def test_cispo_with_low_one_has_no_lower_bound():
    batch = make([0.01], [1.0])
    assert gradient("cispo", batch, Config(clip_ratio_low=1.0)) == pytest.approx([-0.01])


def test_sapo_gate_is_two_over_tau_with_slope_one_on_policy():
    batch = make([1.0, 1.0], [1.0, -1.0])
    losses, _ = get_loss("sapo")(batch, Config(tau_positive=1.0, tau_negative=2.0))
    assert losses.tolist() == pytest.approx([-2.0, 1.0])
    assert gradient("sapo", batch, Config(tau_positive=1.0, tau_negative=2.0)) == pytest.approx([-1.0, 1.0])


def test_sapo_gate_off_policy():
    batch = make([2.0, 2.0], [1.0, -1.0])
    losses, _ = get_loss("sapo")(batch, Config())
    positive, negative = 4 / (1 + math.exp(-1.0)), 4 / 1.05 / (1 + math.exp(-1.05))
    assert losses.tolist() == pytest.approx([-positive, negative])


def test_policy_gradient_is_minus_advantage_times_logprob():
    batch = make([2.0, 0.5], [1.0, -3.0])
    losses, _ = get_loss("policy_gradient")(batch, Config())
    assert losses.tolist() == pytest.approx([1 - math.log(2), 3 * (-1 - math.log(2))])
    assert gradient("policy_gradient", batch) == pytest.approx([-1.0, 3.0])


# --- against loops ---


def loop(name, batch, config):
    """The loss of every token, one at a time."""
    result, start = [], 0
    for length in batch.lengths.tolist():
        tokens = range(start, start + length)
        start += length
        new, old = batch.logprobs.tolist(), batch.old_logprobs.tolist()
        written = [t for t in tokens if batch.mask[t]]
        mean = sum(new[t] - old[t] for t in written) / max(len(written), 1)
        for t in tokens:
            if t not in written:
                result.append(0.0)
                continue
            a = batch.advantages[t].item()
            ratio = math.exp(mean if name in ("gspo", "gspo_token") else new[t] - old[t])
            bounded = min(max(ratio, 1 - config.clip_ratio_low), 1 + config.clip_ratio_high)
            if name == "cispo":
                result.append(-a * bounded * new[t])
            elif name == "policy_gradient":
                result.append(-a * new[t])
            elif name == "sapo":
                tau = config.tau_negative if a < 0 else config.tau_positive
                result.append(-a * 4 / tau / (1 + math.exp(-tau * (ratio - 1))))
            else:
                worst = max(-a * ratio, -a * bounded)
                result.append(min(worst, -a * config.clip_ratio_dual) if a < 0 else worst)
    return result


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NAMES)
def test_equals_a_plain_loop_on_ragged_batches(name, seed):
    batch, config = random_batch(seed, spread=1.0), Config(clip_ratio_dual=2.0)
    losses, _ = get_loss(name)(batch, config)
    assert losses.tolist() == pytest.approx(loop(name, batch, config), abs=1e-10)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["default", "gspo", "sapo", "policy_gradient"])
def test_gradient_equals_finite_differences(name, seed):
    batch = random_batch(seed)

    def losses(logprobs):
        changed = LossBatch(logprobs, batch.old_logprobs, batch.advantages, batch.lengths, batch.mask)
        return get_loss(name)(changed, Config())[0]

    assert torch.autograd.gradcheck(losses, (batch.logprobs,))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["gspo_token", "cispo"])
def test_gradient_with_stopped_weights_equals_finite_differences(name, seed):
    """What these losses stop the gradient at is held fixed while each token's log-probability moves."""
    batch, config, step = random_batch(seed), Config(), 1e-6
    logprobs, mask = batch.logprobs.detach(), batch.mask
    sequence = torch.repeat_interleave(torch.arange(len(batch.lengths)), batch.lengths)
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high

    def surrogate(token, moved):
        if not mask[token]:
            return 0.0
        own = mask & (sequence == sequence[token]) if name == "gspo_token" else torch.arange(len(mask)) == token
        fixed = math.exp((logprobs - batch.old_logprobs)[own].mean())
        a = batch.advantages[token].item()
        if name == "cispo":
            return -a * min(max(fixed, low), high) * moved
        ratio = fixed * math.exp(moved - logprobs[token])
        worst = max(-a * ratio, -a * min(max(ratio, low), high))
        return min(worst, -a * config.clip_ratio_dual) if a < 0 else worst

    expected = [
        (surrogate(token, value + step) - surrogate(token, value - step)) / (2 * step)
        for token, value in enumerate(logprobs.tolist())
    ]
    assert gradient(name, batch, config) == pytest.approx(expected, abs=1e-6)


def test_gspo_token_has_the_value_of_gspo():
    batch = random_batch(7)
    values = [get_loss(name)(batch, Config())[0].tolist() for name in ("gspo", "gspo_token")]
    assert values[0] == pytest.approx(values[1], abs=1e-12)


@pytest.mark.parametrize("mode", ["token", "seq"])
def test_gspo_token_has_the_gradient_of_gspo_with_one_advantage_per_response(mode):
    batch = random_batch(7)
    sequence = torch.repeat_interleave(torch.arange(len(batch.lengths)), batch.lengths)
    batch.advantages = torch.linspace(-1, 1, len(batch.lengths), dtype=torch.float64)[sequence]
    totals = count(batch.lengths, batch.mask)
    gradients = []
    for name in ("gspo", "gspo_token"):
        loss = aggregate(get_loss(name)(batch, Config())[0], batch.lengths, batch.mask, mode, *totals)
        gradients.append(torch.autograd.grad(loss, batch.logprobs)[0].tolist())
    assert gradients[0] == pytest.approx(gradients[1], abs=1e-12)


# --- stats ---


@pytest.mark.parametrize("name", NAMES)
def test_stats_are_sums_over_written_tokens(name):
    batch = make([2.0, 0.5, 9.0], [1.0, 1.0, 1.0], mask=[True, True, False])
    _, stats = get_loss(name)(batch, Config())
    assert stats["ppo_kl"].item() == pytest.approx(0.0, abs=1e-12)
    assert stats["entropy_loss"].item() == pytest.approx(2.0)
    assert not any(value.requires_grad for value in stats.values())


@pytest.mark.parametrize("name", NAMES)
def test_stats_of_parts_add_up_to_those_of_the_whole(name):
    batch = random_batch(3, spread=1.0)
    _, whole = get_loss(name)(batch, Config())
    parts = [get_loss(name)(part, Config())[1] for part in split(batch, 3)]
    for key, value in whole.items():
        assert sum(part[key].item() for part in parts) == pytest.approx(value.item())


# --- the split into micro-batches ---


def split(batch, responses):
    """The batch in parts of so many responses."""
    lengths = batch.lengths.split(responses)
    sizes = [int(part.sum()) for part in lengths]
    columns = [t.split(sizes) for t in (batch.logprobs, batch.old_logprobs, batch.advantages)]
    return [LossBatch(*parts) for parts in zip(*columns, lengths, batch.mask.split(sizes), strict=True)]


@pytest.mark.parametrize("responses", [1, 2, 3])
@pytest.mark.parametrize("mode", ["token", "seq", "seq_sum_norm"])
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient_do_not_depend_on_the_split(name, mode, responses):
    batch = random_batch(11)
    totals = count(batch.lengths, batch.mask)

    def share(part):
        return aggregate(get_loss(name)(part, Config())[0], part.lengths, part.mask, mode, *totals, 7.0)

    whole = share(batch)
    summed = sum(share(part) for part in split(batch, responses))
    assert summed.item() == pytest.approx(whole.item(), abs=1e-12)
    expected = torch.autograd.grad(whole, batch.logprobs)[0]
    torch.testing.assert_close(torch.autograd.grad(summed, batch.logprobs)[0], expected, rtol=1e-10, atol=1e-12)


# --- edges ---


@pytest.mark.parametrize("advantage", [-3.0, 0.0, 3.0])
@pytest.mark.parametrize("name", NAMES)
def test_ratio_extremes_stay_finite(name, advantage):
    logprobs = torch.tensor([0.0, -1e4, -30.0, 0.0], requires_grad=True)
    old = torch.tensor([-1e4, 0.0, 0.0, -30.0])
    mask = torch.ones(4, dtype=torch.bool)
    batch = LossBatch(logprobs, old, torch.full((4,), advantage), torch.tensor([1, 1, 1, 1]), mask)
    losses, stats = get_loss(name)(batch, Config())
    losses.sum().backward()
    assert losses.isfinite().all() and logprobs.grad.isfinite().all()
    assert all(value.isfinite() for value in stats.values())


@pytest.mark.parametrize("name", NAMES)
def test_nan_outside_the_mask_reaches_neither_loss_nor_gradient(name):
    nan = math.nan
    logprobs = torch.tensor([-1.0, nan, -2.0], requires_grad=True)
    advantages = torch.tensor([1.0, nan, -1.0])
    mask = torch.tensor([True, False, True])
    batch = LossBatch(logprobs, torch.tensor([-1.0, nan, -2.0]), advantages, torch.tensor([3]), mask)
    losses, stats = get_loss(name)(batch, Config())
    losses.sum().backward()
    assert losses.isfinite().all() and logprobs.grad.tolist()[1] == 0.0 and logprobs.grad.isfinite().all()
    assert all(value.isfinite() for value in stats.values())


@pytest.mark.parametrize("name", NAMES)
def test_zero_advantages_give_no_gradient(name):
    assert gradient(name, make([0.5, 1.0, 2.0], [0.0, 0.0, 0.0])) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_gradient_is_that_of_the_plain_policy_gradient(name):
    # At ratio 1 with one advantage per response all of them push −A on every token.
    assert gradient(name, make([1.0] * 3, [2.0] * 3)) == pytest.approx([-2.0] * 3)


@pytest.mark.parametrize("name", NAMES)
def test_batch_without_tokens_gives_no_losses(name):
    losses, stats = get_loss(name)(make([], [], lengths=[0, 0]), Config())
    assert losses.shape == (0,) and all(value.item() == 0.0 for value in stats.values())


@pytest.mark.parametrize("name", CLIPPING)
def test_float32_keeps_a_clip_as_narrow_as_that_of_gspo(name):
    config = Config(clip_ratio_low=3e-4, clip_ratio_high=4e-4)
    batch = make([1.0005, 1.0003], [1.0, 1.0], lengths=[1, 1], dtype=torch.float32)
    losses, stats = get_loss(name)(batch, config)
    assert losses.dtype == torch.float32
    assert losses.tolist() == pytest.approx([-1.0004, -1.0003], abs=1e-6)
    assert stats["pg_clipfrac_higher"].item() == 1.0
