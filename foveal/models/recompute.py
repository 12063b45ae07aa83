"""What the backward pass needs of the forward pass: kept, computed again, or waiting in host memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from foveal.config.schema_model import Checkpointing

_SMALL = 2**20
"""Bytes below which a tensor stays where it is: a copy would take longer than it is worth."""


def set_checkpointing(model: Any, checkpointing: Checkpointing) -> None:
    """Sets which decoder layers and vision blocks keep nothing but their input, and are computed again in the backward
    pass: all of them (True), every other one ("selective"), or none (False).

    Every other whole layer, rather than some operations of each: it stays true where layers are compiled.
    """
    if not checkpointing:
        return
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if checkpointing == "selective":
        for layers in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
            for layer in layers[1::2]:
                if hasattr(layer, "gradient_checkpointing"):
                    layer.gradient_checkpointing = False  # type: ignore[assignment]


def offloaded_activations() -> AbstractContextManager[object]:
    """A context in which what autograd saves for the backward pass waits in host memory; weights stay.

    Around layers that are checkpointed those are the inputs of the layers.
    """
    return saved_tensors_hooks(_to_host, _to_device)


def _to_host(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
    # a product saves its weight as a view (its transpose) of the parameter
    whole = tensor if tensor._base is None else tensor._base
    if isinstance(whole, nn.Parameter) or tensor.nbytes < _SMALL:
        return tensor.device, tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    host.copy_(tensor, non_blocking=True)
    return tensor.device, host


def _to_device(saved: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    device, tensor = saved
    return tensor.to(device, non_blocking=True)
