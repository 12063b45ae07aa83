"""Log-probabilities of given tokens without the logits of a whole batch in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from foveal.algorithm import entropy, kl_full
from foveal.models.compiling import Compiled
from foveal.models.lora import Factors, LoraLinear, add_product

_MASKED = -1.0e30
"""Logit of a forbidden id. Finite, so that its probability is exactly 0 without a NaN in any gradient."""

CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**28, "compiled": 2**29}
"""Logits held at once: 32 MB in float32 on a CPU, where more would fall out of the cache, and 1 GB on a GPU, in float32
or, compiled, in 16 bits."""


@dataclass
class TokenScores:
    """What the head says of N response tokens.

    Attributes:
        logprobs: (N,) float32 (float64 from a model in float64), log p(target).
        entropy: (N,) likewise, in nats, of the whole distribution; None where it wasn't asked for.
        kl: (N,) likewise, the exact KL(policy ‖ reference); None without a reference.
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

    def logits(self, rows: slice) -> torch.Tensor:
        """(n, V) of some tokens, as the model makes them."""
        hidden = self.hidden[rows]
        return add_product(F.linear(hidden, self.weight, self.bias), hidden, self.factors, self.scaling)


def score_tokens(
    head: Head,
    targets: torch.Tensor,
    *,
    temperature: float,
    forbidden: torch.Tensor,
    with_entropy: bool = False,
    reference: Head | None = None,
    compiled: bool = False,
) -> TokenScores:
    """log p(target) under softmax(logits / temperature) with the forbidden ids left out, and what else is asked for.

    Computed in float32 over chunks of tokens; in the backward pass each chunk's logits are made again. Everything is
    differentiable in the head, nothing in the reference.

    Args:
        targets: (N,) int64.
        forbidden: (F,) int64 ids that are never sampled.
        with_entropy: also the entropy of each token's distribution.
        reference: the reference policy's head over the same tokens, for the exact KL.
        compiled: what follows the matrix products runs in one kernel, and no logits in float32 are made.
    """
    allowed = torch.ones(head.weight.shape[0], dtype=torch.bool, device=targets.device).index_fill(0, forbidden, False)
    if reference is not None or head.factors is not None:
        return _by_autograd(head, targets, allowed, temperature, with_entropy, reference)
    compiled = compiled and len(targets) > 0  # a length of 0 would be compiled for, too
    device = head.hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    size = _rows(head, "compiled" if compiled else device)
    arguments = (
        head.hidden,
        head.weight,
        head.bias,
        targets,
        allowed,
        temperature,
        with_entropy,
        dtype,
        size,
        compiled,
    )
    logprobs, found = _Scores.apply(*arguments)  # type: ignore[no-untyped-call]
    return TokenScores(logprobs, found)


class _Scores(torch.autograd.Function):
    """Log-probabilities and entropies of tokens, differentiable in hidden states, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        allowed: torch.Tensor,
        temperature: float,
        with_entropy: bool,
        dtype: torch.dtype,
        size: int,
        compiled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.settings = temperature, dtype, size, compiled
        ctx.set_materialize_grads(False)  # entropies are often only looked at
        statistics, _ = _kernels(compiled)
        cast = _cast(hidden, weight, bias, dtype)
        pieces = []
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _chunks(len(targets), size):
                pieces.append(
                    statistics(_open_ended(cast.logits(rows)), targets[rows], allowed, temperature, with_entropy)
                )
        found = [torch.cat(parts) for parts in zip(*pieces, strict=True)]
        picked, normaliser = found[:2]
        ctx.save_for_backward(hidden, weight, bias, targets, allowed, normaliser, *found[2:])
        return picked - normaliser, found[2] if with_entropy else None

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(
        ctx: Any, by_logprob: torch.Tensor | None, by_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        temperature, dtype, size, compiled = ctx.settings
        hidden, weight, bias, targets, allowed, normaliser, *rest = ctx.saved_tensors
        if by_logprob is None:
            by_logprob = torch.zeros_like(normaliser)
        _, gradient = _kernels(compiled)
        cast = _cast(hidden, weight, bias, dtype)
        needs = ctx.needs_input_grad
        of_hidden = torch.zeros_like(hidden) if needs[0] else None
        of_weight = torch.zeros_like(weight) if needs[1] else None
        of_bias = torch.zeros_like(bias) if bias is not None and needs[2] else None
        for rows in _chunks(len(targets), size):
            of_entropy = None if by_entropy is None else (rest[0][rows], by_entropy[rows])
            known = targets[rows], allowed, normaliser[rows], by_logprob[rows]
            slope = gradient(_open_ended(cast.logits(rows)), *known, of_entropy, temperature)
            if of_hidden is not None:
                of_hidden[rows] = slope @ cast.weight
            if of_weight is not None:
                of_weight += slope.t() @ cast.hidden[rows]
            if of_bias is not None:
                of_bias += slope.sum(0)
        return of_hidden, of_weight, of_bias, *[None] * 7


def _cast(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Head:
    """A head in the type that its product runs in."""
    return Head(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _scaled(logits: torch.Tensor, allowed: torch.Tensor, temperature: float) -> torch.Tensor:
    """The logits of the distribution that is sampled from, in float32 at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.where(allowed, wide if temperature == 1.0 else wide / temperature, _MASKED)


