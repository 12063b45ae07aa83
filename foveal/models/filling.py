"""Weights from safetensors files straight into the shards of a model on the meta device.

transformers' own loading does the work: it knows how each family's names and layouts on disk differ from the module's,
and of a sharded weight it reads only the rows (of fused experts, only the experts) that this process holds.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter, convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from foveal.errors import ModelError
from foveal.models.adapter_files import open_adapter
from foveal.models.families import is_absent
from foveal.models.loading import readable_weights, refuse_gaps
from foveal.models.lora import fill_adapters, is_factor
from foveal.models.transfer import local

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def fill_weights(
    model: Any,
    model_path: str,
    *,
    device: torch.device,
    offloaded: bool = False,
    adapter: str | None = None,
    section: str = "worker.actor.model",
) -> None:
    """Replaces the empty weights of `loading.empty_model`, sharded or not, by those of the files.

    Every process reads its own part by itself. Parameters become new objects: build the optimizer afterwards.

    Args:
        device: where the weights go.
        offloaded: shards go on to host memory; what isn't sharded stays.
        adapter: the folder or hub id that the model's adapters start from, if it has any; None for new ones.
        section: of the configuration that names the model, for messages.

    Raises:
        ModelError: weights that are absent, damaged, incomplete or of another shape.
    """
    tied = _tied_names(model)
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    mapping: list[Any] = get_model_conversion_mapping(model)
    for step in mapping:
        if isinstance(step, WeightConverter):
            step.operations = [_of_shards(operation) for operation in step.operations]
    config = LoadStateDictConfig(device_map={"": device}, dtype=model.dtype, weight_mapping=mapping)
    with readable_weights(model_path), ExitStack() as files:
        slices: dict[str, Any] = {}
        for path in weight_files(model_path):
            file = files.enter_context(safe_open(path, framework="pt"))
            slices |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
        report, _ = convert_and_load_state_dict_in_model(model, slices, config)
    missing = {name for name in report.missing_keys & trained.keys() if not is_factor(name)}
    refuse_gaps(model_path, missing, report.mismatched_keys, section)
    if report.conversion_errors:
        name, fault = next(iter(report.conversion_errors.items()))
        raise ModelError(f"{model_path}: {name} does not fit the model: {str(fault).strip().splitlines()[-1]}")
    for name, wanted in trained.items():
        model.get_parameter(name).requires_grad_(wanted)
    _tie(model, tied)
    fill_adapters(model, open_adapter(adapter, section).layers(model) if adapter else None, device)
    _fill_buffers(model, device)
    if offloaded:
        for name, parameter in list(model.named_parameters()):
            if isinstance(parameter, DTensor):
                _set(model, name, nn.Parameter(parameter.detach().cpu(), parameter.requires_grad))
        _tie(model, tied)


def make_room(model: Any, device: torch.device) -> None:
    """Gives an empty model, sharded or not, weights that mean nothing yet, and buffers that do."""
    tied = _tied_names(model)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            room: Any = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            room._is_hf_initialized = True  # transformers need not draw numbers for it
            _set(model, name, room)
    _tie(model, tied)
    _fill_buffers(model, device)


def _tie(model: nn.Module, tied: dict[str, str]) -> None:
    for alias, name in tied.items():
        _set(model, alias, model.get_parameter(name))


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, parameter)


class _TransposeShard(Transpose):
    """Sees by the shape of this process's shard whether a file has another layout than the module; transformers' own
    compares with the whole weight's, and so would turn every shard."""

    def convert(  # type: ignore[override]  # transformers' decorator hides the signature
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        [tensors] = input_dict.values()
        tensor: torch.Tensor = tensors[0] if isinstance(tensors, list) else tensors
        weight = kwargs["model"].get_parameter(kwargs["full_layer_name"])
        shard = local(weight)
        if tensor.shape != shard.shape:
            tensor = tensor.transpose(self.dim0, self.dim1).contiguous()
        return {self.get_target_pattern(input_dict, source_patterns, target_patterns): tensor}


def _of_shards(operation: Any) -> Any:
    checks = isinstance(operation, Transpose) and operation.check_dims
    return _TransposeShard(operation.dim0, operation.dim1, check_dims=True) if checks else operation


def weight_files(model_path: str) -> list[str]:
    from transformers.utils import cached_file

    if is_absent(model_path):
        raise ModelError(f"there is no folder {model_path!r}.")

    quiet: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    if one := cached_file(model_path, _ONE_FILE, **quiet):
        return [str(one)]
    index = cached_file(model_path, _INDEX, **quiet)
    if index is None:
        raise ModelError(
            f"{model_path}: neither {_ONE_FILE} nor {_INDEX} is there. Weights of other formats are read in one "
            "process only; save the model again with save_pretrained."
        )
    listed = json.loads(Path(str(index)).read_text(encoding="utf-8"))["weight_map"].values()
    return [str(cached_file(model_path, name)) for name in sorted(set(listed))]


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Other name of a weight → its first name."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    return {
        name: first[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first[parameter] != name
    }


def _fill_buffers(model: Any, device: torch.device) -> None:
    """Tables that are not in the files (the frequencies of rotary positions): each module computes its own."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=device))
    model.initialize_weights()  # leaves alone what has been loaded
