"""A module's weights under the names and layouts of its files on disk, some at a time.

In transformers 5 a module's own names and layouts differ from those that `save_pretrained` writes: prefixes of
vision-language models, experts of a layer fused into one tensor. `revert_weight_conversion` there turns the whole state
back at once; here the same conversions run on one group of tensors at a time, so that no second copy of the model
ever exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from foveal.errors import ModelError
from foveal.models.disk_names import first_names
from foveal.models.lora import is_factor, lora_layers, merged, whole


def named_tensors(
    model: nn.Module, dtype: torch.dtype | None = None, bucket_bytes: int = 512 << 20, *, merge: bool = True
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Full weights under the names and layouts that `model.save_pretrained` writes, in buckets.

    Tied weights come once, non-persistent buffers not at all. Tensors are detached, stay on the parameters' device,
    and share memory with the parameters unless a cast, a conversion or a gather made them: use them before the next
    optimizer step, and don't write to them. Of the tensors that were made, one bucket and one conversion group (at
    most the experts of a layer) exist at a time, besides the bucket that the caller still holds.

    With FSDP2 every process must go through all buckets, as each weight is gathered when its turn comes.

    Args:
        model: a transformers model; its parameters may be DTensors.
        dtype: to which floating tensors are cast, before they are gathered and converted; None leaves them.
        bucket_bytes: the most that the tensors of a bucket take together; a larger tensor is a bucket alone.
        merge: adapters are added to the weights, in float32, before these are cast; otherwise they are left out.

    Raises:
        ModelError: a sharded model whose conversions are no longer known.
    """
    state = _distinct_state(model)
    adapted = {f"{path}.weight": layer for path, layer in lora_layers(model).items()} if merge else {}

    def read(name: str) -> torch.Tensor:
        layer = adapted.get(name)
        if layer is None:
            return _full(state[name], dtype)
        weight, factors = whole(state[name]), (whole(layer.lora_A), whole(layer.lora_B))
        return merged(weight, factors, layer.scaling, dtype or weight.dtype)

    yield from in_buckets(saved_tensors(model, state, read), bucket_bytes)


def saved_tensors(
    model: nn.Module, names: Iterable[str], read: Callable[[str], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """As `named_tensors`, one by one, of weights that need not be in the model, which may lie on the meta device.

    Args:
        names: of the weights in the module; a tied weight's first name only.
        read: module's name → full weight.
    """
    for target, group in _groups(model, names).items():
        tensors = [read(name) for name, _ in group.sources]
        if group.converter is None:
            yield target, tensors[0]
        else:
            yield from _convert(model, target, group, tensors)


def in_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = 512 << 20
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Gathers tensors into lists of at most `bucket_bytes`; a larger tensor is a list alone."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


@dataclass
class _Group:
    """Weights of the module that become weights on disk together.

    Attributes:
        converter: the transformers `WeightConverter` to run, from the module's layout to the disk's; None where one
            weight only gets another name.
        sources: (name in the module, the converter's pattern that it matched), in the order the converter wants.
    """

    converter: Any
    sources: list[tuple[str, str | None]] = field(default_factory=list)


def _distinct_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The module's persistent state without adapters; a tied weight under its first name, which is the one that is
    saved."""
    # FSDP2 puts back the shards that a forward left gathered when the state is asked for; `parameters()` does not.
    state = model.state_dict(keep_vars=True)
    return {name: state[name].detach() for name in first_names(state).values() if not is_factor(name)}


def _groups(model: nn.Module, names: Iterable[str]) -> dict[str, _Group]:
    """First name on disk → group, for all names; follows `revert_weight_conversion` of transformers 5.16 to 5.19."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = _conversions_to_disk(model)
    renamings = [step for step in conversions if isinstance(step, WeightRenaming)]
    converters = [step for step in conversions if isinstance(step, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups: dict[str, _Group] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, reverse=True)
        group = groups.setdefault(target, _Group(None if pattern is None else converter_of[pattern]))
        group.sources.append((name, pattern))
    return groups


def _conversions_to_disk(model: nn.Module) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    # `from_pretrained` notes what it did to the files' weights.
    conversions: list[Any] | None = getattr(model, "_weight_conversions", None)
    if conversions is None:
        if isinstance(model, FSDPModule):  # renames the class, by which transformers finds the conversions
            raise ModelError(
                f"{type(model).__name__} was sharded without having been loaded, so the names of its weights on disk "
                "are unknown. Load the model with from_pretrained (foveal.models.loading.load_model), then shard it."
            )
        # Whether the files of a model built from its configuration would have the prefix is unknown: none is assumed.
        known = get_model_conversion_mapping(model, add_legacy=False)  # type: ignore[arg-type]
        conversions = [step for step in known if not isinstance(step, PrefixChange)]
    return [step.reverse_transform() for step in reversed(conversions)]


def _full(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return whole(tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype))


def _convert(
    model: nn.Module, target: str, group: _Group, tensors: list[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    converter = deepcopy(group.converter)  # it collects tensors, and serves every layer
    for (name, pattern), tensor in zip(group.sources, tensors, strict=True):
        converter.add_tensor(target, name, pattern, tensor)
    for name, converted in converter.convert(target, model=model, config=model.config).items():
        yield name, converted[0] if isinstance(converted, list) else converted
