"""Runs with several workers end clearly, and with all that they started: stop signals, lost machines, dead rewards."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from foveal import restart
from foveal.cli import main
from foveal.config import Config
from foveal.track.file import read_log
from tests.cluster_support import Run, Strikes, one_machine
from tests.small_run import small_run

pytestmark = pytest.mark.slow
LONG = ("data.max_response_length=800", "worker.rollout.ignore_eos=true")
KILLED = """
import os, signal
from pathlib import Path

REWARD_TYPE = "batch"


def score(rows):
    mark = Path(__file__).with_suffix(".killed")
    if rows[0]["step"] == 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [{"overall": (i * 7 % 5) / 4} for i in range(len(rows))]
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster to join, of one machine with three CPUs."""
    ray = pytest.importorskip("ray")
    with one_machine() as made:
        monkeypatch.setenv("RAY_ADDRESS", made.address)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        try:
            yield made
            assert not ray.is_initialized()
            ray.init(address=made.address, log_to_driver=False, logging_level="error")
            groups = ray.util.placement_group_table().values()
            assert groups and {group["state"] for group in groups} == {"REMOVED"}
        finally:
            ray.shutdown()


def test_stop_signals_save_and_end_all_workers(tmp_path: Path, cluster: Any) -> None:
    run = Run(tmp_path, *LONG)
    run.wait_for("step 1/5")
    os.killpg(run.process.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
    status, output = run.end(90)
    assert status == 128 + signal.SIGINT
    first = saved_step(tmp_path / "run")
    assert "SIGINT" in output and first < 4, output
    run = Run(tmp_path, *LONG)
    run.wait_for(f"going on after step {first} of 5")
    run.wait_for(f"step {first + 1}/5")
    run.process.send_signal(signal.SIGTERM)
    status, output = run.end(90)
    assert status == 128 + signal.SIGTERM
    assert "SIGTERM" in output and saved_step(tmp_path / "run") > first, output


def saved_step(folder: Path) -> int:
    return max(int(checkpoint.name.rpartition("_")[2]) for checkpoint in folder.glob("global_step_*[0-9]"))


def test_workers_end_with_the_trainers_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    run = Run(tmp_path, *LONG)
    run.wait_for("metrics and sample answers")
    run.process.kill()
    run.process.wait(30)
    end = time.monotonic() + 60
    while run.members() and time.monotonic() < end:  # Ray's own agents see to themselves within minutes
        time.sleep(0.5)
    assert not run.members()


def test_a_run_survives_a_machine_that_comes_back_and_says_so_of_one_that_does_not(
    tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    nodes = [cluster.add_node(num_cpus=2)]

    def leave_in_order(_crew: Any, _victim: Any) -> None:
        cluster.remove_node(nodes[0], allow_graceful=True)

    def vanish(_crew: Any, victim: Any) -> None:
        gone = threading.Event()

        def hold() -> None:  # the kernel wakes a stopped process whose parent ends
            while not gone.wait(0.005):
                os.kill(victim.pid, signal.SIGSTOP)

        threading.Thread(target=hold, daemon=True).start()
        cluster.remove_node(nodes[1], allow_graceful=False)
        time.sleep(0.1)
        gone.set()

    strikes = Strikes(
        monkeypatch,
        [("sampling", 1, leave_in_order), ("the policy's update", 1, vanish)],
        pick=lambda crew: next(place for place in crew.places if place.node == nodes[-1].node_id),
    )
    wait = restart._wait_for_devices

    def wait_for_devices(config: Config) -> None:
        if len(nodes) == 1:
            nodes.append(cluster.add_node(num_cpus=2))
        else:
            config.trainer.stage_timeout = 6
        wait(config)

    monkeypatch.setattr(restart, "_wait_for_devices", wait_for_devices)
    args = small_run(tmp_path, "qwen2_5_vl", "trainer.nnodes=2", "trainer.max_steps=3", "data.val_files=null")
    args += ["trainer.max_restarts=5", "trainer.save_freq=1", "trainer.async_save=false"]
    try:
        assert main(["train", *args]) == 1
    finally:
        for pid in strikes.victims:  # of a machine that is only said to have vanished
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    error = capfd.readouterr().err
    assert not strikes.plan and max(strikes.seconds) < 60
    for stage, node in zip(("sampling", "the policy's update"), nodes, strict=True):
        lost = rf"warning: worker \d \(.*\) was lost during {stage}: its machine, node {node.node_id[:12]}, has left"
        assert len(re.findall(lost, error)) == 1, error
    assert re.search(r"error: .*the Ray cluster has these CPUs after 6 s of waiting: \S+ \(.*\): 3\. ", error), error
    assert list(read_log(tmp_path / "run" / "experiment_log.jsonl")) == [1, 2]


@pytest.mark.parametrize("on_error", ["raise", "score"])
def test_a_killed_reward_process_does_what_on_error_says(
    tmp_path: Path, on_error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    args = small_run(tmp_path, "qwen2_5_vl", "trainer.max_steps=3", "data.val_files=null")
    args += [f"worker.reward.reward_function={tmp_path / 'killed.py'}:score", f"worker.reward.on_error={on_error}"]
    assert main(["train", *args]) == (on_error == "raise")
    records = read_log(tmp_path / "run" / "experiment_log.jsonl")
    if on_error == "score":
        assert [records[step]["reward/errors"] for step in (1, 2, 3)] == [0, 16, 0]
        assert [records[step]["reward/restarts"] for step in (1, 2, 3)] == [0, 0, 1]
    else:
        assert "ended its process by signal 9" in capsys.readouterr().err
        assert list(records) == [1] and (tmp_path / "run" / "global_step_1").is_dir()
