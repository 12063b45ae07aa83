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
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, set_element
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from foveal.errors import CheckpointError

INDEX = ".metadata"
Index: TypeAlias = dict[str, TensorStorageMetadata | BytesStorageMetadata]
"""Flat name ("model.lm_head.weight") → what the shards hold under it."""


def write_shards(folder: Path, state: dict[str, Any]) -> None:
    """Writes nested dictionaries and lists of tensors and plain values as DCP shards into `folder`, flushed to disk.

    With a process group every process must call this.

    Raises:
        OSError: the disk refused (full, read-only, …).
    """
    with _single_process(), _root_cause():
        dcp.save(state, checkpoint_id=folder, no_dist=not dist.is_initialized())


def read_index(folder: Path) -> Index:
    """Reads which tensors and values the shards in `folder` hold.

    Raises:
        CheckpointError: the index is missing or damaged.
    """
    return _read_metadata(folder).state_dict_metadata


def read_shards(folder: Path, state: dict[str, Any]) -> None:
    """Fills `state` from the shards in `folder`: tensors in place (cast to their own dtype), other values replaced.

    Raises:
        CheckpointError: a name or shape that the shards do not hold, or a damaged shard.
    """
    try:
        with _single_process(), _root_cause():
            dcp.load(state, storage_reader=_Reader(folder), planner=_Planner(), no_dist=not dist.is_initialized())
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{folder}: a shard is damaged or does not fit ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Use another checkpoint of the run."
        ) from error


def shard_sizes(folder: Path) -> dict[str, int]:
    """File name → size in bytes of the index and every shard in `folder`."""
    names = [path for path in folder.iterdir() if path.suffix == ".distcp" or path.name == INDEX]
    return {path.name: path.stat().st_size for path in sorted(names)}


def check_sizes(folder: Path, expected: dict[str, int]) -> None:
    """Compares the shard files with the sizes noted when they were written.

    Raises:
        CheckpointError: names every file that is missing or has another size.
    """
    found = shard_sizes(folder)
    faults = [
        f"{name} is missing" if name not in found else f"{name} has {found[name]:,} of {size:,} bytes"
        for name, size in expected.items()
        if found.get(name) != size
    ]
    if faults:
        raise CheckpointError(
            f"{folder}: the checkpoint is damaged: {'; '.join(faults)}. "
            "Copy it again or use another checkpoint of the run."
        )


class _Planner(DefaultLoadPlanner):
    """DCP's planner loads plain values with `weights_only=False`; this one does not."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], torch.load(value, weights_only=True))


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = _read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


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
