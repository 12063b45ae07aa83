"""`trainer.profile_steps`: a trace and a summary of a step, and nothing else about the run changes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from foveal.cli import main
from foveal.train.profile import MICRO_BATCHES, Profile
from foveal.train.profile_summary import TraceCounts
from tests.small_run import read_log, small_run

CPU = torch.device("cpu")


def events(path: Path) -> list[dict]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of two steps, `plain` and `profiled`: the second with a profile of step 2."""
    root = tmp_path_factory.mktemp("runs")
    for name, steps in (("plain", "[]"), ("profiled", "[2]")):
        arguments = small_run(root, "qwen2_5_vl", f"trainer.save_checkpoint_path={root / name}", "trainer.max_steps=2")
        assert main(["train", *arguments, f"trainer.profile_steps={steps}"]) == 0
    return root


def test_a_profiled_step_leaves_a_trace_and_a_summary_of_its_phases(runs: Path) -> None:
    folder = runs / "profiled" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["step_2.json.gz", "step_2.txt"]
    found = events(folder / "step_2.json.gz")
    phases = {event["name"]: event for event in found if event.get("cat") == "user_annotation"}
    assert {"gen", "ref", "update_actor", "update_actor, optimizer"} <= phases.keys()
    update = phases["update_actor"]
    inside = {
        event["name"]
        for event in found
        if event.get("cat") == "cpu_op" and update["ts"] <= event["ts"] <= update["ts"] + update["dur"]
    }
    assert "aten::mm" in inside and any("Backward" in name for name in inside)

    text = (folder / "step_2.txt").read_text()
    assert "step 2 on CPU" in text
    for phase in ("gen", "ref", "update_actor", "update_actor, optimizer"):
        assert f"\n{phase} " in text and f"\n{phase}: operators that took longest" in text
    assert " reward " in text.split("as the trainer measured it")[1].split("\n")[0]


def test_a_profiled_run_learns_the_same(runs: Path) -> None:
    assert not (runs / "plain" / "profile").exists()
    for plain, profiled in zip(read_log(runs / "plain"), read_log(runs / "profiled"), strict=True):
        for section in ("actor", "reward", "response_length"):
            assert plain[section] == profiled[section]


def test_a_phase_is_recorded_once_and_only_its_beginning(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    profile = Profile(CPU, tmp_path, 3)
    for _ in range(2):
        with profile.phase("old"):
            for _ in range(MICRO_BATCHES + 2):
                profile.tick()
                layer(torch.zeros(1, 4))
    profile.write({"old": 1.0})
    assert sum(event["name"] == "aten::linear" for event in events(tmp_path / "step_3.json.gz")) == MICRO_BATCHES
    assert f"{MICRO_BATCHES} of {2 * MICRO_BATCHES + 4} micro-batches" in (tmp_path / "step_3.txt").read_text()


def test_an_optimizer_that_comes_after_the_recorded_part_is_still_seen(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters())
    profile = Profile(CPU, tmp_path, 1)
    with profile.phase("update_actor"):
        for _ in range(MICRO_BATCHES + 1):
            profile.tick()
            layer(torch.zeros(1, 4)).sum().backward()
        optimizer.step()
    profile.write({})
    (step,) = [event for event in events(tmp_path / "step_1.json.gz") if event["name"] == "update_actor, optimizer"]
    assert step["cat"] == "user_annotation"
    assert not _global_optimizer_pre_hooks


def test_a_phase_without_anything_is_still_a_trace(tmp_path: Path) -> None:
    assert "profile of step 1" in Profile(CPU, tmp_path, 1).write({"adv": 0.1})
    with gzip.open(tmp_path / "step_1.json.gz", "rt") as file:
        assert json.load(file) == {"traceEvents": [], "traceName": "step_1.json.gz"}


def test_a_folder_that_cannot_be_written_costs_only_the_profile(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "could not be written" in Profile(CPU, tmp_path / "file", 1).write({})


def test_time_of_operators_is_their_own_and_overlaps_count_once() -> None:
    def event(name: str, ts: float, dur: float, tid: int = 1) -> dict:
        return {"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}

    counts = TraceCounts(
        [
            event("linear", 0, 10e6),
            event("addmm", 2e6, 7e6),
            event("linear", 20e6, 1e6),
            event("mul", 5e6, 10e6, tid=2),
        ],
        "cpu_op",
    )
    assert counts.names == {"linear": (4.0, 2), "addmm": (7.0, 1), "mul": (10.0, 1)}
    assert counts.busy_s == 16.0
