"""Positions of a prompt and of the tokens that follow it, computed once and used by engine and trainer alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

_IMAGE, _VIDEO = 1, 2


def has_mrope(model: nn.Module) -> bool:
    """Whether positions have three axes (time, height, width), as in the Qwen-VL families."""
    return hasattr(backbone(model), "get_rope_index")


def backbone(model: Any) -> Any:
    """The model without its language-model head (vision tower and decoder)."""
    return getattr(model, model.base_model_prefix)


def decoder_of(model: Any) -> Any:
    """The decoder without its language-model head, which VLMs nest in the backbone."""
    base = backbone(model)
    return getattr(base, "language_model", base)


@torch.no_grad()
def prompt_positions(
    model: nn.Module, expanded_ids: Sequence[int], features: Mapping[str, torch.Tensor] | None
) -> torch.Tensor:
    """Positions of a prompt of P tokens, and of the first response token after it.

    Args:
        model: a causal language model or a VLM with `get_rope_index`.
        expanded_ids: P token ids, one per visual feature.
        features: what the processor made of the media; only the grids matter here. None or empty for text.

    Returns:
        (A, P + 1) int64 on the CPU, A = 3 for M-RoPE models, else 1. The last column is the position of the first
        response token; the ones after it go up by one on every axis.
    """
    length = len(expanded_ids)
    features = features or {}
    if not has_mrope(model):
        return torch.arange(length + 1).unsqueeze(0)
    if not any(name.endswith("grid_thw") for name in features):
        return torch.arange(length + 1).expand(3, -1).clone()
    base = backbone(model)
    # A dummy text token after the prompt: its position is where a response starts, by the model's own rule.
    ids = torch.tensor([[*expanded_ids, 0]])
    kinds = torch.zeros_like(ids, dtype=torch.int32)
    kinds[ids == base.config.image_token_id] = _IMAGE
    kinds[ids == base.config.video_token_id] = _VIDEO
    kinds[0, -1] = 0
    grids = {
        name: features[name].cpu()
        for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        if name in features
    }
    positions, _ = base.get_rope_index(input_ids=ids, mm_token_type_ids=kinds, **grids)
    return positions[:, 0].to(torch.int64)
