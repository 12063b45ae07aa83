"""Optimizer, its steps, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from foveal.config.schema_model import OptimConfig


def build_optimizer(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over the parameters that are trained."""
    trained = [p for p in parameters if p.requires_grad]
    return torch.optim.AdamW(
        trained,
        lr=optim.lr,
        betas=(optim.betas[0], optim.betas[1]),
        weight_decay=optim.weight_decay,
        fused=trained[0].device.type == "cuda",
    )


def take_step(optimizer: torch.optim.Optimizer, max_grad_norm: float) -> float | None:
    """Steps along the accumulated gradient, scaled down to a norm of `max_grad_norm`, and clears it.

    Returns:
        The norm before scaling; None where it isn't finite: a step along NaN would destroy the weights, so they stay as
        they are, at the cost of one batch.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = float(nn.utils.clip_grad_norm_(parameters, max_grad_norm))
    finite = math.isfinite(norm)
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm if finite else None


def learning_rate(step: int, total_steps: int, optim: OptimConfig) -> float:
    """The learning rate of a trainer step, the same for each of its optimizer steps.

    Linear warm-up reaches the full rate at its last step (the first step is never wasted at rate 0), then constant, or
    half a cosine down to `min_lr_ratio` of the full rate at the last step.

    Args:
        step: 1-based number of the trainer step.
        total_steps: trainer steps of the whole run.
    """
    warmup = optim.lr_warmup_steps
    if warmup is None:
        warmup = int(optim.lr_warmup_ratio * total_steps)
    if step <= warmup:
        return optim.lr * step / warmup
    if optim.lr_scheduler_type == "constant":
        return optim.lr
    floor = optim.min_lr_ratio or 0.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return optim.lr * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
