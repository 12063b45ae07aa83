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
    mode: Literal["token", "seq"],
    total_tokens: int,
    total_sequences: int,
) -> Tensor:
    """This micro-batch's share of the optimizer step's loss.

    token: Σ over tokens of loss / total_tokens (DAPO, arXiv 2503.14476, section 3.3). seq: Σ over responses of the mean
    of its tokens' losses / total_sequences (GRPO, arXiv 2402.03300, eq. 3). Summed over the micro-batches and processes
    of an optimizer step it is the true mean, so the gradient does not depend on the split: a caller that averages
    gradients over processes multiplies by their number. A response with no token that the model wrote counts nothing.

    Args:
        token_losses: (N,) float; what stands on tokens outside the mask is ignored.
        lengths: (R,) int64. mask: (N,) bool.
        mode: as in `worker.actor.loss_avg_mode`.
        total_tokens, total_sequences: `count` of the whole optimizer step, over all micro-batches and processes.

    Returns:
        Scalar in the dtype of `token_losses`; 0 (with a gradient of 0) when nothing counts.

    Raises:
        ValueError: token_losses is not (N,), or the mode is not known.
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
    raise ValueError(f"loss_avg_mode={mode} is not known. Allowed: token, seq")
