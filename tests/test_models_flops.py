"""The work of a pass: equal to hand arithmetic, and to PyTorch's counter where that sees every product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from foveal.models.attention import Segments
from foveal.models.flops import FlopCounter, Work, visible_pairs
from foveal.models.positions import prompt_positions
from tests.rollout_models import IMAGE, PATCH, VISION_END, VISION_START, tiny_model

CPU = torch.device("cpu")


def counted(run: Callable[[], None]) -> int:
    """Operations that PyTorch counts in `run`, without the outer product in which transformers 5.17 makes angles."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    counts = counter.get_flop_counts()
    angles = sum(sum(ops.values()) for name, ops in counts.items() if "rotary" in name.rpartition(".")[2])
    return counter.get_total_flops() - angles


def picture(family: str, height: int, width: int) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Ids of a prompt with one picture, and its features."""
    torch.manual_seed(0)
    features = {
        "pixel_values": torch.rand(height * width, 3 * 2 * PATCH[family] ** 2),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }
    return [7, VISION_START, *[IMAGE] * (height * width // 4), VISION_END, 9, 8], features


def run(model: Any, ids: list[int], features: dict[str, torch.Tensor], *, backward: bool) -> None:
    """One sequence, all of its tokens scored; packed as the trainer packs it."""
    positions = prompt_positions(model, ids, features)[:, :-1]
    logits = model(
        input_ids=torch.tensor([ids]),
        position_ids=positions if len(positions) == 1 else positions.unsqueeze(1),
        segments=Segments((len(ids),), (-1,), CPU),
        use_cache=False,
        **features,
    ).logits
    if backward:
        logits.sum().backward()


def work_of(ids: list[int], features: dict[str, torch.Tensor]) -> Work:
    # PyTorch sees the whole square of a causal product
    grids = features["image_grid_thw"].tolist() if features else []
    return Work(len(ids), len(ids) ** 2, len(ids), tuple((t, h, w) for t, h, w in grids))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl", "qwen3"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_pass_counts_what_pytorch_counts(family: str, frozen: bool) -> None:
    model: Any = tiny_model(family)
    ids, features = picture(family, 6, 4) if family != "qwen3" else ([7, 8, 9, 10], {})
    if frozen and family != "qwen3":
        model.model.visual.requires_grad_(False)
    counter = FlopCounter(model)
    work = work_of(ids, features)
    assert counter.forward(work) == counted(lambda: run(model, ids, features, backward=False))
    assert counter.training(work) == counted(lambda: run(model, ids, features, backward=True))


def dense() -> LlamaForCausalLM:
    sizes: dict[str, Any] = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


def test_a_dense_decoder_by_hand() -> None:
    layer = 8 * 8 + 8 * 4 * 2 + 8 * 8 + 3 * 8 * 12  # q, k and v, o, feed-forward
    forward = 2 * 2 * layer * 5 + 2 * 4 * 8 * 7 + 2 * 8 * 10 * 3
    counter = FlopCounter(dense())
    assert counter.forward(Work(tokens=5, pairs=7, scored=3)) == forward
    assert counter.training(Work(tokens=5, pairs=7, scored=3)) == 3 * forward


def test_experts_count_as_far_as_a_token_meets_them() -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 10,
        "hidden_size": 16,
        "intermediate_size": 16,
        "moe_intermediate_size": 8,
        "head_dim": 8,
    }
    heads: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=8, num_experts_per_tok=2))
    attention, router, experts = 16 * 16 * 2 + 2 * 16 * 8, 8 * 16, 2 * 3 * 16 * 8
    assert FlopCounter(model).forward(Work(tokens=1)) == 2 * (attention + router + experts)


def test_a_frozen_decoder_under_a_trained_head_passes_nothing_back() -> None:
    model = dense()
    model.model.requires_grad_(False)
    counter = FlopCounter(model)
    work = Work(tokens=5, pairs=7, scored=3)
    assert counter.training(work) - counter.forward(work) == 2 * 8 * 10 * 3


def test_windows_of_the_vision_tower_see_themselves_only() -> None:
    model: Any = tiny_model("qwen2_5_vl")  # windows of one merged cell in the first block, none in the second
    grid = (2, 6, 4)
    with_pairs = FlopCounter(model).forward(Work(grids=(grid,)))
    patches, merged = 2 * 6 * 4, 2 * 3 * 2
    tower = model.model.visual

    def weights(module: nn.Module) -> int:
        return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear | nn.Conv3d))

    linear = 2 * patches * (weights(tower.patch_embed) + weights(tower.blocks)) + 2 * merged * weights(tower.merger)
    window_pairs, pairs = merged * 4**2, 2 * 24**2
    assert with_pairs - linear == 4 * 32 * (window_pairs + pairs)


def test_pairs_of_a_shared_prompt() -> None:
    # a prompt of 3, two responses of 2 and 1 that see it, and a prompt of 2 alone
    segments = Segments((3, 2, 1, 2), (-1, 0, 0, -1), CPU)
    assert visible_pairs(segments) == 6 + (3 + 6) + (1 + 3) + 3


def test_work_adds_up() -> None:
    assert Work(1, 2, 3, ((1, 2, 2),)) + Work(10, 20, 30) == Work(11, 22, 33, ((1, 2, 2),))
