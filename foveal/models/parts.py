"""The parts of a vision-language model that may be frozen, or trained at a rate of their own."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import nn

from foveal.config.schema_model import ModelConfig

Part: TypeAlias = Literal["vision", "projector", "language"]


def part_of(name: str) -> Part:
    """The part that a parameter belongs to, by its dotted name.

    `projector` is what turns features of the tower into input of the decoder: `visual.merger` in the Qwen-VL families,
    with Qwen3-VL's deep-stack mergers. `language` is all the rest, the output layer (and a critic's head) included.
    """
    pieces = name.split(".")
    if "visual" not in pieces:
        return "language"
    return "projector" if any("merger" in piece for piece in pieces) else "vision"


def freeze_parts(model: nn.Module, config: ModelConfig) -> None:
    """Stops the training of what `freeze_vision_tower`, `freeze_projector` and `freeze_language_model` name."""
    frozen = config.frozen_parts
    for name, parameter in model.named_parameters():
        if part_of(name) in frozen:
            parameter.requires_grad_(False)
