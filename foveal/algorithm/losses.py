"""Policy losses: pure functions `(LossBatch, LossConfig) -> (token losses (N,), stats)`.

`ratio` is π(token) / π_old(token), its logarithm clamped to ±20 so that neither it nor its gradient overflows. Losses
are not yet averaged (`aggregate` does that) and are 0 on tokens that the model did not write. Every loss works with
every advantage estimator.

Stats are sums over the written tokens, detached, so that a caller adds them over micro-batches and processes and
divides by the optimizer step's token count: `ppo_kl` (log π_old − log π), `entropy_loss` (−log π) and, in the losses
that clip as PPO does, `pg_clipfrac_higher` (tokens whose loss the clip raised) and `pg_clipfrac_lower` (tokens whose
loss the dual clip lowered).
"""

from __future__ import annotations

import torch
from torch import Tensor

from foveal.algorithm.batch import LossBatch, LossConfig, mean_per_response, sequence_index
from foveal.algorithm.registry import register_loss

LOG_RATIO_LIMIT = 20.0

Stats = dict[str, Tensor]


@register_loss("default")
def ppo_clip(batch: LossBatch, config: LossConfig) -> tuple[Tensor, Stats]:
    """PPO's clipped loss with separate bounds, and the dual clip for negative advantages.

    max(−A·ratio, −A·clip(ratio, 1 − clip_ratio_low, 1 + clip_ratio_high)), and at most −A·clip_ratio_dual where A < 0.
    PPO: arXiv 1707.06347, eq. 7. Separate bounds ("clip-higher"): DAPO, arXiv 2503.14476, section 3.1. Dual clip:
    arXiv 1912.09729, "Dual-clip PPO".
    """
    log_ratio = _log_ratio(batch)
    losses, stats = _clipped(batch, config, log_ratio)
    return losses, {**_common_stats(batch, log_ratio), **stats}


@register_loss("policy_gradient")
def policy_gradient(batch: LossBatch, config: LossConfig) -> tuple[Tensor, Stats]:
    """REINFORCE: −A · log π, without a ratio, so without a clip.

    Williams 1992; Sutton et al. 1999, theorem 1. It is the policy gradient only while the policy is still the one that
    sampled, hence with one optimizer step per batch (`ppo_epochs=1`, `global_batch_size` = `rollout_batch_size`).
    """
    losses = -_written(batch, batch.advantages) * _written(batch, batch.logprobs)
    return losses, _common_stats(batch, _log_ratio(batch))


@register_loss("gspo")
def gspo(batch: LossBatch, config: LossConfig) -> tuple[Tensor, Stats]:
    """Group sequence policy optimization: PPO's clip on one ratio per response.

    s = exp(mean over the response's tokens of log π − log π_old) takes the ratio's place; arXiv 2507.18071, section
    4.1. The paper averages by sequence (`loss_avg_mode=seq`), with clips of 3e-4 and 4e-4, and has no dual clip; as in
    EasyR1 the dual clip stays on, which acts only where s exceeds `clip_ratio_dual`. EasyR1's own `gspo` multiplies
    (responses,) by (responses, tokens) and raises; its script uses `gspo_token`.
    """
    log_ratio = _log_ratio(batch)
    losses, stats = _clipped(batch, config, _sequence_log_ratio(batch, log_ratio))
    return losses, {**_common_stats(batch, log_ratio), **stats}


@register_loss("gspo_token")
def gspo_token(batch: LossBatch, config: LossConfig) -> tuple[Tensor, Stats]:
    """GSPO with a gradient per token, so that advantages may differ within a response.

    s_t = sg(s) · π / sg(π) takes the ratio's place, sg stopping the gradient: the value of `gspo`, the gradient of each
    token's own log-probability; arXiv 2507.18071, section 4.3. With one advantage per response, averaged by sequence,
    loss and gradient are those of `gspo`. Dual clip as in `gspo`; the formula is EasyR1's.
    """
    log_ratio = _log_ratio(batch)
    sequence = _sequence_log_ratio(batch, log_ratio).detach()
    losses, stats = _clipped(batch, config, sequence + log_ratio - log_ratio.detach())
    return losses, {**_common_stats(batch, log_ratio), **stats}


@register_loss("cispo")
def cispo(batch: LossBatch, config: LossConfig) -> tuple[Tensor, Stats]:
    """REINFORCE with a clipped importance weight: every token keeps a gradient.

    −A · sg(clip(ratio, 1 − clip_ratio_low, 1 + clip_ratio_high)) · log π, sg stopping the gradient; MiniMax-M1, arXiv
    2506.13585, section 3.1, averaged by token. The paper sets no lower bound in effect. As in EasyR1 the lower bound is
    on: with `clip_ratio_low=0` (EasyR1's script) no weight is below 1; 1 or more removes it (EasyR1: NaN above 1).
    """
    log_ratio = _log_ratio(batch)
    weight = _clip(_ratio(log_ratio), config).detach()
    losses = -_written(batch, batch.advantages) * weight * _written(batch, batch.logprobs)
    return losses, _common_stats(batch, log_ratio)


@register_loss("sapo")
def sapo(batch: LossBatch, config: LossConfig) -> tuple[Tensor, Stats]:
    """Soft adaptive policy optimization: a smooth gate in place of the clip.

    −A · (4/τ) · sigmoid(τ · (ratio − 1)), τ = tau_positive where A > 0 and tau_negative where A < 0; arXiv 2511.20347.
    The gate's slope is 1 at ratio 1. The paper averages by sequence (`loss_avg_mode=seq`), EasyR1 by token
    unless told; the formula is the same.
    """
    log_ratio = _log_ratio(batch)
    tau = torch.full_like(log_ratio, config.tau_positive).masked_fill(batch.advantages < 0, config.tau_negative)
    gate = 4.0 / tau * torch.sigmoid(tau * (_ratio(log_ratio) - 1.0))
    return -_written(batch, batch.advantages) * gate, _common_stats(batch, log_ratio)


def _written(batch: LossBatch, values: Tensor) -> Tensor:
    # Inputs are masked rather than results: a NaN on a token outside the mask then reaches no gradient.
    return torch.where(batch.mask, values, 0.0)


def _log_ratio(batch: LossBatch) -> Tensor:
    return _written(batch, batch.logprobs - batch.old_logprobs)


def _sequence_log_ratio(batch: LossBatch, log_ratio: Tensor) -> Tensor:
    means = mean_per_response(log_ratio, batch.lengths, batch.mask)
    return means[sequence_index(batch.lengths, log_ratio.shape[0])]


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _clip(ratio: Tensor, config: LossConfig) -> Tensor:
    return ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)


def _clipped(batch: LossBatch, config: LossConfig, log_ratio: Tensor) -> tuple[Tensor, Stats]:
    advantages = _written(batch, batch.advantages)
    ratio = _ratio(log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * _clip(ratio, config)
    ceiling = -advantages * config.clip_ratio_dual
    pessimistic = torch.maximum(plain, clipped)
    negative = advantages < 0
    losses = torch.where(negative, torch.minimum(pessimistic, ceiling), pessimistic)
    stats = {
        "pg_clipfrac_higher": (plain < clipped).sum().to(losses.dtype),
        "pg_clipfrac_lower": (negative & (pessimistic > ceiling)).sum().to(losses.dtype),
    }
    return losses, stats


def _common_stats(batch: LossBatch, log_ratio: Tensor) -> Stats:
    return {
        "ppo_kl": -log_ratio.detach().sum(),
        "entropy_loss": -_written(batch, batch.logprobs).detach().sum(),
    }
