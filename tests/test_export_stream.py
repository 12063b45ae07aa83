"""An export takes little memory, and its safetensors files are those that anyone reads."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from foveal.errors import CheckpointError
from foveal.models.loading import load_model
from foveal.models.named_tensors import named_tensors
from foveal.train.export import export
from foveal.train.hf_folder import write_hf
from foveal.train.safetensors_stream import write_safetensors
from tests.model_helpers import load, same_tensors, save_actor, trained
from tests.named_tensors_support import built, saved, tiny_config
from tests.sharding_support import in_processes


def test_tensors_of_all_kinds_come_back(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.randn(3, 5),
        "odd": torch.randn(3).bfloat16(),
        "counter": torch.tensor(7),
        "turned": torch.randn(4, 6).half().t(),
        "empty": torch.zeros(0, 2),
        "mask.ü": torch.tensor([True, False]),
    }
    files = write_safetensors(tmp_path, tensors.items())
    read = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert same_tensors(read, tensors)
    assert not list(tmp_path.glob("*.partial"))
    with safe_open(files[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_files_stay_below_the_limit_and_the_index_finds_every_weight(tmp_path: Path) -> None:
    tensors = {f"layers.{number}.weight": torch.full((400, 256), float(number)) for number in range(12)}
    files = write_safetensors(tmp_path, tensors.items(), shard_bytes=3_000_000)
    assert [path.name for path in files] == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert all(path.stat().st_size <= 3_000_000 for path in files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 12 * 400 * 256 * 4
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], tensor)
    assert all(before <= after for before, after in pairwise(index["weight_map"][name] for name in tensors))


def test_a_checkpoint_in_several_files_loads(tmp_path: Path) -> None:
    run = trained(tmp_path / "model", "qwen2_5_vl", tie=True)
    run.save(tmp_path / "actor")
    folder = export(tmp_path / "actor", shard_bytes=1_200_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert same_tensors(load(folder, "auto").state_dict(), run.model.state_dict())


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_lie_as_save_pretrained_lays_them(tmp_path: Path, family: str, dtype: str) -> None:
    model = built(family)
    model.save_pretrained(tmp_path / "model")
    save_actor(
        tmp_path / "actor", model, None, source_path=str(tmp_path / "model"), save_processing=lambda folder: None
    )
    folder = export(tmp_path / "actor", dtype=dtype)
    expected = saved(model.to(getattr(torch, dtype)), tmp_path / "expected")
    assert same_tensors(load_file(folder / "model.safetensors"), expected)


def test_a_model_writes_itself(tmp_path: Path) -> None:
    model = built("qwen3", tie=True)
    model.save_pretrained(tmp_path / "model")
    folder = write_hf(
        tmp_path / "out",
        (tensor for bucket in named_tensors(model, torch.bfloat16, bucket_bytes=10_000) for tensor in bucket),
        expected=sum(p.numel() for p in model.parameters()),
        configuration=tmp_path / "model",
        dtype=torch.bfloat16,
    )
    assert same_tensors(load(folder, "auto").state_dict(), model.to(torch.bfloat16).state_dict())


def test_a_weight_that_is_not_given_is_noticed(tmp_path: Path) -> None:
    model = built("llama")
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"not written, as .* of .* numbers"):
        write_hf(
            tmp_path / "out",
            [tensor for bucket in named_tensors(model, bucket_bytes=10_000) for tensor in bucket][:-1],
            expected=sum(p.numel() for p in model.parameters()),
            configuration=tmp_path / "model",
            dtype=torch.float32,
        )
    assert not (tmp_path / "out").exists()


def _save_sharded(rank: int, source: str, folder: Path) -> None:
    model: Any = load_model(source, dtype=torch.float32, device=torch.device("cpu"))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    save_actor(folder, model, None, source_path=source, save_processing=lambda folder: None)


def test_what_two_processes_saved_one_exports(tmp_path: Path) -> None:
    source = tmp_path / "model"
    built("qwen3_moe").save_pretrained(source)
    in_processes(_save_sharded, tmp_path, str(source), tmp_path / "actor")
    assert len(list((tmp_path / "actor").glob("*.distcp"))) == 2
    folder = export(tmp_path / "actor")
    assert same_tensors(load_file(folder / "model.safetensors"), load_file(source / "model.safetensors"))


_EXPORT_BOTH = r"""
import re, sys
from pathlib import Path
from foveal.train.export import export
def peak():  # not getrusage, whose peak begins with that of the process that started this one
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
export(Path(sys.argv[1]))
before = peak()
export(Path(sys.argv[2]), dtype="bf16")
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks of memory are read from /proc")
def test_an_export_takes_a_small_part_of_the_model_in_memory(tmp_path: Path) -> None:
    small = built("qwen3_moe")
    config = tiny_config("qwen3_moe")
    config.update({"hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 16})
    large = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.to_dict()))
    for name, model in (("small", small), ("large", large)):
        model.save_pretrained(tmp_path / name)
        source = str(tmp_path / name)
        save_actor(tmp_path / f"{name} actor", model, None, source_path=source, save_processing=lambda folder: None)
    command = [sys.executable, "-c", _EXPORT_BOTH, str(tmp_path / "small actor"), str(tmp_path / "large actor")]
    taken = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    weights = sum(parameter.nbytes for parameter in large.parameters())
    assert weights > 300e6
    assert taken < weights / 4
