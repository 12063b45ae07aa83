"""The trackers' own SDKs, in their offline or local mode: what comes back out of them."""

from __future__ import annotations

import io
import json
import sqlite3
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
import pytest
import wandb
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from foveal.config.schema import Config
from foveal.track import Trackers, trackers
from foveal.track.external import close_all
from foveal.track.samples import Sample
from foveal.types import Media
from tests.tracker_support import serve_mlflow, wandb_records

ODD = {"reward/mean@1": 0.11, "reward/mean 1": 0.22, "reward//lead//twice": 0.55, "reward/准确率": 0.66}
ARRIVED = {"reward/mean@1": 0.11, "reward/mean 1": 0.22, "reward/lead/twice_55ba": 0.55, "reward/准确率": 0.66}
"""Where all but empty parts are allowed."""


def picture() -> Media:
    data = io.BytesIO()
    Image.new("RGB", (1024, 256), "red").save(data, "PNG")
    return Media("image", data.getvalue(), "a.png")


SAMPLES = [
    Sample(1, "val-0-7", "<b>how many?", "3", "three", {"overall": 0.75, "accuracy": 0.5}, ["a.png"], [picture()]),
    Sample(1, "val-0-8", "no picture", "4", "four", {"overall": 0.0}, ["bad.png"], [Media("image", b"not one")]),
]


