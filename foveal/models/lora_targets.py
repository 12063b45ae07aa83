"""Which linear layers get adapters, by the rules and names of peft."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from foveal.config.schema_model import LoraConfig
from foveal.errors import ConfigError

ALL = "all-linear"


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer by its module path, with those that have an adapter already."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def choose_targets(model: Any, lora: LoraConfig, section: str) -> list[str]:
    """Module paths of the linear layers that `target_modules` and `exclude_modules` choose and that are trained.

    Raises:
        ConfigError: nothing is chosen, or what can't have an adapter.
    """
    layers = linear_layers(model)
    output = model.get_output_embeddings()
    key = f"{section}.lora.target_modules"
    named = lora.target_modules
    chosen = [name for name, layer in layers.items() if (layer is not output if named == ALL else matches(name, named))]
    for pattern in [named] if isinstance(named, str) else named:
        if pattern != ALL and not any(matches(name, named if pattern is named else [pattern]) for name in layers):
            fault = (
                "no linear layer has that name" if pattern is not named else "no linear layer's whole path matches it"
            )
            raise ConfigError(
                f"{key}: {pattern!r} given, but {fault}. There are: "
                f"{', '.join(sorted({_last(name) for name in layers}))}, as {next(iter(layers))}; or {ALL} for all but "
                "the output layer."
            )
    if lora.exclude_modules is not None:
        excluded = lora.exclude_modules
        chosen = [name for name in chosen if not matches(name, excluded)]
    chosen = [name for name in chosen if layers[name].weight.requires_grad]
    if not chosen:
        raise ConfigError(
            f"{key}: {named!r} given, but exclude_modules and frozen parts leave no layer of these; target others, or "
            "exclude or freeze less."
        )
    tied = output is not None and output.weight is model.get_input_embeddings().weight
    if tied and any(layers[name] is output for name in chosen):
        raise ConfigError(
            f"{key}: {named!r} given, but this model's output layer shares its weights with the token embedding, which "
            "has no adapter; leave the output layer out."
        )
    return chosen


def unused_exclusions(model: nn.Module, lora: LoraConfig) -> list[str]:
    """What `exclude_modules` names and no linear layer is."""
    excluded = [] if lora.exclude_modules is None else lora.exclude_modules
    layers = linear_layers(model)
    patterns: list[tuple[str, str | list[str]]] = (
        [(excluded, excluded)] if isinstance(excluded, str) else [(name, [name]) for name in excluded]
    )
    return [shown for shown, pattern in patterns if not any(matches(name, pattern) for name in layers)]


def matches(name: str, patterns: str | Collection[str]) -> bool:
    """Whether a module path is meant: by a regular expression for all of it, or a list of paths or ends of paths."""
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return name in patterns or any(name.endswith(f".{pattern}") for pattern in patterns)


def short_names(model: nn.Module, targets: Iterable[str]) -> list[str]:
    """A list for `target_modules` that chooses exactly these modules, by ends of their paths as short as may be."""
    chosen = set(targets)
    others = {end for name, _ in model.named_modules() if name not in chosen for end in _ends(name)}
    return sorted({next((end for end in _ends(name) if end not in others), name) for name in chosen})


def _ends(name: str) -> list[str]:
    """The ends of a path, the shortest first: c, b.c, a.b.c."""
    parts = name.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
