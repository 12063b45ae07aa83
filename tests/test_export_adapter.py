"""Merged adapters are base + scaling · B·A in float32, rounded once; written alone they are what peft loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foveal.cli import main
from foveal.config.schema_model import LoraConfig
from foveal.errors import CheckpointError
from foveal.models.lora import add_lora, lora_layers
from foveal.quickstart.tiny import Family, build_tiny
from foveal.train.export import export, export_adapter
from tests.model_helpers import Trained, load, same_tensors, trained


def adapted(folder: Path, family: Family = "qwen3_vl", *, tie: bool = False, dtype: str = "float32") -> Trained:
    """A model folder, and the model of it with adapters that change every layer."""
    source = build_tiny(folder, family, tie=tie, dtype=dtype)
    model = load(source, torch.float32)
    add_lora(model, LoraConfig(rank=4, alpha=8))
    generator = torch.Generator().manual_seed(1)
    for layer in lora_layers(model).values():
        torch.nn.init.normal_(layer.lora_B, std=0.1, generator=generator)
    return Trained(source, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))


def by_hand(run: Trained, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The module's state with the adapters added in float32, without them."""
    layers = lora_layers(run.model)
    state = {name: tensor for name, tensor in run.model.state_dict().items() if ".lora_" not in name}
    for path, layer in layers.items():
        state[f"{path}.weight"] = torch.addmm(layer.weight, layer.lora_B, layer.lora_A, alpha=2.0)
    return {name: tensor.detach().to(dtype) for name, tensor in state.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "tie"), [("qwen3_vl", True), ("qwen2_5_vl", False), ("qwen3", False)])
def test_merged_weights_are_base_and_adapter(tmp_path: Path, family: Family, tie: bool, dtype: str) -> None:
    run = adapted(tmp_path / "model", family, tie=tie, dtype=dtype)
    run.save(tmp_path / "actor")
    merged = load(export(tmp_path / "actor"), "auto")
    assert same_tensors(merged.state_dict(), by_hand(run, getattr(torch, dtype)))


def test_merge_keeps_the_names_of_the_source_s_files(tmp_path: Path) -> None:
    run = adapted(tmp_path / "model", "qwen2_5_vl")
    run.save(tmp_path / "actor")
    folder = export(tmp_path / "actor", tmp_path / "merged")
    before, after = (load_file(place / "model.safetensors") for place in (run.source, folder))
    assert before.keys() == after.keys()
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])


def test_peft_loads_the_adapter_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peft = pytest.importorskip("peft")
    run = adapted(tmp_path / "model")
    run.save(tmp_path / "global_step_1" / "actor")
    assert main(["merge", "--local_dir", str(tmp_path / "global_step_1" / "actor"), "--adapter"]) == 0
    folder = tmp_path / "global_step_1" / "actor" / "lora_adapter"
    assert str(folder) in capsys.readouterr().out
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(run.source)
    model: Any = peft.PeftModel.from_pretrained(load(run.source, "auto"), folder)
    ids = torch.arange(20, 40)[None]
    assert torch.allclose(model(input_ids=ids).logits, run.model(input_ids=ids).logits, atol=1e-4)
    merged, expected = model.merge_and_unload().state_dict(), by_hand(run, torch.float32)
    assert merged.keys() == expected.keys()
    assert all(torch.allclose(merged[name], expected[name], atol=1e-6) for name in merged)


def test_an_adapter_leaves_the_weights_beside_it(tmp_path: Path) -> None:
    run = adapted(tmp_path / "model", "qwen3")
    run.save(tmp_path / "actor")
    folder = export(tmp_path / "actor")
    export_adapter(tmp_path / "actor", folder)
    assert (folder / "model.safetensors").is_file() and (folder / "adapter_model.safetensors").is_file()


def test_an_adapter_asked_of_a_full_checkpoint_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "model").save(tmp_path / "actor")
    with pytest.raises(CheckpointError, match="all weights were trained"):
        export_adapter(tmp_path / "actor")


def test_a_source_that_is_gone_or_another_model_is_an_error(tmp_path: Path) -> None:
    run = adapted(tmp_path / "model", "qwen3")
    run.save(tmp_path / "actor")
    (run.source / "model.safetensors").rename(tmp_path / "away.safetensors")
    with pytest.raises(CheckpointError, match="cannot read the weights of the model that training started from"):
        export(tmp_path / "actor")
    moved = run.source.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="If the model has moved, a link in the old place will do"):
        export(tmp_path / "actor")
    moved.rename(run.source)
    build_tiny(run.source, "qwen3", size="quickstart")
    with pytest.raises(CheckpointError, match="not the model that training started from"):
        export(tmp_path / "actor")
    assert not list((tmp_path / "actor" / "huggingface").glob("*.safetensors"))
