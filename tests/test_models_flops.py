"""The work of a training step that MFU is computed from."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from foveal.models.flops import training_flops
from foveal.models.loading import load_model
from foveal.quickstart.tiny import build_tiny


def test_a_dense_decoder_counts_all_its_weights_and_no_vision_tower(tmp_path: Path) -> None:
    model = load_model(str(build_tiny(tmp_path, "qwen3_vl")), dtype=torch.float32, device=torch.device("cpu"))
    decoder = sum(p.numel() for name, p in model.named_parameters() if ".visual." not in name)
    assert training_flops(model, 10) == 60 * decoder


def test_experts_count_as_far_as_a_token_meets_them() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "head_dim": 8}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=8, num_experts_per_tok=2))
    experts = 8 * 3 * 16 * 8
    total = sum(p.numel() for p in model.parameters())
    assert training_flops(model, 1) == 6 * (total - experts + experts / 4)