def _statistics(
    logits: torch.Tensor, targets: torch.Tensor, allowed: torch.Tensor, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, ...]:
    """(n,) each: the target's logit, log Σ exp over all, and the entropy where it is asked for."""
    return _measured(_scaled(logits, allowed, temperature), targets, with_entropy)


def _measured(scaled: torch.Tensor, targets: torch.Tensor, with_entropy: bool) -> tuple[torch.Tensor, ...]:
    picked, normaliser = scaled.gather(1, targets.unsqueeze(1)).squeeze(1), scaled.logsumexp(1)
    return (picked, normaliser, entropy(scaled)) if with_entropy else (picked, normaliser)


def _gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    allowed: torch.Tensor,
    normaliser: torch.Tensor,
    by_logprob: torch.Tensor,
    of_entropy: tuple[torch.Tensor, torch.Tensor] | None,
    temperature: float,
) -> torch.Tensor:
    """The loss's gradient in the logits, (n, V) in their type. With p the probabilities and H their entropy:

    ∂ log p(target) / ∂ logits = (1[target] − p) / temperature,  ∂ H / ∂ logits = −p (log p + H) / temperature.

    Args:
        by_logprob: (n,), the loss's gradient in the log-probabilities.
        of_entropy: the entropies and the loss's gradient in them; None where it has none.
    """
    logprobs = _scaled(logits, allowed, temperature) - normaliser.unsqueeze(1)
    p = logprobs.exp()
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets.unsqueeze(1)
    slope = by_logprob.unsqueeze(1) * (is_target.to(p.dtype) - p)
    if of_entropy is not None:
        entropies, by_entropy = of_entropy
        slope = slope - by_entropy.unsqueeze(1) * p * (logprobs + entropies.unsqueeze(1))
    return torch.where(allowed, slope / temperature, 0.0).to(logits.dtype)


@lru_cache
def _kernels(compiled: bool) -> tuple[Callable[..., tuple[torch.Tensor, ...]], Callable[..., torch.Tensor]]:
    """`_statistics` and `_gradient`; compiled, each reads the logits a few times and makes nothing of their size."""
    if not compiled:
        return _statistics, _gradient
    both = Compiled()
    # The vocabulary stays a constant: only a chunk's length is left open (`_open_ended`).
    return both.wrap(_statistics, dynamic=None), both.wrap(_gradient, dynamic=None)


def _open_ended(logits: torch.Tensor) -> torch.Tensor:
    torch._dynamo.maybe_mark_dynamic(logits, 0)
    return logits


def _by_autograd(
    head: Head,
    targets: torch.Tensor,
    allowed: torch.Tensor,
    temperature: float,
    with_entropy: bool,
    reference: Head | None,
) -> TokenScores:
    """The scores where there is more to them: an adapter on the output layer, or the exact KL to the reference."""

    def chunk(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        factors: Factors | None,
        rows: slice,
    ) -> torch.Tensor:
        logits = Head(hidden, weight, bias, factors, head.scaling).logits(slice(None))
        scaled = _scaled(logits, allowed, temperature)
        picked, normaliser, *found = _measured(scaled, targets[rows], with_entropy)
        if reference is not None:
            with torch.no_grad():
                others = _scaled(reference.logits(rows), allowed, temperature)
            found.append(kl_full(scaled, others))
        return torch.stack([picked - normaliser, *found])

    inputs = [head.hidden, head.weight, *(head.factors or ())]
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    pieces = []
    for rows in _chunks(len(targets), _rows(head, head.hidden.device.type)):
        arguments = (head.hidden[rows], head.weight, head.bias, head.factors, rows)
        pieces.append(checkpoint(chunk, *arguments, use_reentrant=False) if needs_grad else chunk(*arguments))
    logprobs, *found = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return TokenScores(logprobs, found[0] if with_entropy else None, found[-1] if reference is not None else None)


def _rows(head: Head, where: str) -> int:
    """Tokens of a chunk."""
    return max(1, CHUNK_ELEMENTS.get(where, CHUNK_ELEMENTS["cpu"]) // head.weight.shape[0])


def _chunks(count: int, size: int) -> list[slice]:
    # One chunk at least: a process without answers still takes part in the backward pass of a sharded model.
    return [slice(start, start + size) for start in range(0, max(1, count), size)]


def head_over(model: Any, hidden: torch.Tensor) -> Head:
    """A model's output layer over its last hidden states."""
    layer = model.get_output_embeddings()
    bias = getattr(layer, "bias", None)
    if isinstance(layer, LoraLinear):
        return Head(hidden, layer.weight, bias, layer.factors, layer.scaling)
    return Head(hidden, layer.weight, bias)
