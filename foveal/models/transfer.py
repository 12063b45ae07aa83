"""Where a tensor's numbers lie: copies between host and device for which the host doesn't wait; parts of shards."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`. From ordinary memory the copy would first wait for all work queued on a GPU."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a GPU in pinned memory. Only what is queued on the same stream afterwards may read it."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
