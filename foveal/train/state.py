"""Weights and optimizer of a trained module in a folder: DCP shards, and a manifest of their sizes.

.metadata, *.distcp   "model.NAME" → weights, each tied tensor once; "optim.NAME.KEY" → optimizer state
foveal.json           Manifest, or one that says more
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from foveal.errors import CheckpointError
from foveal.track import console
from foveal.train.files import write_json
from foveal.train.lowmem import quantized_moment
from foveal.train.shards import Index, check_sizes, read_index, read_shards, shard_sizes, write_shards

FORMAT = 1
INFO = "foveal.json"


@dataclass(frozen=True)
class Manifest:
    """What `foveal.json` says.

    Attributes:
        format: version of this layout.
        optimizer: whether the optimizer's state is here too.
        files: shard file name → size in bytes, to notice a cut or missing file.
    """

    format: int
    optimizer: bool
    files: dict[str, int]


AnyManifest = TypeVar("AnyManifest", bound=Manifest)


def save_state(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Manifest:
    """Writes the weights, and the state of the optimizer where one is given, as shards; the folder is made when absent.

    With a process group every process must call this.

    Returns:
        What is to go into `foveal.json`, by `write_manifest` in one process.

    Raises:
        OSError: the disk refused (full, read-only, …).
    """
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {"model": distinct_tensors(module)}
    if optimizer is not None:
        state["optim"] = _optimizer_state(module, optimizer)
    write_shards(folder, state)
    return Manifest(FORMAT, optimizer is not None, shard_sizes(folder))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_json(folder / INFO, asdict(manifest))


def read_manifest(folder: Path, kind: type[AnyManifest], *, what: str, cure: str) -> AnyManifest:
    """Reads foveal.json and compares every shard file with the size noted there.

    Args:
        what: the folder should be, as "an actor folder", and cure: what to do where it is not; for the message.

    Raises:
        CheckpointError: the folder holds no saved state, or one of a newer Foveal, or a file is missing or cut.
    """
    path = folder / INFO
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: {folder} is not {what} of a checkpoint, or its writing was cut short. {cure}"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        manifest = kind(**{field.name: content[field.name] for field in fields(kind)})
        if not isinstance(manifest.files, dict):
            raise TypeError(f"files is a {type(manifest.files).__name__}")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}).") from error
    if manifest.format > FORMAT:
        raise CheckpointError(
            f"{path}: format {manifest.format} comes from a newer Foveal; this one reads up to {FORMAT}."
        )
    check_sizes(folder, manifest.files)
    return manifest


def load_state(folder: Path, manifest: Manifest, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Reads weights (cast to the module's own dtypes) and, when asked for, the optimizer's state, all in place.

    Args:
        optimizer: starts afresh, with a line that says so, where the folder holds weights only.

    Raises:
        CheckpointError: a damaged file, or the state of another module or optimizer.
    """
    index = read_index(folder)
    state: dict[str, Any] = {"model": distinct_tensors(module)}
    _check_names(folder, index, state["model"])
    if optimizer is not None and not manifest.optimizer:
        console.note(f"{folder} holds weights only (trainer.save_model_only): the optimizer starts afresh")
        optimizer = None
    if optimizer is not None:
        state["optim"] = _optimizer_targets(index, module, optimizer)
    read_shards(folder, state)
    if optimizer is not None:
        optimizer.state.clear()
        for name, parameter in module.named_parameters():
            if name in state["optim"]:
                optimizer.state[parameter] = state["optim"][name]


def distinct_tensors(model: nn.Module) -> dict[str, Any]:
    """The model's state under each tensor's first name; the tensors share memory with the parameters."""
    first_names = {name for name, _ in model.named_parameters()}
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)} - first_names
    return {name: tensor for name, tensor in get_model_state_dict(model).items() if name not in aliases}


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Optimizer state by parameter name. Learning rate, betas and the like are configuration, not state.

    Not `get_optimizer_state_dict`: it takes an empty optimizer step to fill a fresh optimizer, and loading fails where
    a parameter has no state because it never had a gradient (the vision tower while batches hold text only).
    """
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


def _optimizer_targets(index: Index, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Room for the saved state: in the dtypes it was saved in, laid out (device, sharding) as the parameters are."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    saved: dict[str, dict[str, Any]] = {}
    for flat_name, entry in index.items():
        if flat_name.startswith("optim."):
            name, _, key = flat_name.removeprefix("optim.").rpartition(".")
            saved.setdefault(name, {})[key] = entry
    targets: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        # a step counter lives beside the parameter only where the kernel reads it there
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            name = names[parameter]
            scalars = parameter.device if on_device else torch.device("cpu")
            if name in saved:
                targets[name] = {
                    key: _room(entry, quantized_moment(optimizer, parameter, key), parameter, scalars)
                    for key, entry in saved[name].items()
                }
    return targets


def _room(
    entry: Any, quantized: torch.Tensor | None, parameter: nn.Parameter, scalars: torch.device
) -> torch.Tensor | None:
    if not isinstance(entry, TensorStorageMetadata):
        return None  # a plain value, which reading replaces
    if entry.size == parameter.shape and quantized is not None:
        return quantized
    if entry.size == parameter.shape:
        return torch.empty_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=parameter.device if entry.size else scalars)


def _check_names(folder: Path, index: Index, weights: dict[str, Any]) -> None:
    """Raises CheckpointError unless the checkpoint holds exactly the weights that the model has."""
    saved = {name.removeprefix("model."): entry for name, entry in index.items() if name.startswith("model.")}
    faults = _listing("weights are missing", weights.keys() - saved.keys())
    faults += _listing("weights are unknown to the model", saved.keys() - weights.keys())
    shapes = {name for name in weights.keys() & saved.keys() if saved[name].size != weights[name].shape}  # type: ignore[union-attr]
    faults += _listing("weights have another shape", shapes)
    if faults:
        raise CheckpointError(f"{folder}: the checkpoint does not fit this model: {'; '.join(faults)}.")


def _listing(fault: str, names: Iterable[str]) -> list[str]:
    listed = sorted(names)
    more = ", …" if len(listed) > 3 else ""
    return [f"{len(listed)} {fault} ({', '.join(listed[:3])}{more})"] if listed else []
