"""Averaging token losses over the optimizer step, whatever the micro-batches and processes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from foveal.algorithm.batch import mean_per_response, written_tokens


def count(lengths: Tensor, mask: Tensor) -> tuple[int, int]:
    """How many (tokens, sequences) count in an average: tokens that the model wrote, and responses that have any.

    Args:
        lengths: (R,) int64. mask: (N,) bool. Those of a whole optimizer step, or of a part of it to be added up.
    """
    written = written_tokens(lengths, mask)
    return int(written.sum()), int((written > 0).sum())


def aggregate(
    token_losses: Tensor,
    lengths: Tensor,
    mask: Tensor,
    mode: Literal["token", "seq", "seq_sum_norm"],
    total_tokens: int,
    total_sequences: int,
    sum_norm: float | None = None,
) -> Tensor:
    """This micro-batch's share of the optimizer step's loss.

    token: Σ over tokens of loss / total_tokens (DAPO, arXiv 2503.14476, section 3.3). seq: Σ over responses of the mean
    of its tokens' losses / total_sequences (GRPO, arXiv 2402.03300, eq. 3). seq_sum_norm: Σ over tokens of loss /
    (sum_norm · total_sequences), so that no token weighs less in a long response (Dr. GRPO, arXiv 2503.20783, section
    3). Summed over the micro-batches and processes of an optimizer step it is the true mean, so the
    gradient does not depend on the split: a caller that averages gradients over processes multiplies by their number.
    A response with no token that the model wrote counts nothing.

    Args:
        token_losses: (N,) float; what stands on tokens outside the mask is ignored.
        lengths: (R,) int64. mask: (N,) bool.
        mode: as in `worker.actor.loss_avg_mode`.
        total_tokens, total_sequences: `count` of the whole optimizer step, over all micro-batches and processes.
        sum_norm: seq_sum_norm: the constant in place of a response's length, in tokens; the longest that one may be.

    Returns:
        Scalar in the dtype of `token_losses`; 0 (with a gradient of 0) when nothing counts.

    Raises:
        ValueError: token_losses is not (N,), the mode is not known, or seq_sum_norm has no constant above 0.
    """
    if token_losses.shape != mask.shape:
        raise ValueError(
            f"token losses have shape {tuple(token_losses.shape)}, but must have {tuple(mask.shape)}: "
            "one loss per response token, not averaged"
        )
    if mode == "token":
        return torch.where(mask, token_losses, 0.0).sum() / max(total_tokens, 1)
    if mode == "seq":
        return mean_per_response(token_losses, lengths, mask).sum() / max(total_sequences, 1)
    if mode == "seq_sum_norm":
        if sum_norm is None or not sum_norm > 0:
            raise ValueError(f"loss_avg_mode=seq_sum_norm needs a constant above 0 to divide by; given: {sum_norm}")
        return torch.where(mask, token_losses, 0.0).sum() / (sum_norm * max(total_sequences, 1))
    raise ValueError(f"loss_avg_mode={mode} is not known. Allowed: token, seq, seq_sum_norm")
