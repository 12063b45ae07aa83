"""Advantage estimators: how much better than expected each token of each response was.

Pure functions `(StepBatch, AdvantageConfig) -> Advantages`. Statistics are computed in float64 and returned in the
dtype of `token_rewards`. "Total" below is the sum of a response's token rewards: its score, less the KL when that is
taken from the reward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foveal.algorithm.batch import AdvantageConfig, Advantages, StepBatch, rewards_per_token, written_tokens
from foveal.algorithm.registry import register_advantage
from foveal.errors import ConfigError

STD_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


@register_advantage("grpo", needs_group=True)
def grpo(batch: StepBatch, config: AdvantageConfig) -> Advantages:
    """Group relative policy optimization: A_i = (total_i − mean of the group) / (std of the group + 1e-6).

    DeepSeekMath, arXiv 2402.03300, section 4.1.2; the std is the unbiased one, as in EasyR1. A group whose totals are
    all equal gets exactly 0, and so does a group of one, which has nothing to compare with (EasyR1 refuses it, verl
    uses the bare score).
    """
    groups = _Groups(batch.totals, batch.group)
    return _same_for_all_tokens(batch, groups.standardised)


@register_advantage("dr_grpo", needs_group=True)
def dr_grpo(batch: StepBatch, config: AdvantageConfig) -> Advantages:
    """GRPO done right: A_i = total_i − mean of the group, so hard and easy prompts are not weighted by 1 / std.

    Liu et al., arXiv 2503.20783, section 3. Its other half is to divide summed token losses by a constant instead of
    by each response's length: `loss_avg_mode=seq_sum_norm`.
    """
    return _same_for_all_tokens(batch, _Groups(batch.totals, batch.group).centred)


@register_advantage("grpo_passk", needs_group=True)
def grpo_passk(batch: StepBatch, config: AdvantageConfig) -> Advantages:
    """GRPO for pass@k: only the best response of a group is moved, by (best − second best) / (std of the group + 1e-6).

    Leave-one-out advantage of the maximum, arXiv 2503.19595, scaled as in `grpo`. All others get 0, so a group whose
    best total is shared gets none. EasyR1 documents the same, but its code leaves the raw score on the others, which
    would push every response with a positive score; that is not repeated here.
    """
    groups = _Groups(batch.totals, batch.group)
    descending = torch.argsort(batch.totals, descending=True, stable=True)
    ranked = descending[torch.argsort(groups.index[descending], stable=True)]
    first = groups.sizes.cumsum(0) - groups.sizes
    best = ranked[first]
    second = ranked[first + (groups.sizes > 1).long()]
    advantages = torch.zeros_like(batch.totals)
    advantages[best] = (batch.totals[best] - batch.totals[second]) / (groups.std[best] + STD_EPSILON)
    return _same_for_all_tokens(batch, advantages)


@register_advantage("rloo", needs_group=True)
def rloo(batch: StepBatch, config: AdvantageConfig) -> Advantages:
    """REINFORCE leave-one-out: A_i = total_i − mean of the other totals of its group.

    Ahmadian et al., arXiv 2402.14740; equal to n / (n − 1) · (total_i − mean of the group). A group of one gets 0.
    """
    groups = _Groups(batch.totals, batch.group)
    sizes = groups.sizes[groups.index]
    return _same_for_all_tokens(batch, groups.centred * sizes / (sizes - 1).clamp(min=1))


@register_advantage("opo", needs_group=True)
def opo(batch: StepBatch, config: AdvantageConfig) -> Advantages:
    """On-policy RL with the optimal baseline: A_i = total_i − Σ_j l_j · total_j / Σ_j l_j over its group.

    l is the number of tokens that the model wrote, which stands for the squared norm of a response's gradient: the
    baseline with the least variance. Hao et al., arXiv 2505.23585. Empty responses weigh nothing.
    """
    groups = _Groups(batch.totals, batch.group)
    lengths = written_tokens(batch.lengths, batch.mask).double()
    # In terms of what is centred already, so that a group of equal totals keeps its exact zeros.
    offset = groups.sum(lengths * groups.centred) / groups.sum(lengths).clamp(min=1)
    return _same_for_all_tokens(batch, groups.centred - offset)


@register_advantage("maxrl", needs_group=True)
def maxrl(batch: StepBatch, config: AdvantageConfig) -> Advantages:
    """Maximum likelihood RL: A_i = (total_i − mean of the group) / mean of the group, 0 where the mean is not above 0.

    Tajwar, Zeng et al., arXiv 2602.02710: for scores of 0 and 1 and groups of n its expectation is the gradient of
    Σ_{k < n} pass@k / k, the expansion of the log-likelihood of success, so rare successes count most. The paper knows
    only 0 and 1. Scores of 0 or more are taken as they are; where negative ones (or a KL in the reward) bring the mean
    below the group's best / n, that takes its place, so that an advantage cannot explode.
    """
    groups = _Groups(batch.totals, batch.group)
    floor = groups.highest / groups.sizes[groups.index]
    advantages = torch.where(groups.mean > 0, groups.centred / torch.maximum(groups.mean, floor), 0.0)
    return _same_for_all_tokens(batch, advantages)


@register_advantage("gdpo", needs_group=True, needs_parts=True)
def gdpo(batch: StepBatch, config: AdvantageConfig) -> Advantages:
    """Group reward-decoupled normalization: each part of the reward is normalised by itself before they are summed.

    S_i = Σ_k weight_k · (part_ki − mean of part k in the group) / (its std + 1e-6), then
    A = (S − mean) / sqrt(var + 1e-8) over all responses of the step; Liu et al., arXiv 2601.05242, eq. 4–6 (verl takes
    the last statistics over tokens, so that long responses count more). Parts and weights are those of
    `algorithm.reward_parts`. An answer without a part (NaN) gets nothing from it and is left out of its statistics.
    The overall score and a KL in the reward are not used.

    Raises:
        ConfigError: `reward_parts` is empty or names a part that the batch has not.
    """
    assert batch.parts is not None
    absent = [name for name in config.reward_parts if name not in batch.parts]
    if absent or not config.reward_parts:
        raise ConfigError(
            f"algorithm.reward_parts={dict(config.reward_parts)}: adv_estimator=gdpo needs at least one part, each a "
            f"number that the reward function returns; it returned {', '.join(sorted(batch.parts)) or 'none'}"
        )
    sums = torch.zeros_like(batch.totals)
    for name, weight in config.reward_parts.items():
        part = batch.parts[name].double()
        known = ~part.isnan()
        sums[known] += weight * _Groups(part[known], batch.group[known]).standardised
    return _same_for_all_tokens(batch, _whiten(sums, torch.ones_like(sums, dtype=torch.bool)))


@register_advantage("reinforce_plus_plus")
def reinforce_plus_plus(batch: StepBatch, config: AdvantageConfig) -> Advantages:
    """REINFORCE++: discounted return from each token on, whitened over all written tokens of the step.

    G_t = r_t + γ · m_{t+1} · G_{t+1}, A = (G − mean) / sqrt(var + 1e-8); Hu et al., arXiv 2501.03262. As in EasyR1, m
    is the mask, so a token that the model did not write cuts the return: what is earned after a tool result does not
    reach the tokens before it. `returns` holds G.
    """
    rewards = batch.token_rewards.double()
    mask_after = torch.zeros_like(rewards)
    mask_after[:-1] = batch.mask[1:]
    returns = _scan_back(rewards, config.gamma * mask_after, batch.lengths)
    return _on_written(batch, _whiten(returns, batch.mask), returns)


@register_advantage("reinforce_plus_plus_baseline", needs_group=True)
def reinforce_plus_plus_baseline(batch: StepBatch, config: AdvantageConfig) -> Advantages:
    """REINFORCE++ with a group baseline: the score less its group's mean, then as `reinforce_plus_plus`.

    G_t = r_t + γ · G_{t+1} with score − mean of the group's scores in the score's place, A = (G − mean) /
    sqrt(var + 1e-8) over all written tokens of the step; Hu et al., arXiv 2501.03262, "REINFORCE++ w/ baseline". Unlike
    there, returns step over tokens that the model did not write, since every token shares the response's score. The
    paper has the KL in the loss (k2); one in the reward stays with its token. `returns` holds G.
    """
    groups = _Groups(batch.scores.double(), batch.group)
    shift = rewards_per_token(groups.centred - batch.scores.double(), batch.lengths, batch.mask)
    mask = batch.mask.double()
    returns = _scan_back(mask * (batch.token_rewards.double() + shift), mask * config.gamma + (1 - mask), batch.lengths)
    return _on_written(batch, _whiten(returns, batch.mask), returns)


@register_advantage("remax", needs_baseline=True)
def remax(batch: StepBatch, config: AdvantageConfig) -> Advantages:
    """ReMax: A = total − score of the greedy answer to the same prompt.

    Li et al., arXiv 2310.10505, algorithm 1. `returns` holds the undiscounted sum of the rewards from each token on.
    Responses whose greedy answer has no score (NaN) get 0.
    """
    assert batch.baselines is not None
    baselines = batch.baselines.double()
    advantages = torch.where(baselines.isnan(), 0.0, batch.totals - baselines)
    rewards = torch.where(batch.mask, batch.token_rewards, 0.0).double()
    returns = _scan_back(rewards, torch.ones_like(rewards), batch.lengths)
    return _on_written(batch, advantages[batch.sequence], returns)


@register_advantage("gae", needs_values=True)
def gae(batch: StepBatch, config: AdvantageConfig) -> Advantages:
    """Generalized advantage estimation, whitened over all written tokens of the step.

    δ_t = r_t + γ · V_{t+1} − V_t and A_t = δ_t + γλ · A_{t+1}, with V = A = 0 after the end; Schulman et al.,
    arXiv 1506.02438, eq. 16. Tokens that the model did not write are stepped over: t + 1 is the next written token, and
    rewards on other tokens do not count. `returns` holds A + V from before the whitening.
    """
    assert batch.values is not None
    mask = batch.mask.double()
    values = batch.values.double()
    # From each token on, the value of the nearest written one, itself included.
    next_written = _scan_back(mask * values, 1 - mask, batch.lengths)
    value_after = torch.zeros_like(values)
    value_after[:-1] = next_written[1:]
    value_after[_last_tokens(batch.lengths)] = 0.0
    delta = batch.token_rewards.double() + config.gamma * value_after - values
    decay = mask * config.gamma * config.lam + (1 - mask)
    advantages = _scan_back(mask * delta, decay, batch.lengths)
    return _on_written(batch, _whiten(advantages, batch.mask), advantages + values)


class _Groups:
    """Group statistics of one number per response; (R,) float64 except where said.

    Args:
        values: (R,) float64, without NaN. group: (R,) int64, as in `StepBatch`.

    Attributes:
        index: (R,) int64, groups renumbered from 0. sizes: (G,) int64.
        mean, highest: of the response's group.
        centred: value − mean of its group, exactly 0 where the group's values are all equal.
        std: unbiased standard deviation of its group, exactly 0 where they are all equal or alone.
    """

    def __init__(self, values: Tensor, group: Tensor):
        _, self.index, self.sizes = torch.unique(group, return_inverse=True, return_counts=True)
        empty = values.new_zeros(self.sizes.shape[0])
        self.mean = self.sum(values) / self.sizes[self.index]
        self.highest = empty.scatter_reduce(0, self.index, values, "amax", include_self=False)[self.index]
        lowest = empty.scatter_reduce(0, self.index, values, "amin", include_self=False)[self.index]
        # Rounding of the mean would otherwise leave a difference, which a tiny std blows up.
        self.centred = torch.where(self.highest == lowest, 0.0, values - self.mean)
        self.std = (self.sum(self.centred.square()) / (self.sizes - 1).clamp(min=1)[self.index]).sqrt()

    @property
    def standardised(self) -> Tensor:
        return self.centred / (self.std + STD_EPSILON)

    def sum(self, values: Tensor) -> Tensor:
        """Of a number per response, the sum over its group, for each response."""
        return values.new_zeros(self.sizes.shape[0]).index_add(0, self.index, values)[self.index]


def _same_for_all_tokens(batch: StepBatch, per_response: Tensor) -> Advantages:
    per_token = per_response[batch.sequence]
    return _on_written(batch, per_token, per_token)


def _on_written(batch: StepBatch, advantages: Tensor, returns: Tensor) -> Advantages:
    dtype = batch.token_rewards.dtype
    return Advantages(
        torch.where(batch.mask, advantages, 0.0).to(dtype), torch.where(batch.mask, returns, 0.0).to(dtype)
    )


def _whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(values − mean) / sqrt(var + 1e-8) with the unbiased variance, both over the masked-in tokens. float64."""
    kept = values[mask]
    if kept.numel() == 0:
        return torch.zeros_like(values)
    centred = values - kept.mean()
    variance = centred[mask].square().sum() / max(kept.numel() - 1, 1)
    return centred * torch.rsqrt(variance + WHITEN_EPSILON)


def _last_tokens(lengths: Tensor) -> Tensor:
    """Index of the last token of every response that has one."""
    return (lengths.cumsum(0) - 1)[lengths > 0]


def _scan_back(inputs: Tensor, decay: Tensor, lengths: Tensor) -> Tensor:
    """y_t = inputs_t + decay_t · y_{t+1} within each response, y = 0 after its end. All (N,)."""
    outputs = torch.zeros_like(inputs)
    # Longest first, so that the responses which still have a token t places from their end are always a prefix.
    descending, order = lengths.sort(descending=True)
    last = (lengths.cumsum(0) - 1)[order]
    running = inputs.new_zeros(lengths.shape[0])
    active = lengths.shape[0]
    sizes = descending.tolist()
    for distance in range(sizes[0] if sizes else 0):
        while sizes[active - 1] <= distance:
            active -= 1
        at = last[:active] - distance
        running[:active] = inputs[at] + decay[at] * running[:active]
        outputs[at] = running[:active]
    return outputs
