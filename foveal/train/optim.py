"""Optimizer, its steps, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from foveal.config.schema_model import OptimConfig
from foveal.errors import DeviceMemoryError, ModelError
from foveal.models.parts import part_of
from foveal.train.clipping import clip_gradients
from foveal.train.lowmem import repeatable_rounding, small_adamw


def build_optimizer(module: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over the parameters that are trained, one group for each learning rate.

    Raises:
        ModelError: every weight is frozen.
    """
    groups = _parameter_groups(module, optim)
    if not groups:
        raise ModelError(
            "every weight of the model is frozen: set one of freeze_vision_tower, freeze_projector and "
            "freeze_language_model to false (a text model has only the last of these parts)"
        )
    options: dict[str, Any] = {"lr": optim.lr, "betas": tuple(optim.betas), "weight_decay": optim.weight_decay}
    if optim.strategy != "adamw":
        return small_adamw(optim.strategy, groups, **options)
    fused = groups[0]["params"][0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, fused=fused, **options)


def _parameter_groups(module: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Groups in the form of torch.optim; one whose rate is not `lr` has it as `own_lr`."""
    own = {"vision": optim.lr_vision, "projector": optim.lr_projector}
    groups: dict[float | None, list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(own.get(part_of(name)), []).append(parameter)
    return [{"params": found} | ({} if rate is None else {"own_lr": rate}) for rate, found in groups.items()]


def take_step(optimizer: torch.optim.Optimizer, max_grad_norm: float) -> float | None:
    """Steps along the accumulated gradient, scaled down to a norm of `max_grad_norm`, and clears it.

    Returns:
        The norm before scaling; None where it isn't finite: a step along NaN would destroy the weights, so they stay as
        they are, at the cost of one batch.

    Raises:
        DeviceMemoryError: the optimizer's states don't fit.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = clip_gradients(parameters, max_grad_norm)
    finite = math.isfinite(norm)
    if finite:
        try:
            with _states_apart(optimizer), repeatable_rounding(optimizer):
                optimizer.step()
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"out of memory for the optimizer's states: {str(error).splitlines()[0]}. "
                "Set optim.strategy=adamw_bf16 or adamw_8bit in the model's section, or train on more devices."
            ) from error
    optimizer.zero_grad(set_to_none=True)
    return norm if finite else None


@contextmanager
def _states_apart(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Around a step: memory of their own for the states that the first one makes.

    They stay. Amid gradients and activations they would keep torch from giving back what these leave: after the first
    update of a 3B model in float32, 13 GiB, which vLLM then missed when it woke.
    """
    parameter = optimizer.param_groups[0]["params"][0]
    if optimizer.state or not parameter.is_cuda:
        yield
        return
    torch.cuda.empty_cache()  # which a pool does not do by itself where memory runs out
    with torch.cuda.use_mem_pool(torch.cuda.MemPool(), parameter.device):
        yield


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, total_steps: int, optim: OptimConfig) -> float:
    """Sets the learning rates of a trainer step, the same for each of its optimizer steps.

    Returns:
        The rate of the groups that have none of their own.
    """
    for group in optimizer.param_groups:
        rate = learning_rate(step, total_steps, optim, group.get("own_lr"))
        if isinstance(group["lr"], torch.Tensor):  # torchao's, which compiled code reads
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    return learning_rate(step, total_steps, optim)


def learning_rate(step: int, total_steps: int, optim: OptimConfig, full: float | None = None) -> float:
    """The learning rate of a trainer step.

    Linear warm-up reaches the full rate at its last step, then constant, or half a cosine, as in EasyR1: from the full
    rate in the step after the warm-up to `min_lr_ratio` of it, which the step after the last would have. No step is
    wasted at rate 0, neither the first nor the last.

    Args:
        step: 1-based number of the trainer step.
        total_steps: trainer steps of the whole run.
        full: the rate after warm-up, by default `optim.lr`.
    """
    full = optim.lr if full is None else full
    warmup = optim.lr_warmup_steps
    if warmup is None:
        warmup = int(optim.lr_warmup_ratio * total_steps)
    if step <= warmup:
        return full * step / warmup
    if optim.lr_scheduler_type == "constant":
        return full
    floor = optim.min_lr_ratio or 0.0
    progress = min(1.0, (step - 1 - warmup) / max(1, total_steps - warmup))
    return full * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
