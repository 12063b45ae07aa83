"""Checkpoints that EasyR1's code wrote (tests/fixtures/make_easyr1_checkpoints.py) become models, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from foveal.cli import main
from foveal.errors import CheckpointError
from foveal.train.easyr1_export import export_easyr1, export_easyr1_adapter
from tests.easyr1_support import copied
from tests.fixtures.easyr1_rule import rule

ALPHA, RANK = 8, 4


def load(folder: Path) -> dict[str, torch.Tensor]:
    """The weights as transformers loads them: none missing, none left over."""
    auto = AutoModelForImageTextToText if "vision_config" in (folder / "config.json").read_text() else None
    model, report = (auto or AutoModelForCausalLM).from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(report[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return dict(model.state_dict())


def trained(weights: dict[str, torch.Tensor], *, lora: bool = False) -> dict[str, torch.Tensor]:
    """What training left in these weights, in float32."""
    prefix = "base_model.model." if lora else ""
    expected = {}
    for name, weight in weights.items():
        layer, _, last = name.rpartition(".")
        if not lora or not layer.endswith(("q_proj", "down_proj", "qkv")):
            made = rule(f"{prefix}{name}", weight.shape)
            expected[name] = made.bfloat16().float() if lora else made
            continue
        expected[name] = rule(f"{prefix}{layer}.base_layer.{last}", weight.shape).bfloat16().float()
        if last == "weight":
            a = rule(f"{prefix}{layer}.lora_A.default.weight", (RANK, weight.shape[1]))
            b = rule(f"{prefix}{layer}.lora_B.default.weight", (weight.shape[0], RANK))
            expected[name] += ALPHA / RANK * b @ a
    return expected


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", ["vl_1", "vl_2"])
def test_weights_of_one_and_of_two_processes(tmp_path: Path, name: str) -> None:
    weights = load(export_easyr1(copied(name, tmp_path)))
    assert same(weights, trained(weights))


def test_tied_weights_of_two_copies_over_four_processes(tmp_path: Path) -> None:
    folder = export_easyr1(copied("text_4", tmp_path))
    weights = load(folder)
    expected = trained(weights) | {"lm_head.weight": rule("model.embed_tokens.weight", (17, 8))}
    assert same(weights, expected)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["vl_lora_2", "text_lora_1"])
def test_adapters_are_added_in_float32(tmp_path: Path, name: str) -> None:
    weights = load(export_easyr1(copied(name, tmp_path)))
    expected = trained(weights, lora=True)
    if "text" in name:
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert same(weights, expected)


def a_target(weights: dict[str, torch.Tensor]) -> str:
    return next(name for name in weights if name.endswith("q_proj.weight"))


def test_a_merge_in_bfloat16_rounds_once(tmp_path: Path) -> None:
    folder = export_easyr1(copied("vl_lora_2", tmp_path), dtype="bf16")
    weights = load(folder)
    assert same(weights, {name: w.bfloat16() for name, w in trained(weights, lora=True).items()})
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_experts_keep_the_layout_of_the_hub(tmp_path: Path) -> None:
    written = load_file(export_easyr1(copied("moe_2", tmp_path)) / "model.safetensors")
    assert same(written, trained(written))
    fused = load(tmp_path / "moe_2" / "global_step_3" / "actor" / "huggingface")["model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(fused[1], written["model.layers.0.mlp.experts.1.down_proj.weight"])


def test_fused_experts_of_a_vision_language_model(tmp_path: Path) -> None:
    folder = export_easyr1(copied("vl_moe_2", tmp_path))
    written = load_file(folder / "model.safetensors")
    assert same(written, trained(written))
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(load(folder)[name], written[name].transpose(1, 2))


def test_names_are_those_of_the_hub(tmp_path: Path) -> None:
    written = load_file(export_easyr1(copied("vl_2", tmp_path)) / "model.safetensors")
    assert {name.split(".")[0] for name in written} == {"lm_head", "model", "visual"}
    assert "model.layers.0.self_attn.q_proj.weight" in written


def test_names_of_older_transformers_are_found(tmp_path: Path) -> None:
    actor = copied("vl_1", tmp_path)
    weights = load(export_easyr1(actor, tmp_path / "new"))
    older = load_file(tmp_path / "new" / "model.safetensors")
    torch.save(older, actor / "model_world_size_1_rank_0.pt")
    assert same(load(export_easyr1(actor)), weights)


def test_the_adapter_alone_loads_into_peft(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    actor = copied("text_lora_1", tmp_path)
    adapter = export_easyr1_adapter(actor, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(export_easyr1(actor))
    for name, weight in trained(base.state_dict(), lora=True).items():
        target = name.endswith(("q_proj.weight", "down_proj.weight"))
        made = rule(f"base_model.model.{name.removesuffix('weight')}base_layer.weight", weight.shape)
        base.state_dict()[name].copy_(made.bfloat16() if target else weight)
    merged = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    assert torch.equal(merged[a_target(merged)], trained(merged, lora=True)[a_target(merged)])


def test_alpha_comes_from_the_run_where_the_checkpoint_lacks_it(tmp_path: Path) -> None:
    actor = copied("text_lora_1", tmp_path)
    expected = load(export_easyr1(actor, tmp_path / "expected"))
    shutil.rmtree(actor / "lora_adapter")
    run = {"worker": {"actor": {"model": {"lora": {"alpha": ALPHA}}}}}
    (tmp_path / "text_lora_1" / "experiment_config.json").write_text(json.dumps(run))
    assert same(load(export_easyr1(actor)), expected)


def test_an_unknown_alpha_is_an_error_that_names_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    actor = copied("text_lora_1", tmp_path)
    config = json.loads((actor / "lora_adapter" / "adapter_config.json").read_text())
    (actor / "lora_adapter" / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 0}))
    assert main(["merge", "--local_dir", str(actor)]) == 1
    assert "--lora_alpha" in capsys.readouterr().err
    assert main(["merge", "--local_dir", str(actor), "--lora_alpha", str(ALPHA)]) == 0


def test_merge_finds_out_who_wrote_the_checkpoint(tmp_path: Path) -> None:
    actor = copied("vl_2", tmp_path)
    assert main(["merge", "--local_dir", str(actor.parent), "--target", str(tmp_path / "model")]) == 0
    assert load(tmp_path / "model")
    assert (tmp_path / "model" / "generation_config.json").is_file()


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    actor = copied("text_4", tmp_path)
    for path in actor.glob("model_*"):
        path.unlink()
    weights = load_file(export_easyr1(copied("text_4", tmp_path / "other"), tmp_path / "m") / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    torch.save(weights, actor / "model_world_size_1_rank_0.pt")
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        export_easyr1(actor)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    actor = copied("vl_2", tmp_path)
    shutil.copy(copied("text_4", tmp_path) / "huggingface" / "config.json", actor / "huggingface")
    with pytest.raises(CheckpointError, match="unknown to the model"):
        export_easyr1(actor)
