"""Matrix products of a width that the tensor cores can't take well.

A row of 3,420 bfloat16 numbers, the inner width of Qwen2.5-VL's vision MLP, doesn't begin at a multiple of 16 bytes, as
the fastest kernels want it; two thirds of the tower's weights are in those products.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foveal.models.lora import LoraLinear, add_product

_ALIGNED = 8  # elements of 16 bits in the 16 bytes at which a row must begin
_WIDTH = 64  # wide tiles; at most 2 % more work for widths of 3,000 and above


def align_vision_mlps(tower: Any) -> int:
    """Lets gated MLPs of an unaligned inner width compute with zeros added to it; weights and results stay as they are.

    Returns:
        how many MLPs there were.
    """
    found = 0
    for block in tower.blocks:
        gate = getattr(block.mlp, "gate_proj", None)
        if gate is not None and gate.out_features % _ALIGNED:
            block.mlp.forward = MethodType(_aligned_forward, block.mlp)
            found += 1
    return found


def _aligned_forward(mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
    """down(act(gate(x)) · up(x)), where the added columns of gate and up are 0, and so add nothing to down."""
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    extra = -gate.out_features % _WIDTH
    wide = mlp.act_fn(_widened(gate, hidden, rows=extra)) * _widened(up, hidden, rows=extra)
    return _widened(down, wide, columns=extra)


def _widened(layer: nn.Linear, hidden: torch.Tensor, rows: int = 0, columns: int = 0) -> torch.Tensor:
    """The layer with rows and columns of zeros added to its weight, and so to its adapter."""
    bias = None if layer.bias is None else F.pad(layer.bias, (0, rows))
    result = F.linear(hidden, F.pad(layer.weight, (0, columns, 0, rows)), bias)
    if not isinstance(layer, LoraLinear) or layer.factors is None:
        return result
    a, b = layer.factors
    return add_product(result, hidden, (F.pad(a, (0, columns)), F.pad(b, (0, 0, 0, rows))), layer.scaling)
