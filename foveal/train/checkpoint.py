"""The folder of a trained model inside a checkpoint: DCP shards, and what a Hugging Face folder needs besides.

actor/.metadata, *.distcp   "model.NAME" → weights, each tied tensor once; "optim.NAME.KEY" → optimizer state
actor/foveal.json           ActorInfo
actor/huggingface/          config.json and generation_config.json of the source model, tokenizer, processor
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from foveal.errors import CheckpointError
from foveal.track import console
from foveal.train.files import write_json
from foveal.train.shards import Index, check_sizes, read_index, read_shards, shard_sizes, write_shards

FORMAT = 1
INFO = "foveal.json"
HUGGINGFACE = "huggingface"


@dataclass(frozen=True)
class ActorInfo:
    """What `foveal.json` says.

    Attributes:
        format: version of this layout.
        model_class: name of the class in transformers, as "Qwen3VLForConditionalGeneration".
        source: the folder or hub id that training started from.
        source_dtype: in which the source model's weights are stored, as "bfloat16": the dtype of an export.
        tied_weights: whether some weights go by two names (usually output head and token embedding).
        optimizer: whether the optimizer's state is here too.
        files: shard file name → size in bytes, to notice a cut or missing file.
    """

    format: int
    model_class: str
    source: str
    source_dtype: str
    tied_weights: bool
    optimizer: bool
    files: dict[str, int]


def save_actor(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    source_path: str,
    save_processing: Callable[[Path], None],
    override_config: dict[str, Any] | None = None,
) -> None:
    """Writes the weights, the optimizer's state and the configuration files of a model into `folder`.

    With a process group every process must call this.

    Args:
        folder: made when absent.
        optimizer: None leaves its state out (`trainer.save_model_only`).
        source_path: the folder or hub id that `model` was loaded from.
        save_processing: writes tokenizer, processor and chat template into the folder it is given.
        override_config: top-level keys of config.json that were changed when the model was loaded.

    Raises:
        OSError: the disk refused (full, read-only, …).
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = distinct_tensors(model)
    state: dict[str, Any] = {"model": weights}
    if optimizer is not None:
        state["optim"] = _optimizer_state(model, optimizer)
    write_shards(folder, state)
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    hf_folder = folder / HUGGINGFACE
    hf_folder.mkdir(exist_ok=True)
    save_processing(hf_folder)
    _copy_configuration(source_path, hf_folder, override_config or {})
    info = ActorInfo(
        format=FORMAT,
        model_class=type(model).__name__.removeprefix("FSDP"),
        source=source_path,
        source_dtype=_source_dtype(source_path),
        tied_weights=len(weights) < len(model.state_dict()),
        optimizer=optimizer is not None,
        files=shard_sizes(folder),
    )
    write_json(folder / INFO, asdict(info))


def load_actor(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Reads weights (cast to the model's own dtype) and, when asked for, the optimizer's state, all in place.

    Args:
        folder: an actor folder or the `global_step_N` folder around it.
        optimizer: starts afresh, with a line that says so, where the checkpoint holds weights only.

    Raises:
        CheckpointError: a file is missing or cut, or the checkpoint belongs to another model or optimizer.
    """
    folder = actor_folder(folder)
    info = check_actor(folder)
    index = read_index(folder)
    state: dict[str, Any] = {"model": distinct_tensors(model)}
    _check_names(folder, index, state["model"])
    if optimizer is not None and not info.optimizer:
        console.note(f"{folder} holds weights only (trainer.save_model_only): the optimizer starts afresh")
        optimizer = None
    if optimizer is not None:
        state["optim"] = _optimizer_targets(index, model, optimizer)
    read_shards(folder, state)
    if optimizer is not None:
        optimizer.state.clear()
        for name, parameter in model.named_parameters():
            if name in state["optim"]:
                optimizer.state[parameter] = state["optim"][name]


def load_trained(folder: Path, *, dtype: torch.dtype, attn_implementation: str = "sdpa") -> nn.Module:
    """Builds the model of a checkpoint on the CPU with its trained weights, cast once to `dtype`, in eval mode.

    Only the checkpoint is read: the model that training started from need not exist any more.

    Raises:
        CheckpointError: as `load_actor`, or a missing or unknown config.json.
    """
    import transformers
    from transformers.initialization import no_init_weights

    folder = actor_folder(folder)
    info = check_actor(folder)
    model_class = getattr(transformers, info.model_class, None)
    if model_class is None:
        raise CheckpointError(f"{folder}: transformers {transformers.__version__} has no {info.model_class}.")
    path = folder / HUGGINGFACE / "config.json"
    try:
        # by its own name: `from_pretrained` takes a default configuration where this file is missing
        config = model_class.config_class.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot read the model's configuration ({error}).") from error
    with no_init_weights():
        model = model_class._from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    model.tie_weights()
    load_actor(folder, model, None)
    return model.eval()


def actor_folder(folder: Path) -> Path:
    """Accepts `…/global_step_N/actor` and `…/global_step_N`."""
    return folder / "actor" if (folder / "actor").is_dir() else folder


def check_actor(folder: Path) -> ActorInfo:
    """Reads foveal.json and compares every shard file with the size noted there.

    Raises:
        CheckpointError: not an actor folder, written by a newer Foveal, or a file is missing or cut.
    """
    path = folder / INFO
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: {folder} is not an actor folder of a checkpoint, or its writing was cut short. "
            "Give …/global_step_N/actor."
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        info = ActorInfo(**{field.name: content[field.name] for field in fields(ActorInfo)})
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}).") from error
    if info.format > FORMAT:
        raise CheckpointError(f"{path}: format {info.format} comes from a newer Foveal; this one reads up to {FORMAT}.")
    check_sizes(folder, info.files)
    return info


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
                targets[name] = {key: _room(entry, parameter, scalars) for key, entry in saved[name].items()}
    return targets


def _room(entry: Any, parameter: nn.Parameter, scalars: torch.device) -> torch.Tensor | None:
    if not isinstance(entry, TensorStorageMetadata):
        return None  # a plain value, which reading replaces
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


def _copy_configuration(source: str, target: Path, overrides: dict[str, Any]) -> None:
    """Copies config.json and, where there is one, generation_config.json."""
    from transformers.utils import cached_file

    shutil.copyfile(_required_file(source, "config.json"), target / "config.json")
    generation = cached_file(
        source,
        "generation_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if generation is not None:
        shutil.copyfile(generation, target / "generation_config.json")
    if overrides:
        path = target / "config.json"
        write_json(path, json.loads(path.read_text(encoding="utf-8")) | overrides)


def _source_dtype(source: str) -> str:
    """The dtype of the source model's weights, as "bfloat16": what config.json says, else what its first weight is."""
    from safetensors import safe_open
    from transformers.utils import cached_file

    config = json.loads(_required_file(source, "config.json").read_text(encoding="utf-8"))
    for place in (config, config.get("text_config", {})):
        for key in ("dtype", "torch_dtype"):
            if isinstance(place.get(key), str):
                return str(place[key]).removeprefix("torch.")
    found = cached_file(source, "model.safetensors", _raise_exceptions_for_missing_entries=False)
    if found is None:
        index = _required_file(source, "model.safetensors.index.json").read_text(encoding="utf-8")
        found = str(_required_file(source, next(iter(json.loads(index)["weight_map"].values()))))
    with safe_open(found, framework="pt") as weights:
        return str(weights.get_tensor(next(iter(weights.keys()))).dtype).removeprefix("torch.")


def _required_file(source: str, name: str) -> Path:
    from transformers.utils import cached_file

    return Path(str(cached_file(source, name)))
