"""Low-rank adapters (LoRA, Hu et al. 2021): layer(x) = W·x + alpha / rank · B·(A·x), where only A and B are trained.

A linear layer gets its adapter in place: it changes its class and gains two weights, `lora_A` and `lora_B`. Its module
path and the names of its own weights stay, so that loading, sharding, conversions and exports need not know of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import sqrt
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from foveal.config.schema_model import LoraConfig
from foveal.models.adapter_files import open_adapter, peft_config, tensor_name
from foveal.models.lora_targets import choose_targets, linear_layers, matches, short_names

Factors: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A (rank, in) and B (out, rank)."""

FACTORS = ("lora_A", "lora_B")


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. Made by `add_lora`, from a layer that is there already.

    Attributes:
        lora_A: (rank, in_features), lora_B: (out_features, rank); in float32, also beside bfloat16 weights.
        start_A, start_B: copies of both from when training began, where it began with an adapter; else None.
        alpha: as configured, and scaling: alpha / rank.
        at_start: compute as when training began.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    start_A: torch.Tensor | None
    start_B: torch.Tensor | None
    alpha: float
    scaling: float
    at_start: bool

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return add_product(F.linear(hidden, self.weight, self.bias), hidden, self.factors, self.scaling)

    @property
    def factors(self) -> Factors | None:
        """A and B that the layer computes with; None for none."""
        if not self.at_start:
            return self.lora_A, self.lora_B
        return None if self.start_A is None or self.start_B is None else (self.start_A, self.start_B)


def add_product(result: torch.Tensor, hidden: torch.Tensor, factors: Factors | None, scaling: float) -> torch.Tensor:
    """result + scaling · B·(A·hidden), in the type of `hidden`, or autocast's.

    Args:
        result: (…, out). hidden: (…, in). factors: A (rank, in) and B (out, rank); None adds nothing.
    """
    if factors is None:
        return result
    a, b = factors
    if not torch.is_autocast_enabled(hidden.device.type):
        a, b = a.to(hidden.dtype), b.to(hidden.dtype)
    inner = F.linear(hidden, a)
    return torch.addmm(result.flatten(0, -2), inner.flatten(0, -2), b.t(), alpha=scaling).view_as(result)


def add_lora(
    model: nn.Module, lora: LoraConfig, adapter: Path | str | None = None, *, section: str = "worker.actor.model"
) -> None:
    """Gives the targeted linear layers adapters and freezes all other weights; what the model computes stays the same,
    or becomes what `adapter` makes of it.

    What `freeze_parts` has frozen gets no adapter. On the meta device adapters are empty, for `fill_adapters`.

    Args:
        model: a transformers model, not sharded yet.
        adapter: a folder or hub id to start from: rank, alpha and targets are its own, and `without_adapter` gives the
            policy with this adapter as it is now. Its layers in frozen parts compute, and aren't trained.
        section: of the configuration, for messages.

    Raises:
        ConfigError: modules are targeted that are not there, or can't have an adapter.
        ModelError: the adapter can't be read, belongs to another model, or is of a kind that isn't supported.
    """
    if adapter is None:
        _inject(model, choose_targets(model, lora, section), lora.rank, lora.alpha)
        values = None
    else:
        opened = open_adapter(str(adapter), section)
        values = opened.layers(model)
        trained = [name for name, layer in linear_layers(model).items() if layer.weight.requires_grad]
        _inject(model, values, opened.rank, opened.alpha)
        for name in values.keys() - trained:
            model.get_submodule(name).requires_grad_(False)
    if not next(model.parameters()).is_meta:
        fill_adapters(model, values)


