"""The actor's folder: what is saved comes back exactly, and damage is noticed before anything is read."""

from __future__ import annotations

import json
import pickle
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from foveal.config.schema_model import OptimConfig
from foveal.errors import CheckpointError
from foveal.train.checkpoint import check_actor, load_actor, load_trained
from foveal.train.optim import build_optimizer, take_step
from tests.model_helpers import Trained, load, same_tensors, train_step, trained


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(tmp_path_factory.mktemp("model"), steps=2)


@pytest.fixture(scope="module")
def saved(run: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "actor"
    run.save(folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "actor"))


def without_checksums(folder: Path) -> None:
    """As earlier releases wrote it."""
    info = json.loads((folder / "foveal.json").read_text())
    del info["crc32"]
    (folder / "foveal.json").write_text(json.dumps(info))


def fresh(run: Trained) -> tuple[Any, torch.optim.Optimizer]:
    model = load(run.source, torch.float32)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_training_goes_on_bit_for_bit_after_loading(tmp_path: Path) -> None:
    run = trained(tmp_path / "model", steps=2)
    run.save(tmp_path / "actor")
    model, optimizer = fresh(run)
    load_actor(tmp_path / "actor", model, optimizer)
    train_step(model, optimizer, seed=7)
    train_step(run.model, run.optimizer, seed=7)
    assert same_tensors(model.state_dict(), run.model.state_dict())


@pytest.mark.parametrize("strategy", ["adamw", "adamw_bf16", "adamw_8bit"])
def test_training_goes_on_with_weights_of_another_dtype(run: Trained, saved: Path, strategy: Any) -> None:
    model = load(run.source, torch.bfloat16)
    optimizer = build_optimizer(model, OptimConfig(strategy=strategy))
    load_actor(saved, model, optimizer)
    original = dict(run.model.named_parameters())
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert state["step"] == 2
        moment = run.optimizer.state[original[name]]["exp_avg"].to(torch.bfloat16)
        if strategy != "adamw_8bit":
            assert same_tensors({"exp_avg": state["exp_avg"]}, {"exp_avg": moment})
        parameter.grad = torch.ones_like(parameter)
    assert take_step(optimizer, 1.0) is not None


def test_parameters_that_never_had_a_gradient_have_no_state_after_loading(tmp_path: Path) -> None:
    run = trained(tmp_path / "model", steps=0)
    parameter = run.model.lm_head.weight
    parameter.grad = torch.ones_like(parameter)
    run.optimizer.step()
    run.save(tmp_path / "actor")
    model, optimizer = fresh(run)
    load_actor(tmp_path / "actor", model, optimizer)
    assert list(optimizer.state) == [model.lm_head.weight]


def test_configuration_decides_the_learning_rate_after_loading(run: Trained, saved: Path) -> None:
    model = load(run.source, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    load_actor(saved, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 5e-4


def test_frozen_weights_may_be_thawed_or_frozen_at_a_resume(run: Trained, saved: Path) -> None:
    model = load(run.source, torch.float32)
    model.model.visual.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    load_actor(saved, model, optimizer)
    assert set(optimizer.state) == {p for p in model.parameters() if p.requires_grad}


def test_a_checkpoint_of_weights_alone_says_that_the_optimizer_starts_afresh(
    run: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.save(tmp_path / "actor", with_optimizer=False)
    model, optimizer = fresh(run)
    load_actor(tmp_path / "actor", model, optimizer)
    assert same_tensors(model.state_dict(), run.model.state_dict()) and not optimizer.state
    assert "optimizer starts afresh" in capsys.readouterr().out


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    run = trained(tmp_path / "model", tie=True)
    run.save(tmp_path / "actor", with_optimizer=False)
    model: Any = load_trained(tmp_path / "actor", dtype=torch.float32)
    numbers = sum(p.numel() for p in run.model.parameters())
    assert (tmp_path / "actor" / "__0_0.distcp").stat().st_size < 4 * numbers + 200_000
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    assert same_tensors(model.state_dict(), run.model.state_dict())
    assert json.loads((tmp_path / "actor" / "foveal.json").read_text())["tied_weights"]


def test_the_model_is_built_without_its_source(run: Trained, copy: Path) -> None:
    info = json.loads((copy / "foveal.json").read_text())
    (copy / "foveal.json").write_text(json.dumps(info | {"source": "/gone"}))
    model: Any = load_trained(copy, dtype=torch.float32)
    assert same_tensors(model.state_dict(), run.model.state_dict())
    ids = torch.arange(20, 40)[None]
    assert torch.equal(model(input_ids=ids).logits, run.model(input_ids=ids).logits)


def test_a_truncated_shard_is_named_with_both_sizes(run: Trained, copy: Path) -> None:
    shard = copy / "__0_0.distcp"
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size // 2)
    with pytest.raises(CheckpointError, match=rf"__0_0\.distcp has {size // 2:,} of {size:,} bytes"):
        load_actor(copy, *fresh(run))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "foveal.json"])
def test_a_missing_file_is_named(run: Trained, copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name}.* is missing"):
        load_actor(copy, *fresh(run))


def test_a_shard_with_the_right_size_and_wrong_content_is_an_error(run: Trained, copy: Path) -> None:
    shard = copy / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp holds something else than was written \(checksum\)"):
        load_actor(copy, *fresh(run))
    without_checksums(copy)
    with pytest.raises(CheckpointError, match="a shard is damaged"):
        load_actor(copy, *fresh(run))


def test_one_flipped_bit_is_an_error_and_only_when_the_files_are_read(run: Trained, copy: Path) -> None:
    shard = copy / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert check_actor(copy).optimizer  # a listing reads nothing
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp holds something else"):
        load_actor(copy, *fresh(run))


def test_a_checkpoint_of_a_release_without_checksums_loads(run: Trained, copy: Path) -> None:
    without_checksums(copy)
    model, optimizer = fresh(run)
    load_actor(copy, model, optimizer)
    assert same_tensors(model.state_dict(), run.model.state_dict())


def test_a_checkpoint_of_another_model_is_refused_by_names(saved: Path, tmp_path: Path) -> None:
    other = trained(tmp_path / "other", "qwen2_5_vl", steps=0)
    with pytest.raises(CheckpointError, match=r"does not fit this model.*weights are missing \(model\."):
        load_actor(saved, other.model, None)


def test_an_index_that_would_run_code_is_refused(run: Trained, copy: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (__import__("os").mkdir, (str(tmp_path / "ran"),))

    content = pickle.dumps(Evil())
    (copy / ".metadata").write_bytes(content)
    info = json.loads((copy / "foveal.json").read_text())
    info["files"][".metadata"] = len(content)
    info["crc32"][".metadata"] = zlib.crc32(content)
    (copy / "foveal.json").write_text(json.dumps(info))
    with pytest.raises(CheckpointError, match=r"index of the checkpoint is damaged .*posix\.mkdir"):
        load_actor(copy, *fresh(run))
    assert not (tmp_path / "ran").exists()


def test_a_format_of_a_newer_release_is_refused(run: Trained, copy: Path) -> None:
    info = json.loads((copy / "foveal.json").read_text())
    (copy / "foveal.json").write_text(json.dumps(info | {"format": 99}))
    with pytest.raises(CheckpointError, match="newer Foveal"):
        load_actor(copy, *fresh(run))
