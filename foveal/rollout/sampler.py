"""Drawing one token per row from logits, repeatably, with the log-probability of what was drawn."""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def answer_key(seed: int, uid: str, answer: int, size: int) -> int:
    """A number of `size` bytes that belongs to one answer, whatever else is in the batch."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{answer}:{uid}".encode(), digest_size=size).digest(), "little")


def answer_uniforms(seed: int, uid: str, answer: int, count: int) -> np.ndarray:
    """The random numbers of one answer: one per token, whatever else is in the batch.

    Args:
        seed, uid, answer: seed of the sampling, uid of the prompt, number of the answer within its group.
        count: how many; a longer draw begins with the shorter one.

    Returns:
        (count,) float64 in [0, 1).
    """
    return np.random.Generator(np.random.Philox(key=answer_key(seed, uid, answer, 16))).random(count)


def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: float,
    top_p: float,
    top_k: int,
    forbidden_ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token per row by inverting the cumulative distribution at the row's uniform number.

    Forbidden ids are masked first, then come temperature, top-k and top-p, each on what the one before left.

    Args:
        logits: (B, V) float32; left as they are.
        uniforms: (B,) float64 in [0, 1); unused where temperature is 0.
        temperature: 0 takes the most probable id.
        top_p: keep the most probable ids until their sum reaches it; 1.0 keeps all.
        top_k: keep the k most probable ids, and those equal to the last of them; -1 keeps all.
        forbidden_ids: (F,) int64, ids that are never drawn.

    Returns:
        ids: (B,) int64.
        logprobs: (B,) float32, of the distribution drawn from; at temperature 0, of the masked one at temperature 1.
    """
    scores = logits.index_fill(-1, forbidden_ids, -torch.inf)
    if temperature == 0:
        ids = scores.argmax(-1, keepdim=True)
    else:
        scores /= temperature
        if 0 < top_k < scores.shape[-1]:
            _keep_top_k(scores, top_k)
        if top_p < 1.0:
            _keep_top_p(scores, top_p)
        ids = _invert_cumulative(scores.softmax(-1), uniforms.unsqueeze(-1))
    logprobs = scores.gather(-1, ids) - scores.logsumexp(-1, keepdim=True)
    return ids.squeeze(-1), logprobs.squeeze(-1)


def _keep_top_k(scores: torch.Tensor, top_k: int) -> None:
    last = scores.topk(top_k, dim=-1).values[:, -1:]
    scores.masked_fill_(scores < last, -torch.inf)


def _keep_top_p(scores: torch.Tensor, top_p: float) -> None:
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    dropped = before >= top_p
    dropped[:, 0] = False
    scores.masked_fill_(torch.empty_like(dropped).scatter_(-1, order, dropped), -torch.inf)


def _invert_cumulative(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """(B, V), (B, 1) -> (B, 1): the first id whose cumulative probability exceeds the row's uniform number."""
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    ids = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    ids.clamp_(max=probabilities.shape[-1] - 1)
    # A parallel sum may round up across an id of probability zero, and the product up to the whole sum: such a draw
    # (once in 2**50) takes the most probable id.
    return torch.where(probabilities.gather(-1, ids) > 0, ids, probabilities.argmax(-1, keepdim=True))
