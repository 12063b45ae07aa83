"""Weights and optimizer of a trained module in a folder: DCP shards, and a manifest of their sizes and checksums.

.metadata, *.distcp   "model.NAME" → weights, each tied tensor once; "optim.NAME.KEY" → optimizer state
foveal.json           Manifest, or one that says more
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from foveal.errors import CheckpointError
from foveal.models.lora import has_lora, is_factor
from foveal.track import console
from foveal.train.files import write_json
from foveal.train.lowmem import quantized_moment
from foveal.train.shards import Index, ShardReader, write_shards
from foveal.train.sums import FileSum, check_sizes, check_sums

FORMAT = 1
INFO = "foveal.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What `foveal.json` says.

    Attributes:
        format: version of this layout.
        optimizer: whether the optimizer's state is here too.
        files: shard file name → size in bytes, to notice a cut or missing file.
        crc32: shard file name → checksum, to notice a damaged one; empty in checkpoints of earlier releases.
    """

    format: int
    optimizer: bool
    files: dict[str, int]
    crc32: dict[str, int] = field(default_factory=dict)


AnyManifest = TypeVar("AnyManifest", bound=Manifest)


def take_state(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """The weights, and the state of the optimizer where one is given, as `write_state` takes them: not copies."""
    state: dict[str, Any] = {"model": saved_weights(module)}
    if optimizer is not None:
        state["optim"] = _optimizer_state(module, optimizer)
    return state


def write_state(folder: Path, state: dict[str, Any]) -> Manifest:
    """Writes what `take_state` took, or a copy of it, as shards; the folder is made when absent.

    With several processes every one must call this.

    Returns:
        What is to go into `foveal.json`, by `write_manifest` in one process.

    Raises:
        OSError: the disk refused (full, read-only, …).
    """
    sums = write_shards(folder, state)
    return Manifest(
        format=FORMAT,
        optimizer="optim" in state,
        files={name: found.size for name, found in sorted(sums.items())},
        crc32={name: found.crc32 for name, found in sorted(sums.items())},
    )


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
        manifest = kind(**{entry.name: content[entry.name] for entry in fields(kind) if not _may_lack(entry, content)})
        numbers = [manifest.format, *manifest.files.values(), *manifest.crc32.values()]
        if not all(isinstance(number, int) for number in numbers):
            raise TypeError("format, sizes and checksums are whole numbers")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}).") from error
    if manifest.format > FORMAT:
        raise CheckpointError(
            f"{path}: format {manifest.format} comes from a newer Foveal; this one reads up to {FORMAT}."
        )
    check_sizes(folder, manifest.files)
    return manifest


def _may_lack(entry: Field[Any], content: dict[str, Any]) -> bool:
    """Whether a checkpoint of an earlier release lacks an entry that has a default."""
    has_default = entry.default is not MISSING or entry.default_factory is not MISSING
    return entry.name not in content and has_default


def check_contents(folder: Path, manifest: Manifest) -> None:
    """Reads every shard file and compares it with the checksum noted for it, where there is one.

    With several processes every one must call this.

    Raises:
        CheckpointError: a file is damaged.
    """
    check_sums(folder, {name: FileSum(manifest.files[name], crc32) for name, crc32 in manifest.crc32.items()})


def load_state(folder: Path, manifest: Manifest, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Reads weights (cast to the module's own dtypes) and, when asked for, the optimizer's state, all in place.

    Args:
        optimizer: starts afresh, with a line that says so, where the folder holds weights only.

    Raises:
        CheckpointError: a damaged file, or the state of another module or optimizer.
    """
    check_contents(folder, manifest)
    reader = ShardReader(folder)
    state: dict[str, Any] = {"model": saved_weights(module)}
    check_names(folder, {name: entry.size for name, entry in weights_of(reader.index).items()}, state["model"])
    if optimizer is not None and not manifest.optimizer:
        console.note(f"{folder} holds weights only (trainer.save_model_only): the optimizer starts afresh")
        optimizer = None
    if optimizer is not None:
        state["optim"] = _optimizer_targets(reader.index, module, optimizer)
    reader.fill(state)
    if optimizer is not None:
        optimizer.state.clear()
        for name, parameter in module.named_parameters():
            if name in state["optim"]:
                optimizer.state[parameter] = state["optim"][name]


def saved_weights(module: nn.Module) -> dict[str, Any]:
    """What a checkpoint holds of the module's state: all of it; where there are adapters only these, and what else is
    trained (a value head)."""
    state = distinct_tensors(module)
    if not has_lora(module):
        return state
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {name: tensor for name, tensor in state.items() if is_factor(name) or name in trained}


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
    """Room for the saved state, of the type, device and sharding in which the optimizer itself would make it."""
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
    if entry.size == parameter.shape:  # in the weight's own type: fused kernels take no other
        return torch.empty_like(parameter, requires_grad=False)
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=parameter.device if entry.size else scalars)


def weights_of(index: Index) -> dict[str, TensorStorageMetadata]:
    """Module's name → what the shards say of the weight."""
    return {
        name.removeprefix("model."): entry
        for name, entry in index.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }


def check_names(folder: Path, saved: Mapping[str, tuple[int, ...]], weights: Mapping[str, torch.Tensor]) -> None:
    """Raises CheckpointError unless the checkpoint in `folder` holds exactly the weights that the model has.

    Args:
        saved: name → shape.
    """
    faults = _listing("weights are missing", weights.keys() - saved.keys())
    faults += _listing("weights are unknown to the model", saved.keys() - weights.keys())
    shapes = {name for name in weights.keys() & saved.keys() if saved[name] != weights[name].shape}
    faults += _listing("weights have another shape", shapes)
    if faults:
        raise CheckpointError(f"{folder}: the checkpoint does not fit this model: {'; '.join(faults)}.")


def _listing(fault: str, names: Iterable[str]) -> list[str]:
    listed = sorted(names)
    more = ", …" if len(listed) > 3 else ""
    return [f"{len(listed)} {fault} ({', '.join(listed[:3])}{more})"] if listed else []
