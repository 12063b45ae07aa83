"""Files of EasyR1 that are hostile, damaged or incomplete: clear errors, and nothing in them is run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foveal.errors import CheckpointError
from foveal.train.easyr1_export import export_easyr1, export_easyr1_adapter
from foveal.train.rank_files import RankFiles
from foveal.train.retention import Checkpoints
from foveal.train.torch_file import TorchFile
from tests.easyr1_support import copied


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def test_code_in_a_file_is_named_and_not_run(tmp_path: Path) -> None:
    actor = copied("vl_1", tmp_path)
    torch.save({"weight": Hostile(tmp_path / "run")}, actor / "model_world_size_1_rank_0.pt")
    with pytest.raises(CheckpointError, match=r"posix\.system.*was not run"):
        export_easyr1(actor)
    assert not (tmp_path / "run").exists()


def test_values_other_than_weights_are_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2), "step": 3}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(CheckpointError, match="step is a int"):
        RankFiles(tmp_path)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    actor = copied("text_4", tmp_path)
    (actor / "model_world_size_4_rank_2.pt").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 4 files are missing.*rank_2\.pt"):
        export_easyr1(actor)


def test_files_of_two_world_sizes_are_refused(tmp_path: Path) -> None:
    actor = copied("vl_2", tmp_path)
    shutil.copy(copied("vl_1", tmp_path) / "model_world_size_1_rank_0.pt", actor)
    with pytest.raises(CheckpointError, match="world sizes: 1, 2"):
        export_easyr1(actor)


def test_a_cut_file_is_an_error(tmp_path: Path) -> None:
    actor = copied("vl_2", tmp_path)
    path = actor / "model_world_size_2_rank_1.pt"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match=r"rank_1\.pt.*cut"):
        export_easyr1(actor)


def test_a_flipped_bit_is_found_and_nothing_is_written(tmp_path: Path) -> None:
    actor = copied("vl_2", tmp_path)
    path = actor / "model_world_size_2_rank_1.pt"
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda record: record.file_size * ("/data/" in record.filename))
    content = bytearray(path.read_bytes())
    content[largest.header_offset + largest.file_size // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank_1\.pt.*damaged"):
        export_easyr1(actor)
    assert not list(actor.rglob("*.safetensors"))


def test_files_of_two_runs_are_refused(tmp_path: Path) -> None:
    actor = copied("vl_2", tmp_path)
    shutil.copy(copied("moe_2", tmp_path) / "model_world_size_2_rank_1.pt", actor)
    with pytest.raises(CheckpointError, match="of several runs"):
        export_easyr1(actor)


def test_whole_weights_that_differ_between_processes_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"weight": torch.full((2,), float(rank))}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    with RankFiles(tmp_path) as files, pytest.raises(CheckpointError, match="differs from rank 0's"):
        files.read("weight")


def test_a_view_of_a_larger_storage_is_read_alone(tmp_path: Path) -> None:
    numbers = torch.arange(24.0).reshape(4, 6)
    torch.save({"weight": numbers[1:, 2:4].t()}, tmp_path / "model_world_size_1_rank_0.pt")
    with RankFiles(tmp_path) as files:
        assert torch.equal(files.read("weight"), numbers[1:, 2:4].t())


def test_a_weight_larger_than_its_file_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "model_world_size_1_rank_0.pt"
    torch.save({"weight": torch.ones(4)}, path)
    with TorchFile(path) as file:
        stored = file.weights["weight"].local
        for change in ({"shape": (1 << 50,)}, {"offset": 1}, {"offset": -1}, {"stride": (-1,)}):
            with pytest.raises(CheckpointError, match=r"the numbers of a tensor .* are damaged"):
                file.read(replace(stored, **change))


def test_an_index_that_is_compressed_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 20))
    with pytest.raises(CheckpointError, match="it is compressed"):
        TorchFile(path)


def test_a_full_checkpoint_has_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no adapter"):
        export_easyr1_adapter(copied("vl_1", tmp_path))


def test_going_on_from_an_easyr1_checkpoint_says_how(tmp_path: Path) -> None:
    actor = copied("vl_2", tmp_path)
    with pytest.raises(CheckpointError, match=r"foveal merge --local_dir.*worker\.actor\.model\.model_path"):
        Checkpoints(tmp_path / "run", -1).resolve(actor.parent)


def test_old_checkpoints_of_easyr1_are_never_removed(tmp_path: Path) -> None:
    actor = copied("vl_2", tmp_path)
    checkpoints = Checkpoints(tmp_path / "vl_2", save_limit=1)
    for step in (7, 8):
        checkpoints.save(step, lambda folder: (folder / "actor").mkdir(), None)
    assert actor.is_dir() and not checkpoints.folder(7).exists()


_SAVE_SHARDED = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
for rank in range(4):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    part = torch.arange(10.0).reshape(5, 2).chunk(2)[rank % 2].clone()
    weight = DTensor.from_local(part, mesh, [Replicate(), Shard(0)], shape=torch.Size((5, 2)), stride=(2, 1))
    torch.save({"weight": weight}, f"{sys.argv[1]}/model_world_size_4_rank_{rank}.pt")
    dist.destroy_process_group()
"""


def test_files_of_this_version_of_torch_are_read_too(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _SAVE_SHARDED, str(tmp_path)], check=True, timeout=60)
    with RankFiles(tmp_path) as files:
        assert torch.equal(files.read("weight"), torch.arange(10.0).reshape(5, 2))
