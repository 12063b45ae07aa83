"""Arithmetic of a training step, for model FLOPs utilisation (MFU)."""

from __future__ import annotations

from typing import Any

import torch

_PEAK_BF16 = {  # dense tensor-core peaks in FLOP/s, from the vendors' data sheets
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40": 181e12,
    "L20": 119e12,
    "4090": 165e12,
    "3090": 71e12,
}


def peak_flops(device: torch.device) -> float | None:
    """The device's peak rate for bf16 matrix products, or None where it isn't known (every CPU, for one)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in _PEAK_BF16.items() if key in name), None)


def training_flops(model: Any, tokens: int) -> float:
    """Forward and backward work of `tokens` tokens through the decoder: 6 × weights that a token meets × tokens.

    As EasyR1 counts it the tokens are those of all responses with their prompts, so work that a shared prompt saves
    shows as a higher rate. Attention scores and the vision tower are left out, and of a layer's experts those that a
    token isn't sent to.
    """
    config = model.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_experts", 1)
    tower = {p for name, module in model.named_modules() if name.endswith("visual") for p in module.parameters()}
    decoder = [(name, p) for name, p in model.named_parameters() if p not in tower]
    weights = sum(p.numel() * (chosen if ".experts." in name else 1.0) for name, p in decoder)
    return 6.0 * weights * tokens
