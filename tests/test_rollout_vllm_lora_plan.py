"""Which adapters vLLM is started for, and with which arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from foveal.config.schema_model import LoraConfig, ModelConfig
from foveal.quickstart.tiny import Family, build_tiny
from foveal.rollout.vllm_lora import AdapterShape, plan_adapter

DECODER = "model.language_model.layers.0.self_attn.q_proj"


def shape(*modules: str, rank: int = 8) -> AdapterShape:
    return AdapterShape(rank, frozenset(modules))


@pytest.mark.parametrize(
    ("model_type", "module"),
    [
        ("qwen3", "lm_head"),
        ("qwen3_vl_moe", "model.language_model.layers.0.mlp.experts.0.gate_proj"),
        ("qwen3_vl_moe", "model.language_model.layers.0.mlp.gate"),
        ("qwen2_5_vl", "model.visual.patch_embed.proj"),
        ("another", "model.layers.0.self_attn.q_proj"),
    ],
)
def test_modules_that_vllm_cannot_do_are_named(model_type: str, module: str) -> None:
    assert shape(module).obstacle(model_type) == f"vLLM applies none to {module}"


def test_a_rank_beyond_vllms_is_an_obstacle() -> None:
    assert shape(DECODER, rank=512).obstacle("qwen3_vl") is None
    assert "its rank is 513" in str(shape(DECODER, rank=513).obstacle("qwen3_vl"))


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (64, 64), (65, 128), (257, 320)])
def test_the_room_is_the_next_size_that_vllm_has(rank: int, room: int) -> None:
    assert shape(DECODER, rank=rank).arguments("cuda")["max_lora_rank"] == room


def test_only_modules_with_an_adapter_get_room_for_one() -> None:
    layer = "model.language_model.layers.3"
    arguments = shape(f"{layer}.self_attn.k_proj", f"{layer}.mlp.up_proj", f"{layer}.mlp.down_proj").arguments("cuda")
    path = "language_model.model.layers.3"
    wanted = [f"{path}.mlp.down_proj", f"{path}.mlp.gate_up_proj", f"{path}.self_attn.qkv_proj"]
    assert arguments["lora_target_modules"] == wanted
    assert "enable_tower_connector_lora" not in arguments


def test_the_tower_gets_room_where_the_adapter_is_in_it() -> None:
    arguments = shape("model.visual.merger.mlp.0").arguments("cuda")
    assert arguments["enable_tower_connector_lora"]
    assert arguments["lora_target_modules"] == ["visual.merger.mlp.0"]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3", "llama"])
def test_all_linear_layers_but_the_output_are_planned(tmp_path: Path, family: Family) -> None:
    build_tiny(tmp_path, family)
    plan = plan_adapter(ModelConfig(lora=LoraConfig(rank=4)), str(tmp_path))
    assert plan is not None and plan.rank == 4
    assert any(".visual." in module for module in plan.modules) == ("vl" in family)


def test_without_a_rank_nothing_is_planned(tmp_path: Path) -> None:
    assert plan_adapter(ModelConfig(), str(tmp_path)) is None