@pytest.fixture(scope="module")
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Trackio looks for its folder once, when it is imported."""
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder))
        import trackio

        assert folder == trackio.utils.TRACKIO_DIR
        yield folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, a home without anybody's credentials, and time to close on a busy machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trackers, "close_all", partial(close_all, seconds=120))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("TENSORBOARD_DIR", "WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "SWANLAB_MODE", "SWANLAB_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(tracker: str, folder: Path, steps: range, resume_step: int = 0) -> None:
    config = Config.model_validate({"trainer": {"logger": [tracker], "project_name": "proj", "experiment_name": "exp"}})
    tracked = Trackers(config, folder / "run", resume_step)
    for step in steps:
        tracked.log(ODD | {"reward/overall": float(step), "actor/grad_norm": float("nan")}, step)
    tracked.log_samples(SAMPLES, steps[-1])
    tracked.close()


def run_id(tracker: str, folder: Path) -> str:
    return json.loads((folder / "run" / "trackers.json").read_text())[tracker]


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_has_every_metric_once_a_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("tensorboard", folder, range(1, 3))
    scalars = events(folder / "run" / "tensorboard")
    assert scalars.pop("reward/overall") == [(1, 1.0), (2, 2.0)]
    assert sorted(round(points[0][1], 2) for points in scalars.values()) == [0.11, 0.22, 0.55, 0.66]
    assert capsys.readouterr().err == ""


def test_tensorboard_shows_samples_and_each_picture_once(folder: Path) -> None:
    run("tensorboard", folder, range(1, 3))
    found = EventAccumulator(str(folder / "run" / "tensorboard")).Reload()
    (text,) = found.Tensors("val/generations/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert "&lt;b>how many?" in shown.replace("&gt;", ">") and "accuracy 0.500" in shown
    assert found.Tags()["images"] == ["val/pictures/val-0-7/0"]
    (image,) = found.Images("val/pictures/val-0-7/0")
    assert (image.width, image.height) == (512, 128)


def test_tensorboard_hides_steps_that_are_trained_again(folder: Path) -> None:
    run("tensorboard", folder, range(1, 4))
    run("tensorboard", folder, range(2, 3), resume_step=1)
    assert [step for step, _ in events(folder / "run" / "tensorboard")["reward/overall"]] == [1, 2]


def test_tensorboard_writes_where_its_variable_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_DIR", str(folder / "elsewhere"))
    run("tensorboard", folder, range(1, 2))
    assert events(folder / "elsewhere" / "proj" / "exp")["reward/overall"] == [(1, 1.0)]


@pytest.mark.parametrize("store", ["files", pytest.param("server", marks=pytest.mark.slow)])
def test_mlflow_keeps_odd_names_apart_and_goes_on_with_its_run(
    store: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_mlflow(folder / "server") if store == "server" else nullcontext("file:mlruns") as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        run("mlflow", folder, range(1, 3))
        run("mlflow", folder, range(3, 4), resume_step=2)
        assert capsys.readouterr().err == ""
        client = mlflow.MlflowClient()
        (found,) = client.search_runs([client.get_experiment_by_name("proj").experiment_id])
        metrics = found.data.metrics
        assert {round(value, 2) for name, value in metrics.items() if "mean" in name} == {0.11, 0.22}
        assert metrics["reward/准确率"] == 0.66
        assert [point.step for point in client.get_metric_history(found.info.run_id, "reward/overall")] == [1, 2, 3]
        assert found.data.params["trainer.experiment_name"] == "exp"
        assert found.info.status == "FINISHED" and found.info.run_name == "exp"

        read = mlflow.artifacts.load_dict(f"{found.info.artifact_uri}/generations/step_3.json")
        first, second = (dict(zip(read["columns"], row, strict=True)) for row in read["data"])
        assert first["prompt"] == "<b>how many?" and first["reward/accuracy"] == 0.5
        assert second["image_1"] is None and second["reward/accuracy"] is None
        shown = mlflow.artifacts.load_image(f"{found.info.artifact_uri}/{first['image_1']}")
        assert shown.size == (512, 128)


def test_wandb_works_offline_and_goes_on_with_its_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run("wandb", folder, range(1, 2))
    first = run_id("wandb", folder)
    run("wandb", folder, range(2, 3), resume_step=1)
    assert run_id("wandb", folder) == first
    assert len(list((folder / "wandb").glob(f"offline-run-*-{first}"))) >= 1
    wandb.teardown()


def test_wandb_has_metrics_and_a_table_with_pictures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run("wandb", folder, range(1, 2))
    wandb.teardown()
    (offline,) = (folder / "wandb").glob("offline-run-*")
    (file,) = offline.glob("*.wandb")
    records = list(wandb_records(file))
    logged: dict[str, Any] = {}
    for record in records:
        for item in record.history.item:
            logged["/".join([item.key, *item.nested_key]).strip("/")] = json.loads(item.value_json)
    assert ARRIVED.items() <= logged.items() and logged["reward/overall"] == 1.0
    (table,) = (offline / "files" / "media" / "table" / "val").glob("generations*.json")
    read = json.loads(table.read_text())
    assert read["columns"][-3:] == ["answer", "reward/overall", "reward/accuracy"]
    assert read["data"][0][-3:] == ["three", 0.75, 0.5]
    files = [entry.path for record in records for entry in record.artifact.manifest.contents]
    assert sum(path.endswith(".png") for path in files) == 1


def test_wandb_without_a_login_is_one_warning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("wandb", folder, range(1, 2))
    wandb.teardown()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    assert "wandb is off for this run" in line and "WANDB_API_KEY" in line


def test_swanlab_works_offline(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_DIR", str(folder / "swan"))
    run("swanlab", folder, range(1, 3))
    (offline,) = (folder / "swan").glob(f"run-*{run_id('swanlab', folder)}*")
    texts = [path.read_text() for path in (offline / "media" / "text").iterdir()]
    assert any("how many?" in text and "accuracy 0.500" in text for text in texts)
    (shown,) = (offline / "media" / "image").iterdir()
    assert Image.open(shown).size == (512, 128)
    (file,) = offline.glob("*.swanlab")
    assert all(name.encode() in file.read_bytes() for name in ARRIVED)
    assert "warning:" not in capsys.readouterr().err


def test_swanlab_without_a_login_is_one_warning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("swanlab", folder, range(1, 2))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    assert "swanlab is off for this run" in line and "SWANLAB_API_KEY" in line


def test_trackio_keeps_metrics_and_a_table_with_pictures_and_goes_on(
    folder: Path, trackio_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("trackio", folder, range(1, 3))
    run("trackio", folder, range(3, 4), resume_step=2)
    assert "warning:" not in capsys.readouterr().err
    with sqlite3.connect(trackio_folder / "proj.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, _, _ in rows} == {run_id("trackio", folder)} == {"exp"}
    read = [(step, json.loads(metrics)) for _, step, metrics in rows]
    metrics = [(step, found) for step, found in read if "reward/overall" in found]
    assert [(step, found["reward/overall"]) for step, found in metrics] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert ARRIVED.items() <= metrics[0][1].items()
    table = next(found["val/generations"] for _, found in read if "val/generations" in found)["_value"]
    assert (table[0]["answer"], table[0]["reward/accuracy"], table[1]["image_1"]) == ("three", 0.5, None)
    shown = Image.open(trackio_folder / "media" / table[0]["image_1"]["file_path"])
    assert shown.size == (512, 128)
