"""The weights handed to an engine are those that `save_pretrained` would write, in buckets."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from foveal.errors import ModelError
from foveal.models.families import FAMILIES
from foveal.models.loading import load_model
from foveal.models.named_tensors import named_tensors
from tests.model_helpers import same_tensors
from tests.named_tensors_support import built, loaded, saved
from tests.sharding_support import in_processes


def collected(model: Any, **options: Any) -> dict[str, torch.Tensor]:
    pairs = [pair for bucket in named_tensors(model, **options) for pair in bucket]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_model_gives_what_it_would_save(tmp_path: Path, family: str, tie: bool) -> None:
    model = loaded(family, tmp_path / "a", tie=tie)
    given = collected(model)
    assert same_tensors(given, saved(model, tmp_path / "b"))
    assert ("lm_head.weight" in given) is not tie
    assert all(tensor.is_contiguous() for tensor in given.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_made_from_its_configuration_gives_what_it_would_save(tmp_path: Path, family: str) -> None:
    model = built(family)
    assert same_tensors(collected(model), saved(model, tmp_path))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_moe"])
def test_a_model_from_files_with_the_module_s_names_gives_what_it_would_save(tmp_path: Path, family: str) -> None:
    model = loaded(family, tmp_path / "a", original_names=False)
    assert same_tensors(collected(model), saved(model, tmp_path / "b"))


def test_experts_are_split_as_on_the_hub() -> None:
    model = built("qwen3_moe")
    expert = "model.layers.1.mlp.experts.{}.up_proj.weight"
    given = collected(model)
    assert torch.equal(given[expert.format(11)], model.model.layers[1].mlp.experts.gate_up_proj[11, 24:])
    assert expert.format(12) not in given


@pytest.mark.parametrize("limit", [1, 5_000, 20_000])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_5_vl"])
def test_a_bucket_holds_no_more_than_its_bytes_or_one_tensor(family: str, limit: int) -> None:
    model = built(family)
    buckets = [[tensor.nbytes for _, tensor in bucket] for bucket in named_tensors(model, bucket_bytes=limit)]
    assert all(len(sizes) == 1 or 0 < sum(sizes) <= limit for sizes in buckets)
    assert all(sum(sizes) + following[0] > limit for sizes, following in pairwise(buckets)), "a bucket ended early"
    assert same_tensors(collected(model, bucket_bytes=limit), collected(model))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe", "qwen2_5_vl"])
def test_a_cast_gives_what_the_cast_model_would_save(tmp_path: Path, family: str) -> None:
    model = built(family)
    given = collected(model, dtype=torch.bfloat16)
    assert next(model.parameters()).dtype == torch.float32
    assert same_tensors(given, saved(model.to(torch.bfloat16), tmp_path))


def test_a_cast_leaves_integers_and_passing_buffers_stay_out() -> None:
    model = built("llama")
    model.register_buffer("step", torch.tensor([16_777_217]))
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    given = collected(model, dtype=torch.bfloat16)
    assert given["step"].item() == 16_777_217
    assert "scratch" not in given


def test_a_weight_that_needs_no_work_is_not_copied() -> None:
    model = built("qwen2_5_vl")
    tensor = collected(model, dtype=torch.float32)["visual.blocks.0.attn.qkv.weight"]
    assert tensor.data_ptr() == model.model.visual.blocks[0].attn.qkv.weight.data_ptr()
    assert not tensor.requires_grad


def test_only_the_group_at_hand_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("qwen3_moe")
    splits = 0
    chunk = torch.chunk

    def counted(*args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        nonlocal splits
        splits += 1
        return chunk(*args, **options)

    monkeypatch.setattr(torch, "chunk", counted)
    weights = (name for bucket in named_tensors(model, bucket_bytes=1) for name, _ in bucket)
    assert next(name for name in weights if ".experts." in name).startswith("model.layers.0.")
    assert splits == 1, "down_proj of layer 0"
    list(weights)
    assert splits == 8, "per layer: down_proj, gate_up_proj, and either half of it"


def _shard(model: Any) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in getattr(model.model, "language_model", model.model).layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _compare_sharded(rank: int, folders: list[str]) -> None:
    for folder in folders:
        model: Any = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
        expected = {name: tensor.clone() for name, tensor in collected(model, dtype=torch.bfloat16).items()}
        _shard(model)
        with torch.no_grad():  # leaves the outermost module's weights gathered
            model(input_ids=torch.arange(10, 18).unsqueeze(0), use_cache=False)
        given = collected(model, dtype=torch.bfloat16, bucket_bytes=20_000)
        assert not any(isinstance(tensor, DTensor) for tensor in given.values())
        assert same_tensors(given, expected), folder


def test_sharded_weights_are_gathered_on_every_process(tmp_path: Path) -> None:
    folders = [str(tmp_path / "qwen3_moe"), str(tmp_path / "qwen2_5_vl")]
    built("qwen3_moe").save_pretrained(folders[0])
    built("qwen2_5_vl", tie=True).save_pretrained(folders[1])
    in_processes(_compare_sharded, tmp_path, folders)


def test_a_sharded_model_that_was_never_loaded_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = built("qwen2_5_vl")
        _shard(model)
        with pytest.raises(ModelError, match="Load the model"):
            next(named_tensors(model))
    finally:
        dist.destroy_process_group()
