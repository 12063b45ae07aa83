"""Exact quantities of whole next-token distributions, for callers that have the logits of a chunk of tokens.

Logits are at the sampling temperature, with forbidden ids at a large negative finite number (−1e30): such an id has
probability 0 and gets a gradient of exactly 0, where −inf would make NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """H = −Σ_v p_v log p_v of each row, in nats.

    Args:
        logits: (N, V) float; half precision is computed in float32.

    Returns:
        (N,) float32, or float64 if given so. Differentiable.
    """
    logprobs = _log_softmax(logits)
    return -(logprobs.exp() * logprobs).sum(-1)


def kl_full(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(π ‖ π_ref) = Σ_v π_v (log π_v − log π_ref,v) of each row: no estimate, so no variance from sampling.

    Args:
        logits: (N, V) float, of the policy. ref_logits: (N, V) float, of the reference, which gets no gradient.

    Returns:
        (N,) float32, or float64 if given so. Differentiable in `logits`. Rounding may leave it a little below 0.
    """
    logprobs, ref_logprobs = _log_softmax(logits), _log_softmax(ref_logits.detach())
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
