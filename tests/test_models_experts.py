"""Grouped experts compute what transformers' loop over experts computes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from foveal.models.attention import install
from foveal.models.experts import NAME, install_experts
from foveal.models.named_tensors import named_tensors
from foveal.train.layout import PromptLayouts
from foveal.train.scorer import TokenScorer
from foveal.train.scoring import Packer
from foveal.types import Group, Prompt, Response
from tests.rollout_models import IMAGE, VIDEO, VISION_END, VISION_START, tiny_model

CPU = torch.device("cpu")
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": 0.3,
    "output_router_logits": True,
}


def build(family: str) -> Any:
    """A tiny model whose experts run one after the other, as in transformers."""
    torch.manual_seed(0)
    model: Any
    if family == "qwen3_moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**TEXT))
    else:
        rope: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        }
        vision: dict[str, Any] = {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 32,
        }
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
        ids: dict[str, Any] = {"image_token_id": IMAGE, "video_token_id": VIDEO}
        ids |= {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
        text = {**TEXT, "rope_parameters": rope}
        model = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision, **ids))
    install(model)
    model.set_experts_implementation("eager")
    return model.eval()


def group(family: str) -> Group:
    torch.manual_seed(1)
    features: dict[str, torch.Tensor] = {}
    ids = [7, 9, 8, 11]
    if family == "qwen3_vl_moe":
        ids = [7, VISION_START, *[IMAGE] * 4, VISION_END, 9]
        features = {"pixel_values": torch.rand(16, 3 * 2 * 16**2), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    answers = [Response(np.arange(10, 10 + n), np.zeros(n, np.float32), "stop") for n in (5, 3)]
    return Group(Prompt("train-0-0", ids, ids, [], {}, 0, "", features), answers)


def pass_over(model: Any, family: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of a packed group with a shared prompt, and all gradients."""
    layouts = PromptLayouts(model, lambda prompt: prompt.features or {})
    packer = Packer(budget=1000, shared_prefix=True, layouts=layouts, device=CPU)
    (pack,) = packer.packs([group(family)])
    logprobs = TokenScorer(model, forbidden_ids=[], temperature=1.0, autocast=None)(pack).logprobs
    model.zero_grad()
    logprobs.sum().backward()
    return logprobs.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def grouped(model: Any) -> Any:
    other = copy.deepcopy(model)
    install_experts(other)
    return other


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
def test_grouped_experts_equal_the_loop_over_experts(family: str) -> None:
    model = build(family).double()
    ours = grouped(model)
    expected, gradients = pass_over(model, family)
    found, our_gradients = pass_over(ours, family)
    assert ours.config.get_text_config()._experts_implementation == NAME
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)  # the head computes in float32
    for name, gradient in gradients.items():
        assert (our_gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.fixture
def layer() -> nn.Module:
    """Six experts of one layer."""
    return build("qwen3_moe").model.layers[0].mlp.experts


def routed(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, each with two of the experts 0, 2, 3 and 5: the others get none."""
    torch.manual_seed(2)
    hidden, weights = torch.randn(tokens, 32), torch.rand(tokens, 2)
    chosen = torch.tensor([0, 2, 3, 5])[torch.rand(tokens, 4).argsort(1)[:, :2]]
    return hidden.to(dtype).requires_grad_(), chosen, weights.to(dtype).requires_grad_()


def outcome(layer: Any, implementation: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and all gradients of the experts alone."""
    layer.config._experts_implementation = implementation
    hidden, chosen, weights = routed(20, dtype)
    output = layer(hidden, chosen, weights)
    target = torch.linspace(-1, 1, output.numel(), dtype=dtype).view_as(output)
    inputs = [hidden, weights, layer.gate_up_proj, layer.down_proj]
    return [output.detach(), *torch.autograd.grad((output * target).sum(), inputs)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_experts_without_tokens_are_passed_over(layer: Any, dtype: torch.dtype, tolerance: float) -> None:
    layer.to(dtype)
    grouped(build("qwen3_moe"))  # registers the function
    expected, found = (outcome(layer, name, dtype) for name in ("eager", NAME))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


def test_the_kernel_for_16_bits_agrees_with_float32(layer: Any) -> None:
    grouped(build("qwen3_moe"))
    exact = outcome(layer, NAME, torch.float32)
    rough = outcome(layer.to(torch.bfloat16), NAME, torch.bfloat16)
    for ours, theirs in zip(rough, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - theirs).norm() <= 0.02 * theirs.norm()


def test_autocast_reaches_the_experts(layer: Any) -> None:
    grouped(build("qwen3_moe"))
    layer.config._experts_implementation = NAME
    hidden, chosen, weights = routed(20, torch.float32)
    exact = layer(hidden, chosen, weights)
    with torch.autocast("cpu", torch.bfloat16):
        rough = layer(hidden, chosen, weights)
    error = (rough - exact).norm() / exact.norm()
    assert rough.dtype == torch.float32 and 1e-4 < error < 0.02
    rough.sum().backward()
    assert layer.down_proj.grad.dtype == torch.float32


def test_weights_keep_their_names_on_disk() -> None:
    model = build("qwen3_moe")
    names = [[name for bucket in named_tensors(m) for name, _ in bucket] for m in (model, grouped(model))]
    assert names[0] == names[1] and any("experts.5.down_proj" in name for name in names[0])


def test_router_logits_are_not_collected() -> None:
    ours = grouped(build("qwen3_moe"))
    output = ours.model(torch.tensor([[7, 8, 9]]), use_cache=False)
    assert getattr(output, "router_logits", None) is None


def test_a_dense_model_is_left_alone() -> None:
    model: Any = tiny_model("qwen3")
    before = model.config._experts_implementation
    install_experts(model)
    assert model.config._experts_implementation == before
