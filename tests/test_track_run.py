"""Whole runs with outside trackers: everything arrives in all of them, no key is written, and none can stop a run."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from foveal.cli import main
from foveal.track import backends, trackers
from foveal.track.backends import Backend, RunInfo
from foveal.track.external import close_all
from foveal.track.file import read_log
from foveal.track.samples import Sample
from foveal.types import Metrics
from tests.small_run import small_run
from tests.tracker_support import wandb_records

KEYS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "SWANLAB_API_KEY": "swanswanswanswanswan1",
    "MLFLOW_TRACKING_TOKEN": "mlflow-token-in-the-environment",
    "TRACKIO_WRITE_TOKEN": "trackio-token-in-the-environment",
    "HF_TOKEN": "hf_token_in_the_environment",
}


PATIENT = """
import sys
from functools import partial
from foveal.cli import main
from foveal.track import trackers
trackers.close_all = partial(trackers.close_all, seconds=120)
sys.exit(main(sys.argv[1:]))
"""
"""`foveal`, with time to close on a busy machine."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run of two steps with every tracker, in a process of its own, and what it printed."""
    root = tmp_path_factory.mktemp("tracked")
    arguments = small_run(root, "qwen2_5_vl", "trainer.logger=[console,file,tensorboard,wandb,swanlab,mlflow,trackio]")
    asked = ["trainer.max_steps=2", "trainer.val_freq=1", "trainer.val_generations_to_log=2"]
    critic = ["algorithm.adv_estimator=gae", "worker.critic.global_batch_size=4"]
    offline = {
        "HOME": str(root / "home"),
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
        "MLFLOW_TRACKING_URI": "file:mlruns",
        "TRACKIO_DIR": str(root / "trackio"),
        "PYTHONPATH": os.getcwd(),
    }
    done = subprocess.run(
        [sys.executable, "-c", PATIENT, "train", *arguments, *asked, *critic],
        cwd=root,
        env=os.environ | offline | KEYS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "warning: " not in done.stdout, done.stdout
    return root, done.stdout


def in_tensorboard(root: Path) -> set[str]:
    return set(EventAccumulator(str(root / "run" / "tensorboard")).Reload().Tags()["scalars"])


def in_wandb(root: Path) -> set[str]:
    (file,) = root.glob("wandb/offline-run-*/*.wandb")
    history = [item for record in wandb_records(file) for item in record.history.item]
    return {"/".join(item.nested_key) or item.key for item in history}


def in_mlflow(root: Path) -> set[str]:
    (metrics,) = root.glob("mlruns/*/*/metrics")
    return {str(path.relative_to(metrics)) for path in metrics.rglob("*") if path.is_file()}


def in_trackio(root: Path) -> set[str]:
    with sqlite3.connect(root / "trackio" / "easy_r1.db") as database:
        return {name for (row,) in database.execute("select metrics from metrics") for name in json.loads(row)}


@pytest.mark.parametrize("names", [in_tensorboard, in_wandb, in_mlflow, in_trackio])
def test_every_metric_of_a_run_arrives_under_its_own_name(finished: tuple[Path, str], names: object) -> None:
    root, _ = finished
    logged = {name for metrics in read_log(root / "run" / "experiment_log.jsonl").values() for name in metrics}
    assert len(logged) > 60 and "critic/vf_loss" in logged and "val/reward_score" in logged
    assert callable(names) and logged - names(root) == set()


def test_every_metric_of_a_run_arrives_in_swanlab(finished: tuple[Path, str]) -> None:
    root, _ = finished
    (file,) = root.glob("swanlog/run-*/*.swanlab")
    logged = {name for metrics in read_log(root / "run" / "experiment_log.jsonl").values() for name in metrics}
    content = file.read_bytes()
    assert [name for name in logged if name.encode() not in content] == []


def test_no_key_of_the_environment_is_written_anywhere(finished: tuple[Path, str]) -> None:
    root, printed = finished
    written = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert root / "run" / "experiment_config.json" in written
    for name, key in KEYS.items():
        assert [str(path) for path, content in written.items() if key.encode() in content] == [], name
        assert key not in printed


class Broken(Backend):
    package, cure = "broken", "mend it"

    def open(self, run: RunInfo) -> str | None:
        return None

    def log(self, metrics: Metrics, step: int) -> None:
        raise RuntimeError("no")

    def log_samples(self, samples: list[Sample], step: int) -> None:
        raise RuntimeError("no")

    def close(self) -> None:
        raise RuntimeError("no")


class Hanging(Broken):
    may_end = threading.Event()

    def log(self, metrics: Metrics, step: int) -> None:
        self.may_end.wait()


@pytest.fixture
def bad_trackers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(backends.BACKENDS, "wandb", Broken)
    monkeypatch.setitem(backends.BACKENDS, "swanlab", Hanging)
    monkeypatch.setattr(trackers, "close_all", partial(close_all, seconds=0.5))
    yield
    Hanging.may_end.set()


def test_a_run_ends_well_beside_a_broken_and_a_hanging_tracker(
    tmp_path: Path, bad_trackers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["trainer.logger=[file,wandb,swanlab]", "trainer.max_steps=3", "trainer.val_generations_to_log=1"]
    began = time.monotonic()
    assert main(["train", *small_run(tmp_path), *asked]) == 0
    assert time.monotonic() - began < 60
    assert list(read_log(tmp_path / "run" / "experiment_log.jsonl")) == [1, 2, 3]
    said = [line for line in capsys.readouterr().err.splitlines() if "wandb" in line or "swanlab" in line]
    refused, hangs, lacks = sorted(said, key=lambda line: ("lacks" in line, "in time" in line))
    assert "wandb refused an entry (RuntimeError: no); the run goes on" in refused
    assert "wandb lacks" in lacks
    assert "swanlab did not answer in time" in hangs
