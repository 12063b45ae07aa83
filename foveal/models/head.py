"""Log-probabilities of given tokens without the logits of a whole batch in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from foveal.algorithm import entropy, kl_full
from foveal.models.lora import Factors, LoraLinear, add_product

_MASKED = -1.0e30
"""Logit of a forbidden id. Finite, so that its probability is exactly 0 without a NaN in any gradient."""

CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**28}
"""Logits held at once (float32): 32 MB on a CPU, where more would fall out of the cache, and 1 GB on a GPU."""


@dataclass
class TokenScores:
    """What the head says of N response tokens.

    Attributes:
        logprobs: (N,) float32, log p(target).
        entropy: (N,) float32 in nats, of the whole distribution; None where it wasn't asked for.
        kl: (N,) float32, the exact KL(policy ‖ reference); None without a reference.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None
    kl: torch.Tensor | None = None


@dataclass
class Head:
    """Last hidden states and the layer that turns them into logits.

    Attributes:
        hidden: (N, H), each the one that predicts its target.
        weight: (V, H). bias: (V,) or None.
        factors: the layer's adapter; None for none.
        scaling: of the adapter.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    factors: Factors | None = None
    scaling: float = 1.0

    def logits(self, rows: slice, temperature: float, forbidden: torch.Tensor) -> torch.Tensor:
        """(n, V) float32 logits of some tokens, at the sampling temperature, forbidden ids left out."""
        hidden = self.hidden[rows]
        logits = add_product(F.linear(hidden, self.weight, self.bias), hidden, self.factors, self.scaling).float()
        if temperature != 1.0:
            logits = logits / temperature
        return logits.index_fill(1, forbidden, _MASKED) if forbidden.numel() else logits


def score_tokens(
    head: Head,
    targets: torch.Tensor,
    *,
    temperature: float,
    forbidden: torch.Tensor,
    with_entropy: bool = False,
    reference: Head | None = None,
) -> TokenScores:
    """log p(target) under softmax(logits / temperature) with the forbidden ids left out, and what else is asked for.

    Computed in float32 over chunks of tokens; in the backward pass each chunk's logits are made again. Everything is
    differentiable in the head, nothing in the reference.

    Args:
        targets: (N,) int64.
        forbidden: (F,) int64 ids that are never sampled.
        with_entropy: also the entropy of each token's distribution.
        reference: the reference policy's head over the same tokens, for the exact KL.
    """

    def chunk(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        factors: Factors | None,
        rows: slice,
    ) -> torch.Tensor:
        logits = Head(hidden, weight, bias, factors, head.scaling).logits(slice(None), temperature, forbidden)
        found = [logits.gather(1, targets[rows].unsqueeze(1)).squeeze(1) - logits.logsumexp(1)]
        if with_entropy:
            found.append(entropy(logits))
        if reference is not None:
            with torch.no_grad():
                others = reference.logits(rows, temperature, forbidden)
            found.append(kl_full(logits, others))
        return torch.stack(found)

    size = max(1, CHUNK_ELEMENTS.get(head.hidden.device.type, 2**23) // head.weight.shape[0])
    # One chunk at least: a process without answers still takes part in the backward pass of a sharded model.
    chunks = [slice(start, start + size) for start in range(0, max(1, len(targets)), size)]
    inputs = [head.hidden, head.weight, *(head.factors or ())]
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    pieces = []
    for rows in chunks:
        arguments = (head.hidden[rows], head.weight, head.bias, head.factors, rows)
        pieces.append(checkpoint(chunk, *arguments, use_reentrant=False) if needs_grad else chunk(*arguments))
    rows_of = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return TokenScores(
        logprobs=next(rows_of),
        entropy=next(rows_of) if with_entropy else None,
        kl=next(rows_of) if reference is not None else None,
    )


def head_over(model: Any, hidden: torch.Tensor) -> Head:
    """A model's output layer over its last hidden states."""
    layer = model.get_output_embeddings()
    bias = getattr(layer, "bias", None)
    if isinstance(layer, LoraLinear):
        return Head(hidden, layer.weight, bias, layer.factors, layer.scaling)
    return Head(hidden, layer.weight, bias)