def restore_lora(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Gives a model new adapters in the layers that an `adapter_config` names, as `add_lora` does."""
    named = config["target_modules"]
    _inject(model, [name for name in linear_layers(model) if matches(name, named)], config["r"], config["lora_alpha"])
    if not next(model.parameters()).is_meta:
        fill_adapters(model)


def _inject(model: nn.Module, targets: Iterable[str], rank: int, alpha: float) -> None:
    model.requires_grad_(False)
    for name in targets:
        layer: Any = model.get_submodule(name)
        layer.__class__ = LoraLinear
        weight = layer.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        for factor, shape in zip(FACTORS, ((rank, layer.in_features), (layer.out_features, rank)), strict=True):
            layer.register_parameter(factor, nn.Parameter(torch.empty(shape, dtype=dtype, device=weight.device)))
        layer.register_buffer("start_A", None, persistent=False)
        layer.register_buffer("start_B", None, persistent=False)
        layer.alpha, layer.scaling = float(alpha), alpha / rank
        layer.at_start = False


@torch.no_grad()
def fill_adapters(
    model: nn.Module,
    values: Mapping[str, Factors] | None = None,
    device: torch.device | None = None,
    *,
    start: bool = True,
) -> None:
    """Sets all adapters, sharded or not.

    Args:
        values: by module path. None for new ones: B zero, and A uniform within 1 / √in as in peft, by random numbers
            that depend on the layer's path alone, so that all processes draw the same.
        device: where adapters on the meta device go.
        start: given values are what training starts from.
    """
    for name, layer in lora_layers(model).items():
        factors = _new_factors(name, layer) if values is None else values[name]
        for attribute, value in zip(FACTORS, factors, strict=True):
            parameter = getattr(layer, attribute)
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                setattr(layer, attribute, parameter)
            _set(parameter, value)
            if values is not None and start:
                kept = value.to(device or parameter.device, parameter.dtype, copy=True)
                setattr(layer, attribute.replace("lora", "start"), kept)


def _new_factors(name: str, layer: LoraLinear) -> Factors:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    bound = 1 / sqrt(layer.in_features)
    a = torch.empty(layer.lora_A.shape, device="cpu").uniform_(-bound, bound, generator=generator)
    return a, torch.zeros(layer.lora_B.shape, device="cpu")


def _set(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Copies a whole weight into a parameter, or into this process's shard of it."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(value)
        return
    mesh = parameter.device_mesh
    spread = distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(spread.to_local())


def lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers with an adapter, by module path."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def has_lora(model: nn.Module) -> bool:
    return any(isinstance(module, LoraLinear) for module in model.modules())


def is_factor(name: str) -> bool:
    """Whether a weight, by its name in the module, belongs to an adapter."""
    return name.endswith(FACTORS)


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """The model computes as when training began: without adapters, or with those that it started from.

    Not for passes with gradient: what checkpointing computes again would be another model's.
    """
    layers = lora_layers(model).values()
    for layer in layers:
        layer.at_start = True
    try:
        yield
    finally:
        for layer in layers:
            layer.at_start = False


def computes_as_at_start(model: nn.Module) -> bool:
    """Whether this is within `without_adapter`."""
    return any(isinstance(module, LoraLinear) and module.at_start for module in model.modules())


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All adapters under the names that peft writes into adapter_model.safetensors, whole and detached.

    Of a sharded model every process must ask; tensors that aren't sharded share memory with the parameters.
    """
    return {
        tensor_name(name, attribute): whole(getattr(layer, attribute))
        for name, layer in lora_layers(model).items()
        for attribute in FACTORS
    }


def adapter_config(model: Any) -> dict[str, Any]:
    """The content of peft's adapter_config.json for the model's adapters."""
    layers = lora_layers(model)
    first = next(iter(layers.values()))
    base = getattr(model.config, "name_or_path", None) or None
    alpha = int(first.alpha) if first.alpha.is_integer() else first.alpha
    return peft_config(base, first.lora_A.shape[0], alpha, short_names(model, layers))


def merged(weight: torch.Tensor, factors: Factors, scaling: float, dtype: torch.dtype) -> torch.Tensor:
    """W + scaling · B·A, computed in float32 (float64 for such weights) and rounded once, to `dtype`."""
    exact = torch.promote_types(weight.dtype, torch.float32)
    a, b = (factor.to(weight.device, exact) for factor in factors)
    return torch.addmm(weight.to(exact), b, a, alpha=scaling).to(dtype)


@torch.no_grad()
def surviving_share(model: nn.Module, dtype: torch.dtype) -> float:
    """How much of the adapters is left when they are merged into weights of `dtype`: the change of the rounded weights,
    projected on the exact change, over its length. 1 for adapters that change nothing yet.

    Of a sharded model every process must ask.
    """
    along = total = 0.0
    for layer in lora_layers(model).values():
        weight, factors = whole(layer.weight), (whole(layer.lora_A), whole(layer.lora_B))
        change = merged(torch.zeros_like(weight), factors, layer.scaling, torch.float32)
        rounded = merged(weight, factors, layer.scaling, dtype).float() - weight.to(dtype).float()
        along += float((rounded * change).sum(dtype=torch.float64))
        total += float(change.square().sum(dtype=torch.float64))
    return along / total if total else 1.0


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without gradient, gathered on the device where it is spread over processes."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        on_device: Any = tensor.to(tensor.device_mesh.device_type)
        gathered: torch.Tensor = on_device.full_tensor()
        return gathered
    return tensor
