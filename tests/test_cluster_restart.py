"""Runs that lose workers and go on by themselves: to the same weights as one that lost none."""

from __future__ import annotations

import os
import re
import signal
import sys
import uuid
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from foveal import restart
from foveal.cli import main
from foveal.config import Config, load_config
from foveal.config.rules import no_effect, remarks
from foveal.errors import DataError, DeviceMemoryError, EngineError, FovealError, WorkerError
from foveal.track.file import read_log
from foveal.train.checkpoint import load_trained
from tests.cluster_support import MARK, Strikes, import_this_checkout, kill, nothing_is_left
from tests.small_run import small_run

STEPS = 4


def hang(crew: Any, _victim: Any) -> None:
    """Leaves the worker stopped, and gives the stage few seconds."""
    crew.timeout = 9


def go_on(crew: Any, victim: Any) -> None:
    os.kill(victim.pid, signal.SIGCONT)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_trained(run / f"global_step_{STEPS}", dtype=torch.float32).state_dict()


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the processes of a run in a cluster of its own."""
    pytest.importorskip("ray")
    mark = uuid.uuid4().hex
    for name, value in {"RAY_ADDRESS": "local", "HF_HUB_OFFLINE": "1", MARK: mark}.items():
        monkeypatch.setenv(name, value)
    return mark


@pytest.mark.slow
def test_a_run_that_lost_workers_in_every_stage_ends_with_the_same_weights(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    several = ["trainer.n_gpus_per_node=2", f"trainer.max_steps={STEPS}", "trainer.save_freq=1", "data.val_files=null"]
    args = small_run(tmp_path, "qwen2_5_vl", *several, "worker.actor.ppo_epochs=2", "trainer.async_save=false")
    assert main(["train", *args, f"trainer.save_checkpoint_path={tmp_path / 'whole'}"]) == 0
    strikes = Strikes(
        monkeypatch,
        [
            ("sampling", 1, kill),
            ("the policy's update", 1, kill),
            ("the policy's update", 0, hang),
            ("saving", 0, kill),
        ],
    )
    capfd.readouterr()
    assert main(["train", *args, "trainer.max_restarts=2"]) == 1
    hung = capfd.readouterr()
    assert main(["train", *args, "trainer.async_save=true"]) == 1
    saved = capfd.readouterr()
    assert not strikes.plan and max(strikes.seconds) < 60 and nothing_is_left(mark)
    one = r"worker 1 \(\S+, process \d+\)"
    for stage in ("sampling", "the policy's update"):
        assert len(re.findall(rf"warning: {one} died during {stage}: .*\nThe end of its log", hung.err)) == 1, hung.err
    late = rf"error: no progress for \d+ s in the policy's update, which {one} did not finish and where no call is answ"
    assert re.search(late, hung.err), hung.err
    assert re.search(r"restart 1 of 2 after \d+ s: going on after step 1; 0 finished steps and the one un", hung.out)
    assert re.search(r"restart 2 of 2 after \d+ s: going on after step 2; 0", hung.out), hung.out
    # it was written while the next step's answers were sampled: whichever notices first
    assert re.search(rf"error: {one} died during (saving global_step_\d|sampling): ", saved.err), saved.err
    assert saved.err.count(" died ") == 1, saved.err
    assert main(["train", *args]) == 0
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert list(read_log(tmp_path / "run" / "experiment_log.jsonl")) == [1, 2, 3, 4]


class Scripted:
    """Takes the trainer's place: each time it is built it does what comes next in `script`.

    A step number is how far it comes before its workers die, with a checkpoint where that is above 0; errors are raised
    by `fit`, or as it is built where they stand in a list.
    """

    script: ClassVar[list[Any]] = []
    seen: ClassVar[list[tuple[str | None, bool, dict[str, str]]]] = []
    ceilings: ClassVar[list[int]] = []

    def __init__(self, config: Config, tracker_ids: dict[str, str], token_ceiling: int) -> None:
        self.ceilings.append(token_ceiling)
        trainer = config.trainer
        self.seen.append((trainer.load_checkpoint_path, trainer.find_last_checkpoint, dict(tracker_ids)))
        self.next = self.script.pop(0)
        if isinstance(self.next, list):
            raise self.next[0]
        self.step = self.next if isinstance(self.next, int) else 0
        self.checkpoints = self.trackers = self.signals = self
        self.written = self.step > 0
        self.run_ids = {"wandb": "abc"}
        self.asked = self.next == "asked"

    def fit(self) -> int:
        if self.next == "done":
            return 0
        if isinstance(self.next, FovealError):
            raise self.next
        raise WorkerError("worker 1 died")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(restart, "Trainer", Scripted)
    monkeypatch.setattr(restart, "_wait_for_devices", lambda config: None)
    monkeypatch.setattr(Scripted, "seen", [])
    monkeypatch.setattr(Scripted, "ceilings", [])

    def train(script: list[Any], *overrides: str) -> int:
        monkeypatch.setattr(Scripted, "script", script)
        most = ["trainer.max_restarts=2", "trainer.n_gpus_per_node=2"]
        return restart.train(load_config([*most, "worker.rollout.n=2", *overrides]))

    return train


def test_a_checkpoint_of_the_run_takes_the_place_of_the_one_it_began_with(run: Any) -> None:
    assert run([0, 3, "done"], "trainer.load_checkpoint_path=there", "trainer.find_last_checkpoint=false") == 0
    assert Scripted.seen == [("there", False, {}), ("there", False, {"wandb": "abc"}), (None, True, {"wandb": "abc"})]


@pytest.mark.parametrize(
    ("script", "overrides"),
    [
        ([1, 2, 3], []),
        ([DataError("a row"), "done"], []),
        ([DeviceMemoryError("a single answer"), "done"], []),
        ([DeviceMemoryError("too much", 50), "done"], ["worker.actor.token_budget=100"]),
        ([DeviceMemoryError("too much", 50), "done"], ["trainer.n_gpus_per_node=1"]),
        ([[EngineError("no vLLM")], "done"], []),
        (["asked", "done"], []),
        ([1, "done"], ["trainer.n_gpus_per_node=1"]),
    ],
)
def test_what_a_restart_cannot_cure_ends_the_run(run: Any, script: list[Any], overrides: list[str]) -> None:
    tries = 3 if script == [1, 2, 3] else 1
    with pytest.raises(FovealError):
        run(script, *overrides)
    assert len(Scripted.seen) == tries


def test_a_start_without_its_workers_and_a_dead_engine_count_as_losses(run: Any) -> None:
    assert run([EngineError("it died"), [WorkerError("worker 0 died")], "done"]) == 0


def test_passes_that_memory_did_not_suffice_for_are_smaller_from_then_on(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([DeviceMemoryError("too much", 500), 3, "done"]) == 0
    assert Scripted.ceilings == [sys.maxsize, 500, 500]
    said = capsys.readouterr()
    assert said.out.count("starts again, with passes of up to 500 tokens\n") == 1 and "too much" in said.err


def test_a_run_that_may_not_restart_says_that_it_could_have_gone_on(run: Any) -> None:
    with pytest.raises(DeviceMemoryError, match=r"too much\n.* trainer\.max_restarts above 0 .* up to 500 tokens"):
        run([DeviceMemoryError("too much", 500)], "trainer.max_restarts=0")
    with pytest.raises(DeviceMemoryError, match=r"^too much$"):
        run([DeviceMemoryError("too much", 500), DeviceMemoryError("too much", 250)], "trainer.max_restarts=1")


@pytest.mark.slow
def test_memory_that_runs_out_in_one_of_two_workers(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other waits for it in a collective; without a restart a message says what to do, at once."""
    from foveal.cluster import ray_group
    from tests.short_of_memory import ShortOfMemory

    import_this_checkout(monkeypatch)
    several = ["trainer.n_gpus_per_node=2", "trainer.max_steps=2", "trainer.save_freq=1", "data.val_files=null"]
    args = small_run(tmp_path, "qwen2_5_vl", *several, "trainer.async_save=false")
    monkeypatch.setattr(ray_group, "Member", ShortOfMemory)
    strikes = Strikes(monkeypatch, [("the policy's update", 1, go_on)])  # it tells the seconds
    assert main(["train", *args]) == 1
    error = capfd.readouterr().err
    assert max(strikes.seconds) < 60 and nothing_is_left(mark), strikes.seconds
    assert "error: out of memory in the policy's update: a pass of " in error, error
    budget = re.search(r"Set worker\.actor\.token_budget=(\d+) or less", error)
    assert budget and f"with passes of up to {int(budget[1]):,} tokens." in error, error
    assert main(["train", *args, "trainer.max_restarts=1"]) == 0
    said = capfd.readouterr().out
    assert f"starts again, with passes of up to {int(budget[1]):,} tokens" in said, said
    assert "going on after step 1; 0 finished steps" in said, said
    assert list(read_log(tmp_path / "run" / "experiment_log.jsonl")) == [1, 2]


def test_it_is_said_where_restarts_do_little_or_nothing() -> None:
    def told(*overrides: str) -> tuple[bool, bool]:
        several = ["trainer.max_restarts=2", "trainer.n_gpus_per_node=2", "worker.rollout.n=2"]
        config = load_config([*several, *overrides])
        nothing = any("trainer.max_restarts" in line for line in no_effect(config, "transformers"))
        return nothing, any("starts over" in line for line in remarks(config))

    assert told() == (False, True)
    assert told("trainer.save_freq=5") == (False, False)
    assert told("trainer.save_freq=5", "trainer.n_gpus_per_node=1") == (True, False)
    assert told("trainer.save_freq=5", "trainer.val_only=true") == (True, False)
