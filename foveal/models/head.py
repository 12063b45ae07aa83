"""Log-probabilities of given tokens without the logits of a whole batch in memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

_MASKED = -1.0e30
"""Logit of a forbidden id. Finite, so that its probability is exactly 0 without a NaN in any gradient."""

_CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**28}
"""Logits held at once (float32): 32 MB on a CPU, where more would fall out of the cache, and 1 GB on a GPU."""


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    temperature: float,
    forbidden: torch.Tensor,
) -> torch.Tensor:
    """log p(target) under softmax(logits / temperature) with the forbidden ids left out.

    Computed in float32 over chunks of tokens; in the backward pass each chunk's logits are made again.

    Args:
        hidden: (N, H) last hidden states, each the one that predicts its target.
        weight: (V, H) and bias: (V,) or None: the language-model head.
        targets: (N,) int64.
        forbidden: (F,) int64 ids that are never sampled.

    Returns:
        (N,) float32
    """

    def chunk(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, t: torch.Tensor) -> torch.Tensor:
        logits = F.linear(h, w, b).float()
        if temperature != 1.0:
            logits = logits / temperature
        if forbidden.numel():
            logits = logits.index_fill(1, forbidden, _MASKED)
        return logits.gather(1, t.unsqueeze(1)).squeeze(1) - logits.logsumexp(1)

    rows = max(1, _CHUNK_ELEMENTS.get(hidden.device.type, 2**23) // weight.shape[0])
    if not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)):
        pieces = [chunk(h, weight, bias, t) for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)]
    else:
        pieces = [
            checkpoint(chunk, h, weight, bias, t, use_reentrant=False)
            for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)
        ]
    return torch.cat(pieces) if pieces else hidden.new_zeros(0, dtype=torch.float32)


def head_of(model: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of a model's output layer."""
    head = model.get_output_embeddings()
    return head.weight, getattr(head, "bias", None)
