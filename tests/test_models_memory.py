"""The arithmetic of memory: by hand at a real size, and against what autograd keeps of tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLConfig

from foveal.models.attention import Segments
from foveal.models.loading import load_model
from foveal.models.memory import Pass, budget, decoder_block, forward_bytes, kept_by_layer, tower_block, training_bytes
from foveal.quickstart.tiny import Family, build_tiny

CPU = torch.device("cpu")


def seven_billion() -> Any:
    return Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
        vision_config={"hidden_size": 1280, "intermediate_size": 3420, "depth": 32, "num_heads": 16},
    )


def test_a_layer_of_seven_billion_by_hand() -> None:
    """Norms (float32 and normalised input), what they give; queries, result, keys, values; four tensors of the MLP."""
    layer = decoder_block(seven_billion())
    norms = 2 * (4 + 2) * 3584 + 2 * 2 * 3584
    attention = 2 * (2 * 3584 + 2 * 512)
    assert kept_by_layer(layer, Pass(2, 2)) == norms + attention + 2 * 4 * 18944
    # autocast: the float32 stream is cast for each of five products
    norms = 2 * (4 + 4) * 3584 + 5 * 2 * 3584
    assert kept_by_layer(layer, Pass(4, 2)) == norms + attention + 2 * 4 * 18944
    gathered = kept_by_layer(layer, Pass(2, 2, keys_per_token=3.0)) - kept_by_layer(layer, Pass(2, 2))
    assert gathered == 2 * 2 * 2 * 512


def test_what_checkpointing_leaves_by_hand() -> None:
    config = seven_billion()
    layer = kept_by_layer(decoder_block(config), Pass(2, 2))
    head = 2 * 2 * 3584

    def cost(**how: Any) -> float:
        return training_bytes(config, Pass(2, 2, **how), tower_trained=True)

    assert cost() == 28 * layer + 2 * layer + head
    assert cost(checkpointing=True) == 28 * 2 * 3584 + 2 * layer + head
    assert cost(checkpointing="selective") == 14 * layer + 14 * 2 * 3584 + 2 * layer + head
    assert cost(checkpointing=True, offload=True) == 2 * layer + head
    assert forward_bytes(config, Pass(2, 2)) == layer + 2 * 2 * 3584


def test_pictures_cost_four_patches_a_token_and_less_without_gradient() -> None:
    config = seven_billion()
    block = tower_block(config)
    assert block is not None
    patch = 2 * (4 + 2) * 1280 + 2 * 2 * 1280 + 2 * 4 * 1280 + 2 * 4 * 3420
    assert kept_by_layer(block, Pass(2, 2)) == patch
    text, half = Pass(2, 2), Pass(2, 2, visual=0.5)

    def extra(trained: bool) -> float:
        return training_bytes(config, half, tower_trained=trained) - training_bytes(config, text, tower_trained=trained)

    assert extra(True) == 0.5 * 4 * (32 + 2) * patch
    assert extra(False) == 0.5 * 4 * (patch + 2 * 1280)


def test_the_measured_peak_without_checkpointing_is_met() -> None:
    """Four groups of prompt 560 (384 visual) and five answers of 512 on an H200: 111 GiB with 8.29e9 weights."""
    tokens = 4 * 3120
    how = Pass(2, 2, keys_per_token=(560 + 5 * 1072) / 3120, visual=384 / 3120)
    peak = tokens * training_bytes(seven_billion(), how, tower_trained=True) + 2 * 8.29e9
    assert peak / 2**30 == pytest.approx(111, rel=0.1)


def test_the_budget_leaves_a_tenth_and_stays_within_its_bounds() -> None:
    assert budget(free=10_000 * 1000, per_token=1000, most=65_536) == 8960  # 9,000 in whole 256s
    assert budget(free=1e12, per_token=1, most=65_536) == 65_536
    assert budget(free=-1, per_token=1, most=65_536) == 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_autograd_keeps_of_a_layer_what_the_arithmetic_says(tmp_path: Path, family: Family, dtype: torch.dtype) -> None:
    model: Any = load_model(str(build_tiny(tmp_path, family)), dtype=dtype, device=CPU).train()
    tokens = 500
    layer = model.model.layers[1]
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] != (tokens, tokens):  # the mask of the reference attention
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def watched(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return type(layer).forward(layer, *args, **kwargs)

    layer.forward = watched
    model.model(
        inputs_embeds=torch.randn(1, tokens, model.config.hidden_size, dtype=dtype, requires_grad=True),
        position_ids=torch.arange(tokens)[None],
        use_cache=False,
        segments=Segments((tokens,), (-1,), CPU),
    )
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = sum(size for place, size in storages.items() if place not in weights) / tokens
    block = decoder_block(model.config)
    # The reference attention repeats keys and values for each query head, and copies its result.
    how = Pass(dtype.itemsize, dtype.itemsize, keys_per_token=block.queries / block.keys)
    rotations = 2 * dtype.itemsize * model.config.head_dim  # the same for all layers
    expected = kept_by_layer(block, how) + dtype.itemsize * block.queries + rotations
    assert kept == pytest.approx(expected, rel=0.02)
