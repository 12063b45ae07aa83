"""PyTorch distributed checkpoints (DCP): writing tensors as shards, checking the files, reading them back.

Any number of processes reads what any other number wrote. Works without a process group. Nothing that is read may run
code: DCP keeps its index as a pickle, which is opened here with an unpickler that knows only DCP's own records.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import io
import pathlib
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, set_element
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from foveal.errors import CheckpointError
from foveal.train.processes import from_all, saving_group, several_processes
from foveal.train.sums import FileSum, Writer

INDEX = ".metadata"
Index: TypeAlias = dict[str, TensorStorageMetadata | BytesStorageMetadata]
"""Flat name ("model.lm_head.weight") → what the shards hold under it."""


def write_shards(folder: Path, state: dict[str, Any]) -> dict[str, FileSum]:
    """Writes nested dictionaries and lists of tensors and plain values as DCP shards into `folder`, which is made
    when absent, flushed to disk.

    With several processes every one must call this.

    Returns:
        file name → size and checksum of what all processes wrote.

    Raises:
        OSError: the disk refused (full, read-only, …).
    """
    writer = Writer(folder)
    with _single_process(), _root_cause():
        dcp.save(state, storage_writer=writer, process_group=saving_group(), no_dist=not several_processes())
    return {name: found for sums in from_all(writer.sums) for name, found in sums.items()}


class ShardReader:
    """The shards in `folder`, opened for reading.

    Raises:
        CheckpointError: the index is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = _read_metadata(folder)

    @property
    def index(self) -> Index:
        return self._metadata.state_dict_metadata

    def fill(self, state: dict[str, Any]) -> None:
        """Fills `state`: tensors in place (cast to their own dtype), other values replaced.

        With several processes every one must call this.

        Raises:
            CheckpointError: a name or shape that the shards do not hold, or a damaged shard.
        """
        self._fill(state, alone=not several_processes())

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Reads one full tensor into host memory, by one process alone, floating ones cast to `dtype`.

        Of memory it takes the tensor and, at a time, one piece of it as a process wrote it, in the saved type.

        Raises:
            CheckpointError: a damaged shard.
        """
        entry = self.index[name]
        assert isinstance(entry, TensorStorageMetadata)
        saved = entry.properties.dtype
        tensor = torch.empty(entry.size, dtype=dtype if dtype is not None and saved.is_floating_point else saved)
        self._fill({name: tensor}, alone=True)
        return tensor

    def _fill(self, state: dict[str, Any], *, alone: bool) -> None:
        reader = _Reader(self._folder, self._metadata)
        try:
            with _single_process(), _root_cause():
                dcp.load(state, storage_reader=reader, planner=_Planner(), no_dist=alone)
        except CheckpointError:
            raise
        except Exception as error:
            fault = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            raise CheckpointError(
                f"{self._folder}: a shard is damaged or does not fit ({fault}). Use another checkpoint of the run."
            ) from error


class _Planner(DefaultLoadPlanner):
    """DCP's planner loads plain values with `weights_only=False`; this one does not."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], torch.load(value, weights_only=True))


class _Reader(dcp.FileSystemReader):
    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
        }:
            return super().find_class(module, name)
        if module.partition(".")[0] == "pathlib" and name == "PosixPath":  # "pathlib._local" in Python 3.13
            return pathlib.PosixPath
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module.startswith("torch.distributed.checkpoint."):
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)):
                return found
        raise pickle.UnpicklingError(f"an index of tensors has no use for {module}.{name}")


def _read_metadata(folder: Path) -> Metadata:
    path = folder / INDEX
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete. Use another checkpoint of the run.")
    try:
        with path.open("rb") as file:
            metadata = _IndexUnpickler(file).load()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{path}: the index of the checkpoint is damaged ({error}).") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path}: the index of the checkpoint is damaged (it holds a {type(metadata).__name__}).")
    return metadata


@contextmanager
def _single_process() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def _root_cause() -> Iterator[None]:
    """Raises what went wrong in the first process that failed, in place of DCP's wrapper (a BaseException)."""
    try:
        yield
    except dcp.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        # torch's zip writer turns an OSError of the file under it into a RuntimeError
        while not isinstance(cause, OSError) and cause.__context__ is not None:
            cause = cause.__context__
        raise cause from None
