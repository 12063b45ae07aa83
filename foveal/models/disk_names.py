"""Which weight of a module a name in its model's files means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def names_in_module(model: Any) -> Callable[[str], tuple[str, str | None]]:
    """Gives what transformers' loading makes of names.

    Args:
        model: may be on the meta device.

    Returns:
        A function: name in the files → name in the module, and the pattern of the converter that makes the module's
        layout of it, None where both have the same layout. A name that the module has already stays.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    steps = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    state = model.state_dict(keep_vars=True)

    def in_module(name: str) -> tuple[str, str | None]:
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        return (name, None) if renamed not in state and name in state else (renamed, pattern)

    return in_module


def first_names(state: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """`id` of a tensor → the first of its names, under which tied weights are saved.

    Args:
        state: `model.state_dict(keep_vars=True)`.
    """
    names: dict[int, str] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), name)
    return names
