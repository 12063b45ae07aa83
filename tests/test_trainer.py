"""Whole runs through the command line: what they write, how they go on, how they end."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from foveal.cli import main
from foveal.config import load_config
from foveal.data.loader import PromptLoader
from foveal.errors import ModelError
from foveal.folder import RunFolder
from foveal.quickstart.tiny import build_tiny
from foveal.resume import check_settings, saved_settings
from foveal.reward.contract import FunctionInfo
from foveal.reward.pool import RewardProcess
from foveal.train.checkpoint import load_trained
from foveal.types import Media, Prompt
from tests.small_run import read_log, small_run, write_rows


def flat(record: dict, prefix: str = "") -> dict[str, float]:
    out: dict[str, float] = {}
    for key, value in record.items():
        out |= flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_trained(run / f"global_step_{step}", dtype=torch.float32).state_dict()


def test_a_run_leaves_the_files_and_metrics_that_easyr1_leaves(tmp_path: Path) -> None:
    assert main(["train", *small_run(tmp_path), "trainer.val_freq=1"]) == 0
    run = tmp_path / "run"
    assert (run / "global_step_1" / "actor" / "huggingface" / "config.json").exists()
    tracker = json.loads((run / "checkpoint_tracker.json").read_text())
    assert tracker["last_global_step"] == 1
    assert tracker["last_actor_path"].endswith("global_step_1/actor")
    assert (run / "experiment_config.json").exists()
    names: set[str] = set()
    for record in read_log(run):
        names |= flat(record).keys()
    expected = [
        "reward/overall",
        "reward/accuracy",
        "critic/score/mean",
        "critic/rewards/max",
        "critic/advantages/min",
        "critic/returns/mean",
        "response_length/mean",
        "response_length/clip_ratio",
        "prompt_length/max",
        "actor/pg_loss",
        "actor/ppo_kl",
        "actor/entropy_loss",
        "actor/pg_clipfrac_higher",
        "actor/pg_clipfrac_lower",
        "actor/kl_loss",
        "actor/kl_coef",
        "actor/grad_norm",
        "actor/lr",
        "timing_s/gen",
        "timing_s/reward",
        "timing_s/ref",
        "timing_s/adv",
        "timing_s/update_actor",
        "timing_s/step",
        "timing_s/validation",
        "timing_s/save_checkpoint",
        "timing_per_token_ms/gen",
        "perf/total_num_tokens",
        "perf/time_per_step",
        "perf/throughput",
        "perf/tokens_per_s/gen",
        "perf/tokens_per_s/ref",
        "perf/peer_tokens_per_s/update_actor",
        "perf/cpu_memory_used_gb",
        "val/reward_score",
        "val/accuracy_reward",
        "val_response_length/mean",
    ]
    assert set(expected) <= names, set(expected) - names


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_vl"])
def test_every_vision_family_trains(tmp_path: Path, family: str) -> None:
    assert main(["train", *small_run(tmp_path, family, "trainer.max_steps=2")]) == 0  # type: ignore[arg-type]
    steps = [r for r in read_log(tmp_path / "run") if "actor" in r]
    assert len(steps) == 2 and all(r["actor"]["grad_norm"] > 0 for r in steps)


def test_training_moves_the_weights_and_zero_rate_does_not(tmp_path: Path) -> None:
    args = small_run(tmp_path, "qwen2_5_vl", "trainer.save_freq=1", "trainer.max_steps=2")
    assert main(["train", *args]) == 0
    first, second = weights(tmp_path / "run", 1), weights(tmp_path / "run", 2)
    assert any(not torch.equal(first[k], second[k]) for k in first)
    still = tmp_path / "still"
    args = [*args, "worker.actor.optim.lr=0.0", f"trainer.save_checkpoint_path={still}"]
    assert main(["train", *args]) == 0
    first, second = weights(still, 1), weights(still, 2)
    assert all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    common = ["trainer.save_freq=1", "data.shuffle=true", "data.rollout_batch_size=4", "worker.actor.ppo_epochs=2"]
    whole = small_run(tmp_path, "qwen3_vl", *common, "trainer.max_steps=4")
    assert main(["train", *whole]) == 0
    parts = [*whole, f"trainer.save_checkpoint_path={tmp_path / 'parts'}"]
    assert main(["train", *parts, "trainer.max_steps=2"]) == 0
    assert main(["train", *parts]) == 0
    expected, found = weights(tmp_path / "run", 4), weights(tmp_path / "parts", 4)
    assert all(torch.equal(expected[k], found[k]) for k in expected)
    numbers = [
        [(r["actor"]["pg_loss"], r["actor"]["kl_loss"], r["reward"]["overall"]) for r in read_log(p) if "actor" in r]
        for p in (tmp_path / "run", tmp_path / "parts")
    ]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 4


def test_a_step_is_one_record_with_everything_that_happened_in_it(tmp_path: Path) -> None:
    assert main(["train", *small_run(tmp_path), "trainer.max_steps=2", "trainer.val_freq=1"]) == 0
    records = read_log(tmp_path / "run")
    assert [r["step"] for r in records] == [1, 2]
    assert "save_checkpoint" in records[1]["timing_s"] and "validation" in records[1]["timing_s"]


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ([], []),
        (["trainer.val_before_train=true"], [0, 3]),
        (["trainer.val_freq=2"], [2, 3]),
        (["trainer.val_freq=1", "trainer.val_before_train=true"], [0, 1, 2, 3]),
    ],
)
def test_validation_comes_when_it_is_asked_for(tmp_path: Path, asked: list[str], steps: list[int]) -> None:
    assert main(["train", *small_run(tmp_path), "trainer.max_steps=3", *asked]) == 0
    assert [r["step"] for r in read_log(tmp_path / "run") if "val" in r] == steps


def test_a_validation_without_any_score_is_not_repeated(tmp_path: Path) -> None:
    reward = tmp_path / "nan.py"
    reward.write_text("def score(rows):\n    return [{'overall': float('nan')} for _ in rows]\n")
    change = f"worker.reward.reward_function={reward}:score"
    assert main(["train", *small_run(tmp_path, "qwen2_5_vl", change, "trainer.val_freq=1")]) == 0
    assert sum("timing_s" in r and "validation" in r["timing_s"] for r in read_log(tmp_path / "run")) == 1


def test_a_validation_keeps_no_pictures_of_earlier_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    batches = PromptLoader.batches

    def watched(self: PromptLoader) -> Iterator[list[Prompt]]:
        seen: list[weakref.ref[Media]] = []
        for prompts in batches(self):
            seen += [weakref.ref(medium) for prompt in prompts for medium in prompt.media]
            yield prompts
            gc.collect()
            alive.append(sum(medium() is not None for medium in seen))

    monkeypatch.setattr(PromptLoader, "batches", watched)
    assert main(["train", *small_run(tmp_path), "trainer.val_only=true", "data.val_batch_size=1"]) == 0
    assert len(alive) == 8 and max(alive) <= 2


def test_a_reward_function_that_fails_late_costs_nothing_learned(tmp_path: Path) -> None:
    reward = tmp_path / "late.py"
    reward.write_text(
        "calls = []\n\n\ndef score(rows):\n    calls.append(1)\n    assert len(calls) < 3, 'deliberate failure'\n"
        "    return [{'overall': i % 2} for i in range(len(rows))]\n"
    )
    args = small_run(tmp_path, "qwen2_5_vl", f"worker.reward.reward_function={reward}:score", "trainer.max_steps=4")
    assert main(["train", *args]) == 1
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == ["global_step_2"]
    assert main(["train", *args]) == 0
    assert [r["step"] for r in read_log(tmp_path / "run") if "actor" in r] == [1, 2, 3, 4]


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_start_that_fails_leaves_no_reward_process(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ModelError("deliberate failure")

    started: list[RewardProcess] = []
    load = RewardProcess.load

    def noted(self: RewardProcess) -> FunctionInfo:
        started.append(self)
        return load(self)

    monkeypatch.setattr(RewardProcess, "load", noted)
    monkeypatch.setattr("foveal.cluster.worker.load_model", fail)
    args = small_run(tmp_path)
    assert main([command, *([str(tmp_path / "model_qwen2_5_vl")] if command == "eval" else []), *args]) == 1
    assert started and not any(process.alive for process in started)


def test_one_run_at_a_time_writes_to_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = RunFolder(tmp_path / "run")
    assert main(["train", *small_run(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "in use by another run" in error and str(os.getpid()) in error and "trainer.experiment_name" in error
    held.close()
    assert main(["train", *small_run(tmp_path)]) == 0


def test_going_on_with_another_model_or_other_rows_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = small_run(tmp_path)
    assert main(["train", *args]) == 0
    capsys.readouterr()
    monkeypatch.setattr("foveal.trainer.start_workers", None)  # it is refused before a model is loaded
    other = write_rows(tmp_path / "data", name="other.jsonl", answer="pink")
    assert main(["train", *args, "trainer.max_steps=2", f"data.train_files={other}"]) == 1
    error = capsys.readouterr().err
    assert "rows.jsonl" in error and "other.jsonl" in error and "trainer.find_last_checkpoint=false" in error
    build_tiny(tmp_path / "another", "qwen2_5_vl", seed=5)
    assert main(["train", *args, "trainer.max_steps=2", f"worker.actor.model.model_path={tmp_path / 'another'}"]) == 1
    assert "worker.actor.model.model_path was" in capsys.readouterr().err


def test_going_on_with_other_settings_says_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = small_run(tmp_path)
    assert main(["train", *args]) == 0
    capsys.readouterr()
    assert main(["train", *args, "trainer.max_steps=2", "worker.actor.optim.lr=5.0e-4", "worker.rollout.n=3"]) == 0
    output = capsys.readouterr().out
    assert "worker.actor.optim.lr 0.001 → 0.0005" in output and "worker.rollout.n 4 → 3" in output
    assert "trainer.max_steps" not in output.split("changed since the checkpoint")[1].splitlines()[0]


def test_a_mapping_that_was_empty_is_told_too() -> None:
    before = load_config(["worker.rollout.n=2"])
    after = load_config(["worker.rollout.n=2", "algorithm.reward_parts={accuracy: 1}"])
    told = check_settings({"settings": saved_settings(before)}, after, "somewhere")
    assert told == "changed since the checkpoint: algorithm.reward_parts {} → {'accuracy': 1.0}"
    assert check_settings({}, after, "somewhere") is None  # a checkpoint from before settings were saved


@pytest.mark.parametrize(
    ("score", "expected"), [("0.5", "compared with (scores: 0.5)"), ("float('nan')", "every answer was left out")]
)
def test_a_step_that_teaches_nothing_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], score: str, expected: str
) -> None:
    (tmp_path / "reward.py").write_text(f"def score(rows):\n    return [{{'overall': {score}}} for _ in rows]\n")
    assert main(["train", *small_run(tmp_path), "trainer.max_steps=3"]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "nothing was learned" in line]
    assert len(warnings) == 2 and expected in warnings[0] and "2 step(s) in a row" in warnings[1]


def test_a_finished_run_has_nothing_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = small_run(tmp_path)
    assert main(["train", *args]) == 0
    before = (tmp_path / "run" / "global_step_1" / "trainer_state.json").stat().st_mtime_ns
    capsys.readouterr()
    assert main(["train", *args]) == 0
    assert (tmp_path / "run" / "global_step_1" / "trainer_state.json").stat().st_mtime_ns == before
    assert "after step 1 of 1" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_next_start_goes_on(tmp_path: Path, signum: signal.Signals) -> None:
    args = small_run(tmp_path, "qwen2_5_vl", "trainer.max_steps=5000", "trainer.logger=[console]")
    process = subprocess.Popen(
        [sys.executable, "-m", "foveal", "train", *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    log = tmp_path / "run" / "experiment_log.jsonl"
    deadline = time.time() + 120
    while not (log.exists() and len(log.read_text().splitlines()) >= 2):
        assert process.poll() is None and time.time() < deadline, process.stdout and process.stdout.read()
        time.sleep(0.1)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum, output
    assert "Traceback" not in output
    step = json.loads((tmp_path / "run" / "checkpoint_tracker.json").read_text())["last_global_step"]
    assert step >= 2
    assert main(["train", *args, f"trainer.max_steps={step + 1}"]) == 0
    assert [r["step"] for r in read_log(tmp_path / "run") if "actor" in r] == list(range(1, step + 2))


def test_eval_scores_a_folder_and_a_checkpoint_alike(tmp_path: Path) -> None:
    args = small_run(tmp_path, "qwen3_vl", "trainer.val_generations_to_log=2", "trainer.val_freq=1")
    assert main(["train", *args]) == 0
    run = tmp_path / "run"
    assert main(["merge", "--local_dir", str(run / "global_step_1" / "actor")]) == 0
    scores = []
    for name, model in (("a", run / "global_step_1"), ("b", run / "global_step_1" / "actor" / "huggingface")):
        out = tmp_path / name
        assert main(["eval", str(model), *args, f"trainer.save_checkpoint_path={out}"]) == 0
        (folder,) = (out / "eval").iterdir()
        (record,) = read_log(folder)
        scores.append((record["val"], record["val_response_length"]))
        assert (folder / "generations.log").read_text()
        assert not list(out.glob("global_step_*"))
    assert scores[0] == scores[1]
    final = [r for r in read_log(run) if "val" in r][-1]
    assert final["val"]["reward_score"] == scores[0][0]["reward_score"]


def test_a_state_without_a_step_is_enough_for_eval_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = small_run(tmp_path)
    assert main(["train", *args]) == 0
    (tmp_path / "run" / "global_step_1" / "trainer_state.json").write_text("{}")
    assert main(["eval", str(tmp_path / "run" / "global_step_1"), *args]) == 0
    capsys.readouterr()
    assert main(["train", *args, "trainer.max_steps=2"]) == 1
    assert "trainer_state.json lacks step, loader, kl: the checkpoint is damaged" in capsys.readouterr().err


def test_eval_takes_a_checkpoint_under_another_name(tmp_path: Path) -> None:
    args = small_run(tmp_path)
    assert main(["train", *args]) == 0
    shutil.move(tmp_path / "run" / "global_step_1", tmp_path / "best")
    assert main(["eval", str(tmp_path / "best"), *args]) == 0
    (folder,) = (tmp_path / "run" / "eval").iterdir()
    (record,) = read_log(folder)
    assert record["step"] == 1


def test_val_only_scores_the_model_path(tmp_path: Path) -> None:
    assert main(["train", *small_run(tmp_path, "qwen2_5_vl", "trainer.val_only=true")]) == 0
    (folder,) = (tmp_path / "run" / "eval").iterdir()
    (record,) = read_log(folder)
    assert "reward_score" in record["val"] and "actor" not in record


def test_a_run_lists_the_rows_that_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = small_run(tmp_path)
    rows = write_rows(tmp_path / "more", 9)
    with rows.open("a") as file:
        file.write('{"problem": "<image>Which color?", "answer": "red", "images": ["absent.png"]}\n')
    assert main(["train", *arguments, f"data.train_files={rows}", f"data.image_dir={rows.parent}"]) == 0
    account = tmp_path / "run" / "left_out_rows.jsonl"
    assert "row 9" in account.read_text() and str(account) in capsys.readouterr().out
