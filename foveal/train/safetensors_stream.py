"""Writing safetensors files tensor by tensor, so that no more than one tensor is ever in memory.

safetensors' own writer wants all tensors of a file at once, and keeps other threads from running while it writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import torch

SHARD_BYTES = 5_000_000_000
"""Most bytes of a file, unless one tensor takes more: the size that the Hub recommends."""

_HEADER_BYTES = 1 << 20  # of every file; what the header leaves of it is filled with spaces, as the format allows
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_safetensors(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Writes tensors of any device as `model.safetensors`, or as numbered files with an index where one is too small.

    Args:
        folder: where they go; the tensors' files must not exist yet.
        shard_bytes: most bytes of a file.

    Returns:
        The safetensors files.

    Raises:
        OSError: the disk refused (full, read-only, …). Files without their final names may remain.
    """
    shards: list[_Shard] = []
    with ExitStack() as open_files:
        for name, tensor in tensors:
            if not shards or not shards[-1].takes(name, tensor, shard_bytes):
                path = folder / f"{len(shards):05}.partial"
                shards.append(_Shard(path, open_files.enter_context(path.open("xb"))))
            shards[-1].write(name, tensor)
        for shard in shards:
            shard.write_header()
    if len(shards) == 1:
        os.replace(shards[0].path, folder / "model.safetensors")
        return [folder / "model.safetensors"]
    files = [folder / f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for shard, file in zip(shards, files, strict=True):
        os.replace(shard.path, file)
    index = {
        "metadata": {"total_size": sum(shard.size for shard in shards)},
        "weight_map": {name: file.name for shard, file in zip(shards, files, strict=True) for name in shard.header},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")
    return files


class _Shard:
    """A file in the making. Its header comes first but is known last, so room is left for it.

    Attributes:
        size: bytes of the tensors so far.
        header: what the file's header says of each tensor.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.size = 0
        self.header: dict[str, dict[str, object]] = {}
        self._header_bytes = 100  # of the braces and the metadata
        self._file = file
        file.seek(_HEADER_BYTES)

    def takes(self, name: str, tensor: torch.Tensor, shard_bytes: int) -> bool:
        """Whether the tensor may come next: size, room in the header, and the alignment that its type wants."""
        return (
            _HEADER_BYTES + self.size + tensor.nbytes <= shard_bytes
            and self._header_bytes + _entry_bytes(name, tensor) <= _HEADER_BYTES
            and self.size % tensor.itemsize == 0
        )

    def write(self, name: str, tensor: torch.Tensor) -> None:
        end = self.size + tensor.nbytes
        offsets = [self.size, end]
        self.header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        self._header_bytes += _entry_bytes(name, tensor)
        self._file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self.size = end

    def write_header(self) -> None:
        header = json.dumps({"__metadata__": {"format": "pt"}, **self.header}, separators=(",", ":")).encode()
        room = _HEADER_BYTES - 8
        self._file.seek(0)
        self._file.write(room.to_bytes(8, "little") + header.ljust(room))


def _entry_bytes(name: str, tensor: torch.Tensor) -> int:
    """At least what the header's line of a tensor takes."""
    return len(json.dumps(name)) + 100 + 20 * tensor.dim()
