"""`foveal train` with an engine on a device of its own, by turns with the trainer and one step ahead of it."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foveal.cli import main
from tests.cluster_support import Run, processes
from tests.small_run import read_log, small_run

ray: Any = pytest.importorskip("ray")
pytest.importorskip("vllm")
pytestmark = pytest.mark.slow
STEPS = 3
COMPARED = ("grad_norm", "pg_loss", "kl_loss", "entropy_loss", "ppo_kl", "is_weight")
VLLM = ("worker.rollout.name=vllm", "worker.rollout.dtype=fp32", "worker.rollout.tensor_parallel_size=1")
APART = ("trainer.n_gpus_per_node=2", "cluster.rollout_devices=1")
AHEAD = (*APART, "trainer.async_rollout=true")
TIS = "algorithm.correction=tis"

FAILING = """
REWARD_NAME = "failing"
REWARD_TYPE = "batch"
calls = 0


def score(rows):
    global calls
    calls += 1
    if calls == 3:
        raise ValueError("a broken reward")
    return [{"overall": (i * 7 % 5) / 4} for i in range(len(rows))]
"""


@pytest.fixture(autouse=True)
def own_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    yield
    assert not ray.is_initialized()


def arguments(root: Path, name: str, *overrides: str) -> list[str]:
    return small_run(
        root,
        "qwen2_5_vl",
        f"trainer.max_steps={STEPS}",
        f"trainer.save_checkpoint_path={root / name}",
        "worker.rollout.n=2",
        "data.val_files=null",
        *VLLM,
        *overrides,
    )


def train(root: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    assert main(["train", *arguments(root, name, *overrides)]) == 0
    return read_log(root / name)


def same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert len(found) == len(wanted) == STEPS
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine["response_length"] == theirs["response_length"]
        assert COMPARED[0] in theirs["actor"]
        for name in COMPARED:
            assert mine["actor"].get(name) == pytest.approx(theirs["actor"].get(name), abs=1e-5), name


def weights(root: Path, name: str) -> dict[str, torch.Tensor]:
    [file] = (root / name / f"global_step_{STEPS}" / "actor" / "huggingface").glob("*.safetensors")
    return load_file(file)


def test_an_engine_apart_gives_the_run_of_one_process(tmp_path: Path) -> None:
    wanted = train(tmp_path, "one", "trainer.save_hf=true")
    found = train(tmp_path, "apart", "trainer.save_hf=true", *APART)
    same(found, wanted)
    theirs = weights(tmp_path, "one")
    assert all(torch.allclose(tensor, theirs[name], atol=1e-5) for name, tensor in weights(tmp_path, "apart").items())
    perf = found[0]["perf"]
    assert 0 < perf["idle_s"]["trainer"] < perf["time_per_step"] and perf["idle_s"]["engine"] > 0
    assert perf["tokens_per_s"]["gen"] > 0


def test_two_engines_sample_with_the_weights_of_every_update(tmp_path: Path) -> None:
    with open(Path(tempfile.gettempdir()) / "foveal_vllm_parallel.lock", "w") as lock:
        # vLLM names the memory that its CPU processes share after their ranks alone: two runs would meet in it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        records = train(tmp_path, "apart", "trainer.n_gpus_per_node=3", "cluster.rollout_devices=2")
    assert [record["actor"]["grad_norm"] > 0 for record in records] == [True] * STEPS
    assert max(record["rollout"]["logprob_gap"]["max"] for record in records) < 1e-4


def test_a_step_ahead_answers_come_from_the_weights_before_the_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = train(tmp_path, "ahead", *AHEAD, "trainer.save_freq=2")
    output = capsys.readouterr().out
    assert "algorithm.correction=tis corrects for" in output
    assert [record["rollout"]["staleness"] for record in records] == [0, 1, 1]
    gaps = [record["rollout"]["logprob_gap"]["mean"] for record in records]
    assert gaps[0] < 1e-4 < 1e-3 < min(gaps[1:])  # what one update has changed
    for record in records:
        assert all(abs(value) < float("inf") for value in record["actor"].values())
        assert {"trainer", "engine"} == record["perf"]["idle_s"].keys()
    # a resumed run samples again what was ahead when the checkpoint was written
    (tmp_path / "resumed").mkdir()
    (tmp_path / "ahead" / "global_step_2").rename(tmp_path / "resumed" / "global_step_2")
    [last] = train(tmp_path, "resumed", *AHEAD)
    assert last["rollout"]["staleness"] == 0
    assert last["prompt_length"] == records[2]["prompt_length"]


def test_without_learning_a_step_ahead_gives_the_same_run(tmp_path: Path) -> None:
    frozen = (
        "worker.actor.optim.lr=0",
        "data.val_files=" + str(tmp_path / "data" / "rows.jsonl"),
        "trainer.val_freq=2",
    )
    wanted = train(tmp_path, "one", TIS, *frozen)
    found = train(tmp_path, "ahead", *AHEAD, *frozen)
    same(found, wanted)
    assert found[1]["val"] == wanted[1]["val"]


def test_an_error_ahead_ends_the_run_with_what_was_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    failing = f"worker.reward.reward_function={tmp_path / 'failing.py'}:score"
    assert main(["train", *arguments(tmp_path, "failing", *AHEAD, failing)]) == 1
    captured = capsys.readouterr()
    assert "a broken reward" in captured.err and "saving step 2" in captured.out, captured
    assert (tmp_path / "failing" / "global_step_2").is_dir()


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGTERM])
def test_weights_are_saved_when_sampling_ahead_ends_early(tmp_path: Path, strike: signal.Signals) -> None:
    run = Run(tmp_path, *VLLM, *AHEAD, "data.max_response_length=300", "worker.rollout.ignore_eos=true")
    run.wait_for("step 1/5", 400)
    if strike == signal.SIGTERM:
        run.process.send_signal(strike)
    else:
        [engine] = [pid for pid, command in processes(run.mark).items() if command.startswith("ray::EngineMember")]
        os.kill(engine, strike)
    status, output = run.end(60)
    saved = re.search(r"saving step (\d) before stopping", output)
    assert saved and (tmp_path / "run" / f"global_step_{saved[1]}").is_dir(), output
    if strike == signal.SIGTERM:
        assert status == 128 + strike, output
    else:
        assert status == 1 and f"worker 1 ({socket.gethostname()}, process {engine}) died during " in output
