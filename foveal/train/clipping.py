"""The norm of a gradient and its limit, where the gradient may be spread over processes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

_PIECE = 1 << 16
"""Numbers that are summed in one go on a CPU: of 68 million the sum in float32 has been wrong by 0.3%."""


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scales gradients down to a norm of `max_norm` over all parameters together, and over all shards.

    With sharded parameters every process must call this, and each gets the same number.

    Returns:
        The norm before scaling.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    shards = [gradient.to_local() for gradient in sharded]
    square = _square(whole)
    if sharded:
        mesh = sharded[0].device_mesh
        total = torch.tensor([_square(shards)], dtype=torch.float64, device=mesh.device_type)
        dist.all_reduce(total, group=mesh.get_group(mesh.ndim - 1))  # the last dimension; others hold copies
        square += float(total)
    norm = math.sqrt(square)
    scale = max_norm / (norm + 1e-6)
    if scale < 1:
        for gradient in whole + shards:
            gradient.mul_(scale)
    return norm


def _square(tensors: list[torch.Tensor]) -> float:
    if not tensors:
        return 0.0
    pieces = [piece for t in tensors for piece in (t.flatten().split(_PIECE) if t.device.type == "cpu" else [t])]
    norms = [torch.linalg.vector_norm(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in pieces]
    return float(torch.stack(norms).double().square().sum())
