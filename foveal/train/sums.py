"""Checksums of the files of a checkpoint: taken while they are written, compared before they are read.

CRC-32, which the C library of compression computes faster than disks deliver (6 GB/s and core where it was measured;
the fastest of hashlib 2 GB/s). It notices damage, not forgery.
"""

from __future__ import annotations

import io
import math
import os
import zlib
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from foveal.errors import CheckpointError
from foveal.train.background import Background, wait_for_all
from foveal.train.processes import from_all, several_processes

THREADS = min(8, os.cpu_count() or 1)
FILE_BYTES = 1 << 30
"""From how many bytes a process writes another file beside the first."""
_PIECE = 1 << 24


@dataclass(frozen=True)
class FileSum:
    """Size in bytes of a file, and its CRC-32."""

    size: int
    crc32: int

    @classmethod
    def of(cls, content: bytes) -> FileSum:
        return cls(len(content), zlib.crc32(content))


class SummedFile(io.BufferedWriter):
    """A file to be written from its beginning to its end, summed up on the way."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "w"))
        self._size = self._crc32 = 0

    def write(self, data: Any, /) -> int:
        self._crc32 = zlib.crc32(data, self._crc32)
        written = super().write(data)
        self._size += written
        return written

    @property
    def sum(self) -> FileSum:
        """Of what has been written so far."""
        return FileSum(self._size, self._crc32)


class Writer(dcp.FileSystemWriter):
    """DCP's writer into a folder, that sums up the files and writes several at a time where there is much to write.

    Attributes:
        sums: file name → its sum, of those that this process has written.
    """

    def __init__(self, folder: Path) -> None:
        # No copying ahead: it would wait for everything that training has queued on the device.
        super().__init__(folder, per_thread_copy_ahead=0)
        self.sums: dict[str, FileSum] = {}
        self.fs = _SummedFiles(self.sums)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Not DCP's own threads: an error in one of those is lost, and with it a part of the checkpoint."""
        prefix = plan.storage_data
        plans = [
            replace(plan, items=items, storage_data=replace(prefix, prefix=f"{prefix.prefix}{number}_"))
            for number, items in enumerate(_evenly(plan.items))
        ]
        plans[0] = replace(plans[0], storage_data=prefix)
        write = super().write_data
        written: list[WriteResult] = []

        def write_part(part: SavePlan) -> None:
            written.extend(write(part, planner).wait())

        # not a pool's threads: Python waits for those at its end, even where a second Ctrl-C asked to stop at once
        threads = [Background() for _ in plans]
        for thread, part in zip(threads, plans, strict=True):
            thread.start(partial(write_part, part), "writing a shard")
        wait_for_all(threads)
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done


class _SummedFiles(FileSystem):
    def __init__(self, sums: dict[str, FileSum]) -> None:
        self._sums = sums

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb"
        with SummedFile(path) as file:
            yield file
        self._sums[Path(path).name.removesuffix(".tmp")] = file.sum


def _evenly(items: list[WriteItem]) -> list[list[WriteItem]]:
    """Splits what is to be written into as many files as are worth it, of about the same size."""
    sizes = [_bytes(item) for item in items]
    files: list[list[WriteItem]] = [[] for _ in range(max(1, min(THREADS, sum(sizes) // FILE_BYTES)))]
    filled = [0] * len(files)
    for index in sorted(range(len(items)), key=lambda index: -sizes[index]):
        emptiest = filled.index(min(filled))
        files[emptiest].append(items[index])
        filled[emptiest] += sizes[index]
    return files


def _bytes(item: WriteItem) -> int:
    tensor = item.tensor_data
    return 0 if tensor is None else math.prod(tensor.chunk.sizes) * tensor.properties.dtype.itemsize


def check_sizes(folder: Path, expected: Mapping[str, int]) -> None:
    """Compares files with the sizes noted when they were written, without reading them.

    Raises:
        CheckpointError: names every file that is missing or has another size.
    """
    _refuse(folder, [fault for name, size in expected.items() if (fault := _size_fault(folder / name, size))])


def check_sums(folder: Path, expected: Mapping[str, FileSum]) -> None:
    """Reads files and compares them with what was noted when they were written.

    With several processes every one must call this; each reads its share. What a process has read once and found right
    it doesn't read again, unless the file has changed.

    Raises:
        CheckpointError: names every file that is missing, cut or damaged.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if several_processes() else (0, 1)
    names = sorted(expected)[rank::world]
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda name: _fault(folder / name, expected[name]), names)
        faults = [fault for faults in from_all([fault for fault in found if fault]) for fault in faults]
    _refuse(folder, faults)


def _refuse(folder: Path, faults: list[str]) -> None:
    if faults:
        raise CheckpointError(
            f"{folder}: the checkpoint is damaged: {'; '.join(faults)}. "
            "Copy it again or use another checkpoint of the run."
        )


def _size_fault(path: Path, expected: int) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    size = path.stat().st_size
    return None if size == expected else f"{path.name} has {size:,} of {expected:,} bytes"


def _fault(path: Path, expected: FileSum) -> str | None:
    if fault := _size_fault(path, expected.size):
        return fault
    try:
        found = _crc32(path, expected.size, path.stat().st_mtime_ns)
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None if found == expected.crc32 else f"{path.name} holds something else than was written (checksum)"


@lru_cache(maxsize=4096)
def _crc32(path: Path, _size: int, _changed: int) -> int:
    found = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            found = zlib.crc32(piece, found)
    return found
