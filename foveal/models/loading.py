"""Loading a Hugging Face model, whatever its family, ready for packed training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from foveal.errors import ModelError
from foveal.models.attention import install
from foveal.models.families import family_of, read_config
from foveal.models.positions import backbone

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_model(
    model_path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
) -> nn.Module:
    """Loads the weights of a supported family in `dtype` onto `device`, with the packed attention installed.

    Raises:
        ModelError: unsupported family, no weights, or an `override_config` key that the configuration lacks.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    family = family_of(read_config(model_path), model_path)
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    for key, value in (override_config or {}).items():
        if not hasattr(config, key):
            raise ModelError(
                f"worker.actor.model.override_config: {type(config).__name__} has no attribute {key!r}. "
                f"It has: {', '.join(sorted(k for k in config.to_dict() if not k.startswith('_')))}."
            )
        setattr(config, key, value)
    auto: Any = AutoModelForImageTextToText if family.vision else AutoModelForCausalLM
    try:
        model = auto.from_pretrained(
            model_path,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            attn_implementation="sdpa",
        )
    except OSError as error:
        raise ModelError(f"{model_path}: cannot load the weights: {str(error).splitlines()[0]}") from error
    install(model)
    model.to(device)
    return model


def freeze_vision_tower(model: nn.Module) -> None:
    """Stops training of the vision tower (for the Qwen families that includes the merger that feeds the decoder)."""
    tower = getattr(backbone(model), "visual", None)
    if tower is None:
        return
    tower.requires_grad_(False)
