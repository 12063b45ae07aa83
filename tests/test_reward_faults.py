"""What reward functions do wrong in the wild: the run's behaviour and its message for each."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from foveal.errors import RewardError
from tests.reward_support import make_group, make_runner, overall, score

SEQUENTIAL = 'REWARD_TYPE = "sequential"\n'
LEAK = """
import time
kept = []
def compute_score(inputs):
    for _ in range(200):
        kept.append(b"x" * 10_000_000)
        time.sleep(0.01)
    return [1.0] * len(inputs)
"""
SLOW_LEAK = """
import time
REWARD_TYPE = "sequential"
kept = []
def compute_score(one):
    kept.append(b"x" * 100_000_000)
    time.sleep(one["ground_truth"])
    return len(kept)
"""


def fails(folder: Path, source: str, *texts: str, **keys: Any) -> str:
    """The message of the run that ends over answers `texts`."""
    with pytest.raises(RewardError) as raised:
        score(make_runner(folder, source, **keys), make_group("the truth", *texts))
    return str(raised.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import ctypes; ctypes.string_at(0)", "ended its process by signal 11"),
        ("import os; os._exit(3)", "ended its process with exit code 3"),
        ("return 'good'", "returned str 'good' where a number"),
        ("return {'accuracy': 1.0}", "returned a dict without `overall`, with the keys ['accuracy']"),
        ("return {'overall': '1.0'}", "returned str '1.0' under the key 'overall'"),
        ("return None", "returned None where a number"),
        ("import sys; sys.exit()", "raised SystemExit"),
        ("def forever(): return forever()\n    return forever()", "raised RecursionError"),
        ("return one['absent']", "raised KeyError: 'absent'"),
    ],
)
def test_fault_ends_the_run_with_its_cause_and_the_sample(tmp_path: Path, body: str, said: str) -> None:
    message = fails(tmp_path, f"{SEQUENTIAL}def compute_score(one):\n    {body}", "first", "second")
    assert f"user_reward.py:compute_score {said}" in message
    assert "sample 0" in message and "'first'" in message and "'the truth'" in message


@pytest.mark.parametrize("result", ["[1.0]", "[1.0] * 3", "1.0", "{'overall': [1.0, 1.0]}"])
def test_batch_of_wrong_length_or_kind_says_what_is_expected(tmp_path: Path, result: str) -> None:
    message = fails(tmp_path, f"def compute_score(inputs): return {result}", "a", "b")
    assert "2" in message and "one for each answer" in message


def test_the_first_failure_is_shown_with_its_row_and_prompt(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = f"{SEQUENTIAL}def compute_score(one): raise ValueError('odd')"
    group = make_group("x", "a" * 3000, "b")
    group.prompt.row, group.prompt.row_index = {"problem": "How many?", "source": "geo"}, 17
    score(make_runner(tmp_path, source, on_error="score"), group)
    out = capfd.readouterr().out
    assert "a" * 3000 in out.replace("\n", "")
    assert "row 17 of the data" in out and "'source': 'geo'" in out and "ValueError: odd" in out
    assert out.count("row 17") == 1


def test_memory_beyond_the_limit_ends_the_process_and_names_the_key(tmp_path: Path) -> None:
    message = fails(tmp_path, LEAK, "a", memory_limit_gb=0.2)
    assert "GB of memory, on this answer of 1" in message
    assert "worker.reward.memory_limit_gb (0.2)" in message


def test_memory_at_import_ends_the_process_and_names_the_key(tmp_path: Path) -> None:
    source = "import time\nkept = bytearray(b'x' * 300_000_000)\ntime.sleep(60)\ndef compute_score(inputs): ..."
    message = fails(tmp_path, source, "a", memory_limit_gb=0.2)
    assert "GB of memory while the file was imported" in message and "memory_limit_gb" in message


@pytest.mark.parametrize(
    ("watch_every", "seconds", "scores"),
    [(60.0, 0.0, [1.0, 2.0, 3.0, 1.0, 2.0]), (0.1, 0.3, [1.0, 2.0, 1.0, 2.0, 1.0])],
    ids=["seen after a call", "seen within a call"],
)
def test_memory_kept_from_call_to_call_costs_a_process_and_no_score(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    watch_every: float,
    seconds: float,
    scores: list[float],
) -> None:
    monkeypatch.setattr("foveal.reward.process.WATCH_EVERY", watch_every)
    group = make_group(seconds, "a", "b", "c", "d", "e")
    metrics = score(make_runner(tmp_path, SLOW_LEAK, memory_limit_gb=0.25), group)
    assert overall(group) == scores
    assert metrics["reward/errors"] == 0.0
    assert metrics["reward/restarts"] == 1.0 + (seconds > 0)
    assert "grew from call to call beyond worker.reward.memory_limit_gb (0.25)" in capfd.readouterr().out


@pytest.mark.parametrize(
    "body",
    [
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9/')",
        "import httpx; httpx.get('http://127.0.0.1:9/')",
        "import socket; raise socket.gaierror(-3, 'Temporary failure in name resolution')",
    ],
)
def test_an_unreachable_network_is_named_as_the_cause(tmp_path: Path, body: str) -> None:
    message = fails(tmp_path, f"def compute_score(inputs):\n    {body}", "a")
    assert "reached no network" in message and "local path" in message


def test_an_unreachable_network_at_import_is_named_too(tmp_path: Path) -> None:
    source = "import socket\nsocket.create_connection(('127.0.0.1', 9))\ndef compute_score(inputs): ..."
    assert "reached no network" in fails(tmp_path, source, "a")


def test_other_errors_do_not_blame_the_network(tmp_path: Path) -> None:
    source = "def compute_score(inputs):\n    open('/nowhere/at/all')"
    assert "network" not in fails(tmp_path, source, "a")


def test_a_batch_call_has_a_limit_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import time\ndef compute_score(inputs): time.sleep(60)"
    begin = time.monotonic()
    message = fails(tmp_path, source, *"abcd", time_limit=30.0, batch_time_limit=0.4)
    assert "ran longer than 0.4 s" in message and "worker.reward.batch_time_limit" in message
    assert time.monotonic() - begin < 10


def test_forked_children_end_with_the_reward_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    source = f"""
    import os, time
    {SEQUENTIAL.strip()}
    def compute_score(one):
        if os.fork() == 0:
            with open({str(pids)!r}, "a") as file: print(os.getpid(), file=file)
            time.sleep(60)
        return 1.0
    """
    group = make_group("x", "a", "b")
    with make_runner(tmp_path, source) as runner:
        runner.submit(group)
        runner.finish()
        deadline = time.monotonic() + 10
        while not pids.exists() or len(pids.read_text().split()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert overall(group) == [1.0, 1.0]
    for pid in pids.read_text().split():
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            assert time.monotonic() < deadline, f"process {pid} of {os.getpid()} lives on"
            time.sleep(0.01)


def test_a_share_of_failures_beyond_the_limit_ends_the_run_with_an_account(tmp_path: Path) -> None:
    source = f"""
    {SEQUENTIAL.strip()}
    def compute_score(one):
        if one["response"] == "bad": raise ValueError("deliberate failure")
        return None if one["response"] == "odd" else 1.0
    """
    keys: dict[str, Any] = {"on_error": "score", "max_error_rate": 0.01}
    with make_runner(tmp_path, source, **keys) as runner:
        runner.submit(make_group("x", "fine", "bad", "bad", "odd"))
        assert runner.finish()["reward/errors"] == 3.0
        runner.submit(make_group("x", "bad", "bad", "bad", "fine"))
        with pytest.raises(RewardError) as raised:
            runner.finish()
    message = str(raised.value)
    assert "6 of the last 8 answers got no score: 5 raised, 1 broke the contract" in message
    assert "worker.reward.max_error_rate=0.01" in message
    assert "deliberate failure" in message and "returned None" in message


def test_time_outs_count_towards_the_limit(tmp_path: Path) -> None:
    source = f"{SEQUENTIAL}import time\ndef compute_score(one): time.sleep(60)"
    message = fails(tmp_path, source, "a", time_limit=0.2, max_error_rate=0.0)
    assert "1 of the last 1 answers got no score: 1 ran out of time" in message


def test_no_share_of_failures_is_too_large_where_any_is_allowed(tmp_path: Path) -> None:
    source = "def compute_score(inputs): raise ValueError"
    groups = [make_group("x", *["a"] * 300) for _ in range(2)]
    metrics = score(make_runner(tmp_path, source, on_error="score", max_error_rate=1.0), *groups)
    assert metrics["reward/errors"] == 600.0
