"""Spreading a model's weights, gradients and optimizer states over processes (FSDP2, `torch.distributed.fsdp`).

Each decoder layer, each vision block and the token embedding are gathered when their turn comes; what is left (norm,
output layer, projector) stays gathered while the scorer around the model runs. What is not trained of a vision tower is
whole in every process: so its features can be kept, and a process without pictures needn't run it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from foveal.config.schema_model import FsdpConfig
from foveal.errors import ConfigError
from foveal.models.loading import DTYPES
from foveal.models.positions import decoder_of
from foveal.models.vision import vision_tower
from foveal.train.scorer import TokenScorer

WHOLE_SHARE = 0.15
"""Of a device's memory, that whole gradients may take to be sent less often (`fsdp.gradient_sync=auto`), and whole
weights (`fsdp.gather_weights=auto`)."""


def device_mesh(fsdp: FsdpConfig, device_type: str, section: str = "worker.actor.fsdp") -> DeviceMesh:
    """All processes of the group as (shard,), or as (replicate, shard) where fewer of them share a copy of the weights.

    With CPU offload on CUDA the group needs a backend for both kinds of tensors: "cpu:gloo,cuda:nccl".

    Raises:
        ConfigError: `fsdp_size` doesn't divide the number of processes.
    """
    world = dist.get_world_size()
    size = world if fsdp.fsdp_size == -1 else min(fsdp.fsdp_size, world)
    if world % size:
        raise ConfigError(
            f"{section}.fsdp_size: {size} given, but {world} devices do not fall into groups of {size}; "
            f"set it to a divisor of {world}, or to -1 for one group of all."
        )
    if size == world:
        return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (world // size, size), mesh_dim_names=("replicate", "shard"))


def mixed_precision(fsdp: FsdpConfig, device: torch.device) -> MixedPrecisionPolicy:
    """On CUDA weights are gathered in `mp_param_dtype` and gradients summed in `mp_reduce_dtype`, whatever the weights
    are held in; elsewhere all stays in the weights' own type.

    Inputs are not cast: what a model keeps in float32 beside its weights (the rotations of positions) must stay so.
    """
    if device.type != "cuda":
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[fsdp.mp_param_dtype],
        reduce_dtype=DTYPES[fsdp.mp_reduce_dtype],
        cast_forward_inputs=False,
    )


def shard(scorer: nn.Module, fsdp: FsdpConfig, mesh: DeviceMesh, precision: MixedPrecisionPolicy) -> None:
    """Shards a `TokenScorer` or `ValueScorer` in place, its model on the meta device or loaded.

    What is to be frozen must be so before. Gradients are summed over processes, not averaged: losses are already
    divided by the counts of all of them. Weights may be filled in later (`foveal.models.filling.fill_weights`); the
    optimizer must be built after that.

    Args:
        precision: from `mixed_precision`. The scorer is to have no autocast besides.
    """
    model = scorer.get_submodule("model")
    units = list(_units(model))
    whole = _whole(model, units)
    if precision.param_dtype is not None:
        for parameter in whole:
            parameter.data = parameter.data.to(precision.param_dtype)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if fsdp.enable_cpu_offload else OffloadPolicy()
    by_layer = not gathers_once(scorer, fsdp, torch.device(mesh.device_type))

    def spread(module: nn.Module, policy: MixedPrecisionPolicy, reshard_after_forward: bool | None) -> None:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=whole,
        )

    for module in units:
        spread(module, precision, by_layer)
    for child in scorer.children():
        if child is not model:  # a value head, which is held and computed in a type of its own
            spread(child, MixedPrecisionPolicy(cast_forward_inputs=False), by_layer)
    # The root stays gathered after its forward: the backward pass begins with it.
    spread(scorer, precision, None)
    if isinstance(scorer, TokenScorer):
        register_fsdp_forward_method(scorer, "head")
        register_fsdp_forward_method(scorer, "run")
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def sums_at_end(scorer: nn.Module, fsdp: FsdpConfig, precision: MixedPrecisionPolicy, device: torch.device) -> bool:
    """Whether gradients are summed over processes only after the last micro-batch of an optimizer step."""
    if fsdp.gradient_sync != "auto":
        return fsdp.gradient_sync == "last"
    if device.type != "cuda":
        return True
    needed = sum(
        parameter.numel() * (precision.reduce_dtype or parameter.dtype).itemsize
        for parameter in scorer.parameters()
        if parameter.requires_grad
    )
    return needed <= WHOLE_SHARE * torch.cuda.get_device_properties(device).total_memory


def gathers_once(scorer: nn.Module, fsdp: FsdpConfig, device: torch.device) -> bool:
    """Whether weights, once gathered, stay until the end of an optimizer step or of a pass without gradient."""
    if fsdp.gather_weights != "auto" or not fsdp.enable_full_shard:
        return fsdp.gather_weights == "step" or not fsdp.enable_full_shard
    if fsdp.enable_cpu_offload:  # the device has no room for its own share
        return False
    if device.type != "cuda":
        return True
    needed = sum(parameter.numel() for parameter in scorer.parameters()) * DTYPES[fsdp.mp_param_dtype].itemsize
    return needed <= WHOLE_SHARE * torch.cuda.get_device_properties(device).total_memory


def held_bytes(scorer: nn.Module, fsdp: FsdpConfig, *, gathers_once: bool, sums_at_end: bool) -> int:
    """Bytes of gathered weights, and of gradients before they are summed, that each process holds at the peak of an
    optimizer step on CUDA, besides its own shards."""
    model: Any = scorer.get_submodule("model")
    sizes = [sum(p.numel() for p in unit.parameters()) for unit in _units(model)]
    output = model.get_output_embeddings()
    largest = max([*sizes, output.weight.numel() if output is not None else 0])
    trained = sum(p.numel() for p in scorer.parameters() if p.requires_grad)
    # Layer by layer two are there at a time: one is computed while the next is gathered.
    weights = sum(p.numel() for p in scorer.parameters()) if gathers_once else 2 * largest
    gradients = trained if sums_at_end else min(largest, trained)
    return DTYPES[fsdp.mp_param_dtype].itemsize * weights + DTYPES[fsdp.mp_reduce_dtype].itemsize * gradients


def reshard(module: nn.Module) -> None:
    """Lets go of gathered weights that a pass leaves behind; does nothing where nothing is sharded."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def gather_all(scorer: nn.Module) -> None:
    """Each process holds all weights from now on, until `release_all`; all processes must call this."""
    for part in scorer.modules():
        if isinstance(part, FSDPModule):
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()


