"""Copies of a training state in host memory, from which a checkpoint is written while training goes on.

Not DCP's own stager: it refuses moments in 8 bits, and doesn't say beforehand how much memory it will take.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from foveal.track import console
from foveal.train.offload import plain_tensors
from foveal.train.processes import from_all, is_first_process

_SHARE = 0.8
"""Of the available host memory, that copies may take."""
_PINNED_FROM = 32 << 20
"""Bytes from which a buffer is pinned. The C library gives no two such buffers a page in common, which is what pinning
them one by one needs; and PyTorch's own pinned memory comes in powers of two."""


class Staging:
    """Host memory that states are copied to, kept from one copy to the next."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, ...], torch.Tensor] = {}
        self._fits: bool | None = None

    def fits(self, state: dict[str, Any]) -> bool:
        """Whether the host has room for a copy, in every process's view; says so once where it has not.

        All processes must call this.
        """
        if self._fits is None:
            needed = sum(plain.nbytes for tensor in _tensors(state) for plain in plain_tensors(tensor))
            room = available_memory()
            everyone = from_all((socket.gethostname(), needed, room))
            self._fits = True
            for host, _, available in everyone:
                together = sum(size for name, size, _ in everyone if name == host)
                if available is not None and together > _SHARE * available:
                    self._fits = False
                    if is_first_process():
                        console.note(
                            f"checkpoints are written while the run waits: a copy of weights and optimizer states "
                            f"({together / 1e9:.1f} GB) is too much for the host's memory ({available / 1e9:.1f} GB "
                            "available)"
                        )
                    break
        return self._fits

    @torch.no_grad()
    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copies nested dictionaries of tensors, of any kind and on any device, and plain values. The copies of the
        call before are overwritten."""
        staged: dict[str, Any] = {name: self._copy(value, (name,)) for name, value in state.items()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return staged

    def _copy(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            return {name: self._copy(part, (*path, name)) for name, part in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        if is_traceable_wrapper_subclass(value):  # a shard of FSDP2, a moment in 8 bits, or one in the other
            names, context = value.__tensor_flatten__()
            parts = {name: self._copy(getattr(value, name), (*path, name)) for name in names}
            return type(value).__tensor_unflatten__(parts, context, value.size(), value.stride())  # type: ignore[attr-defined]
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = self._buffers[path] = _host_buffer(value)
        buffer.copy_(value, non_blocking=True)
        return buffer


def _tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in state.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


def _host_buffer(like: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(like.shape, dtype=like.dtype)
    if like.device.type == "cuda" and buffer.nbytes >= _PINNED_FROM:
        cuda = torch.cuda.cudart()
        buffer.zero_()  # by all cores, where pinning would touch the pages one by one
        if int(cuda.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)) == 0:
            release = weakref.finalize(buffer.untyped_storage(), cuda.cudaHostUnregister, buffer.data_ptr())
            release.atexit = False
    return buffer


def available_memory() -> int | None:
    """Bytes that the host can still give to this process, by /proc and its control group; None where nothing tells."""
    found = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    for group, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            most = (Path(group) / limit).read_text().strip()
            if most != "max":
                held = int((Path(group) / used).read_text()) - _cached(Path(group) / "memory.stat")
                found.append(int(most) - held)
        except (OSError, ValueError):
            continue
    return min(found, default=None)


def _cached(statistics: Path) -> int:
    """Bytes of files in a control group's memory that the system gives up when it needs the room."""
    lines = dict(line.split() for line in statistics.read_text().splitlines())
    return int(lines.get("inactive_file", 0))
