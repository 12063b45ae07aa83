"""Tiny random models of real classes, and prompts for them, for the rollout tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from foveal.models.attention import install
from foveal.models.positions import has_mrope, prompt_positions
from foveal.rollout.transformers_engine import TransformersEngine
from foveal.types import Prompt, Response

VOCAB = 64
PAD, EOS, VISION_START, VISION_END, IMAGE, VIDEO = 0, 1, 2, 3, 4, 5
FORBIDDEN = [VISION_START, VISION_END, IMAGE, VIDEO]
PATCH = {"qwen3_vl": 16, "qwen2_5_vl": 14, "qwen2_vl": 14}
_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.2,
}
_IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}


def tiny_model(family: str) -> nn.Module:
    """A float32 model of two decoder layers, with the trainer's attention installed, in eval mode."""
    torch.manual_seed(0)
    model: nn.Module
    vision: dict[str, Any]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "initializer_range": 0.2,
    }
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**_DECODER))
    elif family == "qwen3_vl":
        decoder = {**_DECODER, "rope_parameters": {**rope, "mrope_interleaved": True}}
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=decoder, vision_config=vision, **_IDS))
    elif family == "qwen2_5_vl":
        decoder = {**_DECODER, "rope_parameters": rope}
        vision |= {"fullatt_block_indexes": [1], "window_size": 28}
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=decoder, vision_config=vision, **_IDS))
    else:
        decoder = {**_DECODER, "rope_parameters": rope}
        vision = {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "initializer_range": 0.2}
        model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=decoder, vision_config=vision, **_IDS))
    install(model)
    return model.eval()


def tiny_engine(model: nn.Module, **options: Any) -> TransformersEngine:
    options = {"forbidden_ids": FORBIDDEN, "eos_ids": [EOS], "pad_id": PAD, **options}
    return TransformersEngine(model, lambda prompt: prompt.features or {}, **options)


def text_prompt(uid: str, length: int = 5) -> Prompt:
    return _prompt(uid, [10 + k % 40 for k in range(length)], {})


def image_prompt(uid: str, model: nn.Module, *grids: tuple[int, int], length: int = 3) -> Prompt:
    """A prompt with a random picture of each size (height and width in patches, even), then `length` text tokens."""
    config: Any = model.config
    size = 3 * 2 * PATCH[config.model_type] ** 2
    generator = torch.Generator().manual_seed(sum(map(ord, uid)))
    ids: list[int] = []
    for height, width in grids:
        ids += [6, VISION_START, *[IMAGE] * (height * width // 4), VISION_END]
    features = {
        "pixel_values": torch.randn(sum(h * w for h, w in grids), size, generator=generator),
        "image_grid_thw": torch.tensor([[1, h, w] for h, w in grids]),
    }
    return _prompt(uid, ids + [10 + k for k in range(length)], features)


def _prompt(uid: str, ids: list[int], features: dict[str, torch.Tensor]) -> Prompt:
    return Prompt(uid, [], ids, [], {}, 0, None, features)


@torch.no_grad()
def full_logprobs(model: nn.Module, prompt: Prompt, response: Response, temperature: float) -> torch.Tensor:
    """(L,) log-probabilities of a response by one plain forward over prompt and response, without a cache."""
    start, count = len(prompt.expanded_ids), len(response.token_ids)
    ids = torch.tensor([prompt.expanded_ids + response.token_ids.tolist()])
    places = prompt_positions(model, prompt.expanded_ids, prompt.features)
    positions = torch.cat([places[:, :-1], places[:, -1:] + torch.arange(count)], dim=1).unsqueeze(1)
    logits = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        position_ids=positions if has_mrope(model) else positions[0],
        use_cache=False,
        **(prompt.features or {}),
    ).logits[0, start - 1 : -1]
    logits[:, FORBIDDEN] = -torch.inf
    return (logits / temperature).log_softmax(-1).gather(-1, ids[0, start:, None])[:, 0]
