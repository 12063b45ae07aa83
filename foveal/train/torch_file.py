"""Weights in a file that `torch.save` wrote, read one at a time. Nothing in the file can run code.

Such a file is a zip archive: `data.pkl` says which tensors there are, and `data/0`, `data/1`, … hold their numbers. The
pickle is opened with an unpickler that never imports what it names: a name that belongs to tensors becomes an inert
record, and any other name is an error. So files of any version of torch can be read, whatever became of its classes.
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from foveal.errors import CheckpointError


@dataclass(frozen=True)
class Stored:
    """Where a tensor, or a process's part of one, lies in its file.

    Attributes:
        record: name of the record with its numbers.
        offset, stride: in numbers.
    """

    record: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def span(self) -> int:
        """How many numbers lie between the first and the last of the tensor, both included."""
        return 0 if 0 in self.shape else 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True)
class StoredPart:
    """What one process has of a weight.

    Attributes:
        local: its part.
        shape: of the whole weight.
        placements: of a DTensor, for each dimension of the mesh of processes: "Shard(0)", "Replicate", or another of
            torch's names. None for a plain tensor.
    """

    local: Stored
    shape: tuple[int, ...]
    placements: tuple[str, ...] | None


class TorchFile:
    """An open file with a dictionary of tensors; a context manager.

    Attributes:
        path: of the file.
        weights: by name.

    Raises:
        CheckpointError: the file is cut or damaged, or holds anything but tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        try:
            self._archive = zipfile.ZipFile(self._file)
            [index] = [name for name in self._archive.namelist() if name.endswith("/data.pkl")]
            self._folder = index.removesuffix(".pkl")
            if self._archive.getinfo(index).compress_type != zipfile.ZIP_STORED:  # might be far larger than its file
                raise ValueError("it is compressed")
            self.weights = _weights(path, _Unpickler(io.BytesIO(self._archive.read(index))).load())
        except CheckpointError:
            self._file.close()
            raise
        except Exception as error:  # a damaged pickle raises nearly anything
            self._file.close()
            raise CheckpointError(
                f"{path}: cannot be read as a file of weights ({error}). It may be cut: copy it again, or use another "
                "checkpoint of the run."
            ) from error

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, stored: Stored) -> torch.Tensor:
        """Reads the numbers of a tensor, and no others.

        Raises:
            CheckpointError: they are cut or damaged.
        """
        if stored.span == 0:
            return torch.empty(stored.shape, dtype=stored.dtype)
        damage = CheckpointError(
            f"{self.path}: the numbers of a tensor ({stored.record}) are damaged. Copy the file again, or use another "
            "checkpoint of the run."
        )
        try:
            record = self._archive.getinfo(f"{self._folder}/{stored.record}")
        except KeyError:
            raise damage from None
        end = (stored.offset + stored.span) * stored.dtype.itemsize
        if (
            record.compress_type != zipfile.ZIP_STORED
            or min(stored.offset, *stored.shape, *stored.stride, 0) < 0
            or end > record.file_size
        ):
            raise damage
        numbers = torch.empty(stored.span, dtype=stored.dtype)
        self._fill(numbers.view(torch.uint8).numpy().data, record, stored.offset * stored.dtype.itemsize, damage)
        return numbers.as_strided(stored.shape, stored.stride)

    def _fill(self, memory: memoryview, record: zipfile.ZipInfo, start: int, damage: CheckpointError) -> None:
        self._file.seek(record.header_offset + 26)  # of the record's own header: lengths of its name and extra field
        lengths = self._file.read(4)
        skipped = 4 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        self._file.seek(record.header_offset + 26 + skipped + start)
        if self._file.readinto(memory) != len(memory):
            raise damage
        if len(memory) == record.file_size and zlib.crc32(memory) != record.CRC:
            raise damage


class _Record:
    """Stands for an object of torch: keeps what it was made of and does nothing."""

    def __new__(cls, *args: Any) -> _Record:
        record = super().__new__(cls)
        record.args = args
        record.state = {}
        return record

    args: tuple[Any, ...]
    state: dict[str, Any]

    def __setstate__(self, state: Any) -> None:
        # of a class with slots, the state is two dictionaries
        for part in state if isinstance(state, tuple) else (state,):
            self.state.update(part or {})


class _Storage(_Record):
    """args: name of the record, type of its numbers."""


def _tensor(storage: _Storage, offset: int, shape: Any, stride: Any, *_: Any) -> Stored:
    record, dtype = storage.args
    return Stored(f"{record}", dtype, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))


def _parameter(data: Any, *_: Any) -> Any:
    return data


class _Wrapper(_Record):
    """args: class, dtype, shape and more of a tensor that holds other tensors, as a DTensor does."""


def _of_type(make: Any, kind: type, args: tuple[Any, ...], state: Any) -> Any:
    made = make(*args)
    if not isinstance(made, _Wrapper):
        return made
    if kind.__name__ != "DTensor":
        raise pickle.UnpicklingError(f"weights of the kind {kind.__name__} cannot be read")
    holder = _Record()
    holder.__setstate__(state)
    placements = tuple(map(_placement, holder.state["_spec"].state["placements"]))
    return StoredPart(holder.state["_local_tensor"], tuple(map(int, made.args[2])), placements)


def _placement(record: _Record) -> str:
    name = type(record).__name__
    return f"{name}({record.state['dim']})" if "dim" in record.state else name


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _STORAGES.values()}
_MEANINGS = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch", "device"): _Record,
    ("torch.serialization", "_get_layout"): _Record,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_wrapper_subclass"): _Wrapper,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
}
# every name in these modules describes a tensor, how it is spread over processes, or their mesh
_DESCRIBING = (
    "torch.distributed.device_mesh",
    "torch.distributed._mesh_layout",
    "torch.distributed.tensor",
    "torch.distributed._tensor",
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _MEANINGS:
            return _MEANINGS[module, name]
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) in {("torch", "Tensor"), ("torch.nn.parameter", "Parameter")} or any(
            module == known or module.startswith(f"{known}.") for known in _DESCRIBING
        ):
            return type(name, (_Record,), {})
        raise pickle.UnpicklingError(f"it names {module}.{name}, which weights have no use for and which was not run")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, record, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"it refers to a {kind}")
        return _Storage(record, dtype)


def _weights(path: Path, content: Any) -> dict[str, StoredPart]:
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__} in place of weights by name.")
    weights = {}
    for name, value in content.items():
        part = StoredPart(value, value.shape, None) if isinstance(value, Stored) else value
        if not isinstance(name, str) or not isinstance(part, StoredPart) or not isinstance(part.local, Stored):
            raise CheckpointError(f"{path}: {name} is a {type(value).__name__}, not a weight.")
        weights[name] = part
    return weights
