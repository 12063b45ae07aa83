"""Sampler ≠ trainer: how far the engine's log-probabilities are from the trainer's, and weights that correct for it.

The engine samples from μ, which differs from the trainer's π_old at the same weights by rounding and kernels. "Ratio"
is π_old / μ, of a token or, multiplied up, of a whole response; its logarithm is clamped to ±20.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foveal.algorithm.batch import mean_per_response, sequence_index
from foveal.algorithm.kl import kl_penalty
from foveal.errors import ConfigError

KINDS = ("none", "tis", "tis_seq", "mis", "icepop")
LOG_RATIO_LIMIT = 20.0


@torch.no_grad()
def importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, lengths: Tensor, mask: Tensor, kind: str, low: float, high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """What each token's loss is multiplied by, so that tokens drawn by the engine count as the trainer's own.

    `none`: 1. `tis`: truncated importance sampling, min(ratio of the token, high); Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training", https://fengyao.notion.site/off-policy-rl (high 2).
    `tis_seq`: the same with the response's ratio; Liu, Li et al. 2025, "When speed kills stability",
    https://richardli.xyz/rl-collapse. `mis`: masked, the response's ratio where it lies in [low, high], else 0; the
    same source, which has no lower bound (low 0). `icepop`: the token's ratio where it lies in [low, high], else 0;
    Ling team 2025, arXiv 2510.18855 (low 0.5, high 5).

    A masked token still counts in the averages of `aggregate`. A response's ratio drifts from 1 with its length, which
    truncates or masks long ones more.

    Args:
        old_logprobs, rollout_logprobs: (N,) float, of trainer and engine, both at the sampling temperature and of the
            whole distribution (a `top_p` below 1 or a `top_k` makes them incomparable).
        lengths: (R,) int64. mask: (N,) bool; what stands outside the mask is ignored.
        kind, low, high: as in `algorithm.correction` and its bounds; low is read by `mis` and `icepop` only.

    Returns:
        (N,) weights without gradient in the dtype of `old_logprobs` (at least float32), 0 outside the mask; and sums
        over the written tokens, as the stats of losses are: `is_weight`, and `is_cut` (tokens whose weight is not
        their ratio).

    Raises:
        ConfigError: the kind is not one of those.
    """
    if kind not in KINDS:
        raise ConfigError(f"algorithm.correction={kind} is not known. Allowed: {', '.join(KINDS)}")
    dtype = torch.promote_types(old_logprobs.dtype, torch.float32)
    if kind == "none":
        weights = mask.to(dtype)
        return weights, {"is_weight": weights.sum(), "is_cut": weights.new_zeros(())}
    log_ratio = _difference(old_logprobs, rollout_logprobs, mask)
    if kind in ("tis_seq", "mis"):
        sequence = sequence_index(lengths, log_ratio.shape[0])
        log_ratio = log_ratio.new_zeros(lengths.shape[0]).index_add(0, sequence, log_ratio)[sequence]
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if kind in ("tis", "tis_seq"):
        weights = ratio.clamp(max=high)
    else:
        weights = torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    cut = (weights != ratio) & mask
    weights = torch.where(mask, weights, 0.0).to(dtype)
    return weights, {"is_weight": weights.sum(), "is_cut": cut.sum().to(dtype)}


@torch.no_grad()
def gap_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor, lengths: Tensor, mask: Tensor) -> dict[str, float]:
    """How far engine and trainer are apart, over the tokens that the model wrote.

    Args:
        old_logprobs, rollout_logprobs, lengths, mask: as in `importance_weights`.

    Returns:
        `rollout/logprob_gap/mean` and `/max` of |log π_old − log μ|; `rollout/ppl_ratio`, the mean over responses of
        the trainer's perplexity divided by the engine's; `rollout/kl`, KL(μ ‖ π_old) by k3, per token. Nothing when
        the model wrote nothing.
    """
    if not bool(mask.any()):
        return {}
    difference = _difference(old_logprobs, rollout_logprobs, mask)
    gap = difference[mask].abs()
    written = mean_per_response(mask.double(), lengths, mask) > 0
    log_ppl_ratio = -mean_per_response(difference, lengths, mask)[written]
    # In terms of the difference alone, which is 0 and not NaN outside the mask.
    kl = kl_penalty(-difference, torch.zeros_like(difference), "low_var_kl")
    return {
        "rollout/logprob_gap/mean": float(gap.mean()),
        "rollout/logprob_gap/max": float(gap.max()),
        "rollout/ppl_ratio": float(log_ppl_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().mean()),
        "rollout/kl": float(kl[mask].mean()),
    }


def _difference(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """(N,) float64: log π_old − log μ, 0 outside the mask."""
    return torch.where(mask, old_logprobs.double() - rollout_logprobs.double(), 0.0)
