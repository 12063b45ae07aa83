"""The trackers' own SDKs, offline: each where it is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foveal.config.schema import Config
from foveal.track import Trackers
from foveal.track.samples import Sample

ODD = {"reward/mean@1": 0.11, "reward/mean 1": 0.22, "reward//lead//twice": 0.55, "reward/准确率": 0.66}
SAMPLE = Sample(1, "val-0-7", "<b>how many?", "3", "3", {"overall": 1.0}, ["a.png"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and a home without anybody's credentials."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("TENSORBOARD_DIR", "WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "SWANLAB_MODE", "SWANLAB_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(tracker: str, folder: Path, steps: range, resume_step: int = 0) -> None:
    config = Config.model_validate({"trainer": {"logger": [tracker], "project_name": "proj", "experiment_name": "exp"}})
    trackers = Trackers(config, folder / "run", resume_step)
    for step in steps:
        trackers.log(ODD | {"reward/overall": float(step), "actor/grad_norm": float("nan")}, step)
    trackers.log_samples([SAMPLE], steps[-1])
    trackers.close()


def run_id(tracker: str, folder: Path) -> str:
    return json.loads((folder / "run" / "trackers.json").read_text())[tracker]


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_has_every_metric_once_a_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    run("tensorboard", folder, range(1, 3))
    scalars = events(folder / "run" / "tensorboard")
    assert scalars["reward/overall"] == [(1, 1.0), (2, 2.0)]
    assert sorted(round(points[0][1], 2) for tag, points in scalars.items() if tag != "reward/overall") == [
        0.11,
        0.22,
        0.55,
        0.66,
    ]
    assert capsys.readouterr().err == ""


def test_tensorboard_hides_steps_that_are_trained_again(folder: Path) -> None:
    pytest.importorskip("tensorboard")
    run("tensorboard", folder, range(1, 4))
    run("tensorboard", folder, range(2, 3), resume_step=1)
    assert [step for step, _ in events(folder / "run" / "tensorboard")["reward/overall"]] == [1, 2]


def test_tensorboard_writes_where_its_variable_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_DIR", str(folder / "elsewhere"))
    run("tensorboard", folder, range(1, 2))
    assert events(folder / "elsewhere" / "proj" / "exp")["reward/overall"] == [(1, 1.0)]


def test_mlflow_keeps_odd_names_apart_and_goes_on_with_its_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:mlruns")
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
    assert [file.path for file in client.list_artifacts(found.info.run_id, "generations")] == [
        "generations/step_2.json",
        "generations/step_3.json",
    ]


def test_wandb_works_offline_and_goes_on_with_its_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run("wandb", folder, range(1, 2))
    first = run_id("wandb", folder)
    run("wandb", folder, range(2, 3), resume_step=1)
    assert run_id("wandb", folder) == first
    assert len(list((folder / "wandb").glob(f"offline-run-*-{first}"))) >= 1
    wandb.teardown()


def test_wandb_without_a_login_is_one_warning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wandb = pytest.importorskip("wandb")
    run("wandb", folder, range(1, 2))
    wandb.teardown()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    assert "wandb is off for this run" in line and "WANDB_API_KEY" in line


def test_swanlab_works_offline(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_DIR", str(folder / "swan"))
    run("swanlab", folder, range(1, 3))
    assert run_id("swanlab", folder) in " ".join(path.name for path in (folder / "swan").iterdir())
    assert "warning:" not in capsys.readouterr().err


def test_swanlab_without_a_login_is_one_warning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("swanlab")
    run("swanlab", folder, range(1, 2))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    assert "swanlab is off for this run" in line and "SWANLAB_API_KEY" in line
