"""Tiny models with adapters that change something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from foveal.config.schema_model import LoraConfig, ModelConfig
from foveal.models.loading import load_model
from foveal.models.lora import adapter_config, adapter_tensors, add_lora, fill_adapters, lora_layers, whole
from foveal.models.parts import freeze_parts
from foveal.train.files import write_json

CPU = torch.device("cpu")


def adapted(folder: Path, dtype: torch.dtype = torch.float32, *, frozen: bool = False, **keys: Any) -> Any:
    """A model with adapters of rank 4 whose B are no longer zero."""
    model: Any = load_model(str(folder), dtype=dtype, device=CPU)
    freeze_parts(model, ModelConfig(freeze_vision_tower=frozen))
    add_lora(model, LoraConfig(**{"rank": 4, "alpha": 8, **keys}))
    shake(model)
    return model.eval()


def shake(model: nn.Module, size: float = 0.1) -> None:
    """Sets every B, sharded or not, to random numbers of this size, those of a layer's name."""
    factors = {}
    for name, layer in lora_layers(model).items():
        generator = torch.Generator().manual_seed(len(name))
        factors[name] = (whole(layer.lora_A), size * torch.randn(layer.lora_B.shape, generator=generator))
    fill_adapters(model, factors, start=False)


def write_adapter(model: Any, folder: Path, base: Path | str = "", **changes: Any) -> Path:
    """The model's adapters as peft would save them."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "adapter_config.json", adapter_config(model) | {"base_model_name_or_path": str(base)} | changes)
    save_file({n: t.contiguous() for n, t in adapter_tensors(model).items()}, folder / "adapter_model.safetensors")
    return folder
