"""The loss of PPO's critic: a pure function of flat tensors, as the policy losses are."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped value loss: ½ · max((V − R)², (clip(V, V_old − c, V_old + c) − R)²).

    The clip of PPO's reference implementation (OpenAI baselines, `ppo2`); GAE's returns R = A + V_old are those of
    arXiv 1506.02438. Where the clip raises a token's loss the token has no gradient.

    Args:
        values: (N,) float, of the critic that is being trained; carries the gradient.
        old_values: (N,) float, of the critic that the step began with.
        returns: (N,) float, what the values are trained towards.
        mask: (N,) bool, True on tokens that the model wrote.
        cliprange: c above, as `worker.critic.cliprange_value`.

    Returns:
        (N,) losses, not yet averaged (`aggregate` does that), 0 outside the mask; and sums over the written tokens,
        detached: `vf_clipfrac` (tokens whose loss the clip raised) and `vpred_mean` (values).

    Raises:
        ValueError: the tensors differ in shape.
    """
    for name, tensor in (("old_values", old_values), ("returns", returns), ("mask", mask)):
        if tensor.shape != values.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but must have {tuple(values.shape)} as values")
    # Inputs are masked rather than results: a NaN on a token outside the mask then reaches no gradient.
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    clipped = torch.maximum(torch.minimum(values, old_values + cliprange), old_values - cliprange)
    plain_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    losses = 0.5 * torch.maximum(plain_error, clipped_error)
    stats = {
        "vf_clipfrac": (plain_error < clipped_error).sum().to(losses.dtype),
        "vpred_mean": values.detach().sum(),
    }
    return losses, stats
