"""Weights, whatever they come from, as a Hugging Face folder that anyone can load: whole, checked, or not at all."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foveal.errors import CheckpointError
from foveal.models.adapter_files import CONFIG as ADAPTER_CONFIG
from foveal.models.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from foveal.models.loading import DTYPES as SHORT_DTYPES
from foveal.train.files import free_space, fsync_tree, write_json
from foveal.train.safetensors_stream import SHARD_BYTES, write_safetensors

DTYPES = SHORT_DTYPES | {str(dtype).removeprefix("torch."): dtype for dtype in SHORT_DTYPES.values()}
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
_FINITE_PIECE = 1 << 24  # numbers checked at a time


def write_hf(
    target: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    expected: int,
    configuration: Path,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes weights, and beside them the files that a model needs besides, as they come.

    Everything is written beside `target` and checked first; the weights come in last, so `target` never holds a part of
    a model. Files of other names in `target` stay. Memory: one tensor, and what the caller's iterator holds.

    Args:
        target: the folder to write; may be `configuration`.
        tensors: (name on disk, tensor in its final type); every weight once.
        expected: how many numbers all weights together have.
        configuration: folder with config.json, tokenizer and the like, of which all but weights is taken.
        dtype: of the weights, for config.json.
        shard_bytes: most bytes of a safetensors file.

    Returns:
        `target`

    Raises:
        CheckpointError: weights that are not finite, too few or too many of them, a missing or damaged config.json, or
            a full or read-only disk.
    """
    with whole_folder(target, replaces=WEIGHTS) as partial:
        files = write_safetensors(partial, finite(target, tensors), shard_bytes=shard_bytes)
        _check_count(target, files, expected)
        _copy_configuration(configuration, partial, dtype)
    return target


def write_adapter(target: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    """Writes adapters as a folder that peft loads, whole or not at all.

    Args:
        tensors, config: as peft names them in adapter_model.safetensors and adapter_config.json.

    Returns:
        `target`

    Raises:
        CheckpointError: values that are not finite, or a full or read-only disk.
    """
    with whole_folder(target) as partial:
        save_file(dict(finite(target, tensors.items())), partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        write_json(partial / ADAPTER_CONFIG, config)
    return target


@contextmanager
def whole_folder(target: Path, *, replaces: Iterable[str] = ()) -> Iterator[Path]:
    """Gives a folder to fill, beside `target`; its files go into `target` at the end, unless something was raised.

    Args:
        replaces: patterns of files in `target` that go when the new ones come. Files of the same names always do.

    Raises:
        CheckpointError: the disk refuses, or what was written cannot be read back.
    """
    target = target.resolve()  # "." has no name; and what a link leads to may be another disk
    partial = target.with_name(f"{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        fsync_tree(partial)
        _put_in_place(partial, target, replaces)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{target}: cannot write the model: {error} ({free_space(target)}).") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def finite(target: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Passes on named tensors; raises CheckpointError at one that holds values that are not finite."""
    for name, tensor in tensors:
        if not all(bool(piece.isfinite().all()) for piece in tensor.reshape(-1).split(_FINITE_PIECE)):
            raise CheckpointError(
                f"{target}: not written, as {name} holds values that are not finite in {_name(tensor.dtype)}. Training "
                "diverged, or the values are too large for this type: use an earlier checkpoint, or bf16."
            )
        yield name, tensor


def _check_count(target: Path, files: list[Path], expected: int) -> None:
    """Opens the files that were written: they must hold as many numbers as the model has."""
    written = 0
    for path in files:
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dictionary)
                written += math.prod(weights.get_slice(name).get_shape())
    if written != expected:
        raise CheckpointError(f"{target}: not written, as {written:,} of {expected:,} numbers of the model were given.")


def _copy_configuration(configuration: Path, folder: Path, dtype: torch.dtype) -> None:
    shutil.copytree(configuration, folder, ignore=shutil.ignore_patterns(*WEIGHTS), dirs_exist_ok=True)
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        _set_dtype(config, _name(dtype))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{configuration / 'config.json'}: cannot read the model's configuration ({error})."
        ) from error
    write_json(path, config)


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Sets the dtype at the top, and wherever a part of the model states one; all other keys stay."""
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    config[key] = dtype
    for part in config.values():
        if isinstance(part, dict) and {"dtype", "torch_dtype"} & part.keys() and "quant_method" not in part:
            _set_dtype(part, dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _put_in_place(partial: Path, target: Path, replaces: Iterable[str]) -> None:
    """Moves the files of `partial` into `target`: old weights go first, new ones come last."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in replaces:
        for old in target.glob(pattern):
            old.unlink()
    files = [path.relative_to(partial) for path in partial.rglob("*") if path.is_file()]
    for file in sorted(files, key=lambda file: (file.name.endswith(".index.json"), file.suffix == ".safetensors")):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial / file, target / file)
    fsync_tree(target)
