"""Tiny models of every supported family, without tokenizers, and what `save_pretrained` makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from foveal.models.families import FAMILIES
from foveal.models.loading import load_model

_DECODER: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_EXPERTS: dict[str, Any] = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_TOWER: dict[str, Any] = {"depth": 2, "num_heads": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "num_heads": 2, "embed_dim": 32, "hidden_size": 64},
    "qwen2_5_vl": _TOWER | {"fullatt_block_indexes": [1]},
    "qwen3_vl": _TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": _TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}


def tiny_config(family: str, *, tie: bool = False) -> PreTrainedConfig:
    decoder = _DECODER | {"tie_word_embeddings": tie}
    if family.startswith("qwen3"):
        decoder["head_dim"] = 32
    if family.endswith("_moe"):
        decoder |= _EXPERTS
    if not FAMILIES[family].vision:
        return AutoConfig.for_model(family, **decoder)
    decoder["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
    return AutoConfig.for_model(
        family, text_config=decoder, vision_config=_TOWERS[family], tie_word_embeddings=tie, image_token_id=4
    )


def built(family: str, *, tie: bool = False) -> Any:
    """A float32 model made from its configuration alone, every weight random (norms and biases too)."""
    torch.manual_seed(0)
    auto: Any = AutoModelForImageTextToText if FAMILIES[family].vision else AutoModelForCausalLM
    model: nn.Module = auto.from_config(tiny_config(family, tie=tie))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def loaded(family: str, folder: Path, *, tie: bool = False, original_names: bool = True) -> Any:
    """The same weights, loaded as the trainer does, from files with the names of the hub or of the module."""
    built(family, tie=tie).save_pretrained(folder, save_original_format=original_names)
    return load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"))


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")
