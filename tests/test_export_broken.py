"""Nothing that is broken becomes a model: the fault is named, and the target holds no weights."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch

from foveal.cli import main
from tests.model_helpers import Trained, load, trained


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trained(folder / "model").save(folder / "actor")
    return folder / "actor"


@pytest.fixture
def actor(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "actor"))


def merge(actor: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Merges, expecting failure; returns what was printed as the error."""
    capsys.readouterr()
    assert main(["merge", "--local_dir", str(actor), *options]) == 1
    out, err = capsys.readouterr()
    assert "saved" not in out.lower() and "done" not in out.lower()
    with pytest.raises((OSError, ValueError)):  # no weights, or not even a configuration
        load(actor / "huggingface", "auto")
    assert not list(actor.glob("*.partial"))
    return err


def test_truncated_shard(actor: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = actor / "__0_0.distcp"
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size // 2)
    assert "__0_0.distcp has" in merge(actor, capsys)


def test_the_model_that_training_started_from_is_never_written_over(
    saved: Path, actor: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved.parent / "model"
    before = {path: path.read_bytes() for path in source.iterdir()}
    assert "training started from" in merge(actor, capsys, "--target", str(source))
    assert {path: path.read_bytes() for path in source.iterdir()} == before


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "foveal.json", "huggingface/config.json"])
def test_missing_file(actor: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (actor / name).unlink()
    assert Path(name).name in merge(actor, capsys)


def test_shard_of_the_right_size_with_wrong_content(actor: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = actor / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 4 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 4)
    shard.write_bytes(content)
    assert "__0_0.distcp holds something else than was written" in merge(actor, capsys)


def test_weights_that_diverged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run: Trained = trained(tmp_path / "model")
    with torch.no_grad():
        run.model.lm_head.weight[3, 3] = float("nan")
    run.save(tmp_path / "actor")
    error = merge(tmp_path / "actor", capsys)
    assert "lm_head.weight holds values that are not finite in float32" in error


def test_full_disk(actor: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # model.safetensors is larger
    try:
        error = merge(actor, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot write the model" in error and "GB free there" in error


def test_folder_that_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not an actor folder of a checkpoint" in merge(tmp_path, capsys)


def test_an_earlier_export_survives_a_later_damage(actor: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", "--local_dir", str(actor)]) == 0
    (actor / "__0_0.distcp").unlink()
    assert main(["merge", "--local_dir", str(actor)]) == 1
    load(actor / "huggingface", "auto")


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("files", 3, "foveal.json is damaged (AttributeError"),
        ("files", {"__0_0.distcp": "3"}, "foveal.json is damaged (TypeError: format, sizes and checksums"),
        ("format", "1", "foveal.json is damaged (TypeError: format, sizes and checksums"),
        ("model_class", "pipeline", "has no model pipeline"),
        ("source_dtype", "float8_e4m3fn", "float8_e4m3fn, not a type that weights are saved in"),
    ],
)
def test_information_that_cannot_be_used(
    actor: Path, capsys: pytest.CaptureFixture[str], key: str, value: object, named: str
) -> None:
    path = actor / "foveal.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert named in merge(actor, capsys)


def test_a_configuration_that_its_class_refuses(actor: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = actor / "huggingface" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vision_config": "none"}))
    assert main(["merge", "--local_dir", str(actor)]) == 1
    assert "config.json: cannot read the model's configuration" in capsys.readouterr().err
