"""Runs that go on from a checkpoint: the same numbers as without a break, and errors where that cannot be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foveal.cli import main
from foveal.config import load_config
from foveal.quickstart.tiny import build_tiny
from foveal.rollout.surplus import dump_groups, read_groups
from foveal.signals import Stopped
from foveal.track.file import read_log
from foveal.train.checkpoint import load_trained
from foveal.train.step_folder import read_state
from foveal.trainer import Trainer
from foveal.types import Group, Prompt, Response
from tests.small_run import small_run, write_rows

DYNAMIC = [
    "algorithm.online_filtering=true",  # five rows at a time for steps of four: three are left over after step 3
    "data.mini_rollout_batch_size=5",
    "data.shuffle=true",
    "worker.actor.ppo_epochs=2",
    "algorithm.kl_type=adaptive",
    "algorithm.kl_horizon=50",
    "trainer.val_freq=2",
]
TIMES = ("timing", "perf/")
HANGING = """
import os, time

REWARD_TYPE = "batch"


def score(rows):
    if os.path.isdir(os.environ.get("HANG_AFTER", "")):
        time.sleep(1000)
    return [{"overall": (i * 7 % 5) / 4, "accuracy": float(i * 7 % 5 >= 2)} for i in range(len(rows))]
"""


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_trained(run / f"global_step_{step}", dtype=torch.float32).state_dict()


def same_weights(one: Path, other: Path, step: int) -> bool:
    expected, found = weights(one, step), weights(other, step)
    return all(torch.equal(expected[name], found[name]) for name in expected)


def metrics(run: Path) -> dict[int, dict[str, float]]:
    """What was logged of each step, without what depends on the machine."""
    return {
        step: {name: value for name, value in found.items() if not name.startswith(TIMES)}
        for step, found in read_log(run / "experiment_log.jsonl").items()
    }


@pytest.fixture
def killed(tmp_path: Path) -> list[str]:
    """Arguments of a run of six steps, of which three are saved; it was killed in one of those after."""
    (tmp_path / "hanging.py").write_text(HANGING)
    args = small_run(tmp_path, "qwen3_vl", *DYNAMIC, "trainer.save_freq=3", "trainer.max_steps=6")
    args.append(f"worker.reward.reward_function={tmp_path / 'hanging.py'}:score")
    saved = tmp_path / "run" / "global_step_3"
    process = subprocess.Popen(
        [sys.executable, "-m", "foveal", "train", *args],
        env=os.environ | {"HANG_AFTER": str(saved)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        end = time.monotonic() + 120
        while not saved.exists():
            assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
            time.sleep(0.05)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    return args


@pytest.mark.slow
def test_a_run_that_was_killed_and_resumed_equals_one_that_was_not(tmp_path: Path, killed: list[str]) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main(["train", *killed, f"trainer.save_checkpoint_path={whole}"]) == 0
    state = read_state(run / "global_step_3")
    assert state["files"]["surplus.safetensors"]["size"] > 1000  # or this would show less than it should
    assert main(["train", *killed]) == 0
    assert same_weights(whole, run, 6)
    expected, found = metrics(whole), metrics(run)
    assert list(expected) == [1, 2, 3, 4, 5, 6] and expected[6]["reward/overall"] and "val/reward_score" in expected[6]
    assert found == expected
    states = [read_state(folder / "global_step_6") for folder in (whole, run)]
    for name in ("loader", "kl", "files", "best_global_step", "best_val_reward_score"):
        assert states[0][name] == states[1][name], name


def test_seconds_are_counted_on(tmp_path: Path) -> None:
    args = small_run(tmp_path)
    assert main(["train", *args]) == 0
    path = tmp_path / "run" / "global_step_1" / "trainer_state.json"
    state = json.loads(path.read_text())
    assert 0 < state["elapsed_s"] < 1000
    path.write_text(json.dumps(state | {"elapsed_s": 5000.0}))
    assert main(["train", *args, "trainer.max_steps=2"]) == 0
    assert read_state(tmp_path / "run" / "global_step_2")["elapsed_s"] > 5000
    assert read_log(tmp_path / "run" / "experiment_log.jsonl")[2]["perf/elapsed_s"] > 5000


def test_saving_behind_changes_nothing_but_what_the_step_pays(tmp_path: Path) -> None:
    args = small_run(tmp_path, "qwen2_5_vl", "trainer.save_freq=1", "trainer.max_steps=3")
    at_once = tmp_path / "at_once"
    assert main(["train", *args]) == 0
    assert main(["train", *args, "trainer.async_save=false", f"trainer.save_checkpoint_path={at_once}"]) == 0
    assert all(same_weights(tmp_path / "run", at_once, step) for step in (1, 2, 3))
    assert all("timing_s/save_checkpoint" in found for found in read_log(at_once / "experiment_log.jsonl").values())


def test_a_save_behind_that_fails_ends_the_run_with_the_same_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr("foveal.train.snapshot.write_actor", full)
    args = small_run(tmp_path, "qwen2_5_vl", "trainer.save_freq=1", "trainer.max_steps=50")
    assert main(["train", *args]) == 1
    error = capsys.readouterr().err
    assert "cannot write the checkpoint of step 1: No space left on device" in error and "Traceback" not in error
    assert max(read_log(tmp_path / "run" / "experiment_log.jsonl")) <= 3


def test_a_second_signal_ends_the_run_while_the_first_one_waits_for_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(load_config(small_run(tmp_path)))
    written, ended = threading.Event(), threading.Event()

    def write(_folder: Path) -> None:
        written.wait(20)
        ended.set()

    def stop() -> None:
        trainer.checkpoints.save(1, write, None, background=True)
        raise Stopped(signal.SIGINT)

    def interrupt(_reason: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "_run", stop)
    monkeypatch.setattr(trainer, "_save_after", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    waited = ended.is_set()
    written.set()
    assert not waited


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = small_run(tmp_path, "qwen2_5_vl", "trainer.save_freq=1", "trainer.max_steps=2")
    assert main(["train", *args]) == 0
    shard = tmp_path / "run" / "global_step_2" / "actor" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    capsys.readouterr()
    assert main(["train", *args]) == 0
    output = capsys.readouterr()
    assert "passing over a checkpoint" in output.err and "__0_0.distcp holds something else" in output.err
    assert "going on after step 1 of 2" in output.out


def test_the_best_checkpoint_is_gone_on_from_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = small_run(tmp_path, "qwen2_5_vl", "trainer.save_freq=1", "trainer.val_freq=1", "trainer.max_steps=3")
    args += ["trainer.best_metric=val_response_length/mean", "trainer.best_mode=min"]
    assert main(["train", *args]) == 0
    best = json.loads((tmp_path / "run" / "checkpoint_tracker.json").read_text())["best_global_step"]
    capsys.readouterr()
    assert main(["train", *args, "trainer.load_checkpoint_path=best", "trainer.max_steps=4"]) == 0
    assert f"global_step_{best}: going on after step {best} of 4" in capsys.readouterr().out


def test_a_run_killed_while_it_replaced_a_step_goes_on_from_the_former_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = small_run(tmp_path)
    assert main(["train", *args]) == 0
    (tmp_path / "run" / "global_step_1").rename(tmp_path / "run" / "global_step_1.replaced")
    assert main(["train", *args]) == 0
    assert "after step 1 of 1" in capsys.readouterr().out


def test_the_latest_checkpoint_is_scored_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = small_run(tmp_path)
    assert main(["train", *args]) == 0
    assert main(["eval", "latest", *args]) == 0
    assert f"scoring {tmp_path / 'run' / 'global_step_1'}" in capsys.readouterr().out


def test_a_metric_that_validation_does_not_give_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = small_run(tmp_path, "qwen2_5_vl", "trainer.val_freq=1", "trainer.max_steps=2")
    assert main(["train", *args, "trainer.best_metric=val/no_such"]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "best_metric" in line]
    assert "val/reward_score" in line


def test_other_rows_are_refused_wherever_they_lie_and_begun_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = small_run(tmp_path)
    assert main(["train", *args]) == 0
    more = [*args, "trainer.max_steps=2"]
    moved = write_rows(tmp_path / "data", name="moved.jsonl")
    write_rows(tmp_path / "data", answer="pink")  # the same place, other rows
    for place in ([], [f"trainer.load_checkpoint_path={tmp_path / 'run' / 'global_step_1'}"]):
        capsys.readouterr()
        assert main(["train", *more, *place]) == 1
        error = capsys.readouterr().err
        assert "was trained on other rows" in error and "trainer.restart_data=true" in error
    assert main(["train", *more, f"data.train_files={moved}"]) == 0
    assert "going on after step 1 of 2" in capsys.readouterr().out
    assert main(["train", *args, "trainer.max_steps=3", "trainer.restart_data=true"]) == 0
    assert "begin anew" in capsys.readouterr().out
    loader = read_state(tmp_path / "run" / "global_step_3")["loader"]
    assert (loader["epoch"], loader["position"]) == (0, 4)


def test_a_plain_model_gives_a_new_run_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = small_run(tmp_path, "qwen2_5_vl", "worker.actor.optim.lr=0.0")
    other = build_tiny(tmp_path / "other", "qwen2_5_vl", seed=5)
    assert main(["train", *args, f"trainer.load_checkpoint_path={other}"]) == 0
    assert f"starting from the weights in {other}: step 0, with a fresh optimizer" in capsys.readouterr().out
    (record,) = read_log(tmp_path / "run" / "experiment_log.jsonl").values()
    assert record["actor/kl_loss"] > 0.001  # the reference is still model_path
    run = tmp_path / "from_other"
    change = [f"worker.actor.model.model_path={other}", f"trainer.save_checkpoint_path={run}"]
    assert main(["train", *args, *change]) == 0
    assert same_weights(tmp_path / "run", run, 1)


def test_validation_alone_takes_a_plain_model_by_the_same_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = small_run(tmp_path)
    other = build_tiny(tmp_path / "other", "qwen2_5_vl", seed=5)
    assert main(["train", *args, "trainer.val_only=true", f"trainer.load_checkpoint_path={other}"]) == 0
    assert f"scoring {other}" in capsys.readouterr().out


def test_a_plain_model_of_another_shape_is_refused_before_one_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = small_run(tmp_path)
    other = build_tiny(tmp_path / "other", "qwen3_vl")
    monkeypatch.setattr("foveal.trainer.start_workers", None)
    assert main(["train", *args, f"trainer.load_checkpoint_path={other}"]) == 1
    assert "of another model than worker.actor.model.model_path" in capsys.readouterr().err


def test_a_tracker_goes_on_with_its_run_by_what_the_checkpoint_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    args = small_run(tmp_path, "qwen2_5_vl", "trainer.logger=[mlflow]", "trainer.project_name=proj")
    assert main(["train", *args, "trainer.max_steps=2"]) == 0
    run = tmp_path / "run"
    assert read_state(run / "global_step_2")["trackers"] == json.loads((run / "trackers.json").read_text())
    moved = ["trainer.save_checkpoint_path=" + str(tmp_path / "moved"), "trainer.max_steps=3"]
    assert main(["train", *args, *moved, f"trainer.load_checkpoint_path={run}"]) == 0
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("proj").experiment_id])
    assert [point.step for point in client.get_metric_history(found.info.run_id, "reward/overall")] == [1, 2, 3]
    renamed = ["trainer.experiment_name=another", "trainer.save_checkpoint_path=" + str(tmp_path / "renamed")]
    assert main(["train", *args, *renamed, "trainer.max_steps=3", f"trainer.load_checkpoint_path={run}"]) == 0
    assert len(client.search_runs([client.get_experiment_by_name("proj").experiment_id])) == 2


def test_groups_left_over_come_back_as_they_were(tmp_path: Path) -> None:
    def answer(role: Any) -> Response:
        tokens = np.arange(3, dtype=np.int64)
        logprobs = np.array([-0.1, -2.5, -1e-9], np.float32)
        return Response(tokens, logprobs, "stop", "é?", {"overall": 0.25, "x": 1.0}, [(0, 4)], role, {"mask": tokens})

    prompts = {uid: Prompt(uid, [1], [1], [], {}, 7, "a") for uid in ("train-0-7", "train-1-2")}
    groups = [Group(prompt, [answer("trained"), answer("baseline")]) for prompt in prompts.values()]
    path = tmp_path / "surplus.safetensors"
    path.write_bytes(dump_groups(groups))
    found = read_groups(path, prompts.__getitem__)
    assert [group.prompt for group in found] == list(prompts.values())
    for response, expected in zip(found[1].responses, groups[1].responses, strict=True):
        assert response.logprobs.dtype == np.float32 and np.array_equal(response.logprobs, expected.logprobs)
        assert np.array_equal(response.token_ids, expected.token_ids) and not response.columns
        for name in ("finish_reason", "text", "rewards", "weight_spans", "role"):
            assert getattr(response, name) == getattr(expected, name)