def release_all(scorer: nn.Module, fsdp: FsdpConfig, device: torch.device) -> None:
    """Ends what `gather_all` began, before the weights change.

    Args:
        fsdp, device: of the sharding, as of `gathers_once`.
    """
    by_layer = not gathers_once(scorer, fsdp, device)
    for part in scorer.modules():
        if isinstance(part, FSDPModule):
            part.set_reshard_after_forward(by_layer and part is not scorer, recurse=False)
    reshard(scorer)


def is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def whole_weights(model: nn.Module) -> set[nn.Parameter]:
    """The weights that `shard` leaves whole in every process."""
    return _whole(model, _units(model))


def _units(model: Any) -> list[nn.Module]:
    """What is gathered on its own: each decoder layer, and the vision tower at once, whose blocks are so small that the
    host would take longer to begin with them than the device to compute them."""
    tower = vision_tower(model)
    towers = [] if tower is None or not any(map(is_trained, tower.get_submodule("blocks").children())) else [tower]
    layers = list(decoder_of(model).layers)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    tied = output is not None and output.weight is embedding.weight
    return [*towers, *layers] if tied else [*towers, *layers, embedding]


def _whole(model: nn.Module, units: list[nn.Module]) -> set[nn.Parameter]:
    """The weights of the vision tower that stay whole."""
    tower = vision_tower(model)
    if tower is None:
        return set()
    spread = {parameter for module in units for parameter in module.parameters()}
    return {parameter for parameter in tower.parameters() if not parameter.requires_grad} - spread
