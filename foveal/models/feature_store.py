"""Features that stay the same during a step, in bounded memory."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from foveal.models.transfer import to_device, to_host

DEVICE_BYTES = 2 << 30
"""Of features kept on the device. A picture of 384 visual tokens takes 2.8 MB for a 7B model in bfloat16, and four
times that where there are three deep-stack layers."""

HOST_BYTES = 16 << 30
"""Of features kept in pinned host memory after that. What finds no room there either is computed anew in each pass."""


class FeatureStore:
    """Tensors by the content of a picture; on the device while there is room, then in pinned host memory.

    Whoever changes the weights that the features come from must clear it.

    Args:
        processes: that share the host's memory.
    """

    def __init__(self, device_bytes: int = DEVICE_BYTES, host_bytes: int = HOST_BYTES, processes: int = 1) -> None:
        self.device_bytes = device_bytes
        self.host_bytes = host_bytes // processes
        self.clear()

    def get(self, key: Hashable | None, device: torch.device) -> tuple[torch.Tensor, ...] | None:
        """What was put under the key, on `device`; None for nothing."""
        found = None if key is None else self._columns.get(key)
        return found and tuple(to_device(column, device) for column in found)

    def put(self, key: Hashable | None, columns: tuple[torch.Tensor, ...]) -> None:
        """Keeps the tensors if there is room. A key of None is never kept."""
        if key is None:
            return
        size = sum(column.nbytes for column in columns)
        if self._on_device + size <= self.device_bytes:
            self._on_device += size
            # Copied, since a part of a batch's tensor would keep all of it.
            self._columns[key] = tuple(column.clone() for column in columns)
        elif columns[0].is_cuda and self._on_host + size <= self.host_bytes:
            self._on_host += size
            self._columns[key] = tuple(to_host(column) for column in columns)

    def clear(self) -> None:
        self._columns: dict[Hashable, tuple[torch.Tensor, ...]] = {}
        self._on_device = self._on_host = 0
