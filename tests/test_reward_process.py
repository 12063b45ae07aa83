"""Reward processes: limits, deaths, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from foveal.errors import RewardError
from tests.reward_support import make_group, make_runner, overall, write

STUCK_IN_C = """
import re
REWARD_TYPE = "sequential"
def compute_score(one):
    if one["ground_truth"] == "red":
        re.fullmatch(r"(a+)+b", "a" * 64)
    return 1.0
"""
STUCK_BATCH = """
import time
def compute_score(inputs):
    while inputs[0]["response"] == "stuck":
        time.sleep(1)
    return [1.0] * len(inputs)
"""
DYING = """
import os, signal
REWARD_TYPE = "sequential"
def compute_score(one):
    if one["response"] == "exit":
        os._exit(7)
    if one["response"] == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0
"""


def gone(pid: int) -> bool:
    """Whether the process has ended; one that nobody has waited for yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_answer_stuck_in_c_is_cut_off_and_others_go_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    groups = [make_group("blue", "a", "b"), make_group("red", "c"), make_group("blue", "d")]
    with make_runner(tmp_path, STUCK_IN_C, time_limit=0.3, timeout_score=0.25) as runner:
        for group in groups:
            runner.submit(group)
        metrics = runner.finish()
    assert [overall(group) for group in groups] == [[1.0, 1.0], [0.25], [1.0]]
    assert metrics["reward/timeouts"] == 1.0
    lines = [line for line in capfd.readouterr().out.splitlines() if "1 of 4 samples ran longer than 0.3 s" in line]
    assert len(lines) == 1
    assert "user_reward.py:compute_score" in lines[0]


def test_limit_does_not_count_the_import(tmp_path: Path) -> None:
    source = "import time; time.sleep(0.5)\nREWARD_TYPE = 'sequential'\ndef compute_score(one): return 1.0"
    with make_runner(tmp_path, source, time_limit=0.3) as runner:
        runner.submit(group := make_group("x", "a"))
        assert runner.finish()["reward/timeouts"] == 0.0
    assert overall(group) == [1.0]


def test_stuck_batch_names_file_limit_and_number(tmp_path: Path) -> None:
    with make_runner(tmp_path, STUCK_BATCH, time_limit=0.7) as runner:
        runner.submit(make_group("x", "stuck", "b", "c"))
        with pytest.raises(
            RewardError, match=r"(?s)user_reward\.py.*ran longer than 2\.1 s.*a batch of 3 answers.*time_limit"
        ):
            runner.finish()


def test_stuck_batch_scored_when_asked_for_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foveal.reward.part.MIN_BATCH_LIMIT", 0.3)
    with make_runner(tmp_path, STUCK_BATCH, time_limit=0.1, on_error="score") as runner:
        runner.submit(stuck := make_group("x", "stuck", "b"))
        assert runner.finish()["reward/timeouts"] == 2.0
        runner.submit(later := make_group("x", "c"))
        runner.finish()
    assert (overall(stuck), overall(later)) == ([0.0, 0.0], [1.0])


@pytest.mark.parametrize(("text", "cause"), [("exit", "exit code 7"), ("crash", "signal 11")])
def test_process_that_dies_names_cause_and_sample(tmp_path: Path, text: str, cause: str) -> None:
    with make_runner(tmp_path, DYING) as runner:
        runner.submit(make_group("the truth", "fine", text))
        with pytest.raises(RewardError, match=rf"(?s){cause}.*sample 1.*'{text}'.*'the truth'"):
            runner.finish()


def test_process_that_dies_is_replaced_when_failures_are_scored(tmp_path: Path) -> None:
    with make_runner(tmp_path, DYING, on_error="score") as runner:
        runner.submit(group := make_group("x", "fine", "exit", "fine"))
        assert runner.finish()["reward/errors"] == 1.0
    assert overall(group) == [1.0, 0.0, 1.0]


def test_only_the_async_answer_that_ends_the_process_is_lost(tmp_path: Path) -> None:
    source = """
    import os
    REWARD_TYPE = "sequential"
    async def compute_score(one):
        if one["response"] == "crash":
            os.abort()
        return 1.0
    """
    with make_runner(tmp_path, source, on_error="score") as runner:
        runner.submit(group := make_group("x", "a", "b", "c", "crash", "d", "e", "f", "g"))
        metrics = runner.finish()
    assert overall(group) == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert metrics["reward/errors"] == 1.0


def test_a_call_that_lasts_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("foveal.reward.process.FIRST_NOTICE", 0.1)
    with make_runner(tmp_path, "import time\ndef compute_score(inputs): time.sleep(0.8); return [1.0]") as runner:
        runner.submit(make_group("x", "a"))
        runner.finish()
    assert "is still scoring 1 answers" in capfd.readouterr().out


def test_reward_process_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    source = "import sys\ndef compute_score(inputs): return [{'torch', 'numpy'} & set(sys.modules) == set()]"
    with make_runner(tmp_path, source) as runner:
        runner.submit(group := make_group("x", "a"))
        runner.finish()
    assert overall(group) == [1.0]


def test_megabytes_of_output_pass_through(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = """
    import os, sys
    def compute_score(inputs):
        print("y" * 3_000_000)
        os.write(1, b"z" * 1000)
        print("to stderr", file=sys.stderr)
        return [1.0]
    """
    with make_runner(tmp_path, source) as runner:
        runner.submit(group := make_group("x", "a"))
        runner.finish()
    captured = capfd.readouterr()
    assert (captured.out.count("y"), captured.out.count("z")) == (3_000_000, 1000)
    assert "to stderr" in captured.err
    assert overall(group) == [1.0]


def test_megabytes_of_answers_pass_through(tmp_path: Path) -> None:
    with make_runner(tmp_path, "def compute_score(inputs): return [len(inputs[0]['response'])]") as runner:
        runner.submit(group := make_group("x", "a" * 5_000_000))
        runner.finish()
    assert overall(group) == [5_000_000.0]


@pytest.mark.parametrize("own_session", [False, True])
def test_close_ends_a_stuck_process_and_what_it_started(tmp_path: Path, own_session: bool) -> None:
    source = f"""
    import os, pathlib, subprocess
    REWARD_TYPE = "sequential"
    def compute_score(one):
        child = subprocess.Popen(["sleep", "60"], start_new_session={own_session})
        pathlib.Path({str(tmp_path)!r}, "new").write_text(f"{{os.getpid()}} {{child.pid}}")
        os.rename({str(tmp_path / "new")!r}, {str(tmp_path / "pids")!r})
        while True: pass
    """
    runner = make_runner(tmp_path, source)
    runner.start()
    runner.submit(make_group("x", "a", "b"))
    assert wait_for((tmp_path / "pids").exists)
    runner.close()
    runner.close()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert wait_for(lambda: all(map(gone, pids)))


RUN = """
import os, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.reward_support import make_group, make_runner
print("started")
runner = make_runner(Path({folder!r}), '''
import os, re
REWARD_TYPE = "sequential"
def compute_score(one):
    print("pid", os.getpid(), flush=True)
    re.fullmatch(r"(a+)+b", "a" * 64)
''')
runner.start()
runner.submit(make_group("x", "a"))
{ending}
"""


@pytest.mark.parametrize("ending", ["time.sleep(60)", "time.sleep(0.3); raise SystemExit(3)"])
def test_no_reward_process_outlives_the_run(tmp_path: Path, ending: str) -> None:
    script = write(
        tmp_path / "run.py", RUN.format(root=str(Path(__file__).parents[1]), folder=str(tmp_path), ending=ending)
    )
    run = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    first, second = run.stdout.readline(), run.stdout.readline()
    assert first == "started\n"
    assert second.startswith("pid "), "the run's own file must not be executed again in the reward process"
    worker = int(second.split()[1])
    if "raise" in ending:
        assert run.wait(timeout=10) == 3, "a stuck reward must not keep a failing run from ending"
    else:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    run.stdout.close()
    assert wait_for(lambda: gone(worker))


def test_interrupt_from_the_terminal_does_not_reach_the_reward_process(tmp_path: Path) -> None:
    source = "import os\ndef compute_score(inputs): return [{'overall': 1.0, 'group': os.getpgrp()}]"
    with make_runner(tmp_path, source) as runner:
        runner.submit(group := make_group("x", "a"))
        runner.finish()
    assert group.responses[0].rewards["group"] != os.getpgrp()


@pytest.mark.parametrize("place", ["import", "call"])
def test_a_process_that_the_function_forked_and_let_run_on_answers_nothing(tmp_path: Path, place: str) -> None:
    at_import, in_call = ("os.fork()", "") if place == "import" else ("", "child = os.fork() == 0")
    source = f"""
    import os
    child = False
    {at_import or "pass"}
    def compute_score(inputs):
        {in_call or "child = False"}
        return [9.0 if child else 1.0] * len(inputs)
    """
    with make_runner(tmp_path, source) as runner:
        for _ in range(3):
            group = make_group("red", "a", "b")
            runner.submit(group)
            runner.finish()
            assert overall(group) == [1.0, 1.0]


def test_an_error_without_a_usable_message_is_still_told(tmp_path: Path) -> None:
    source = """
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError
    def compute_score(inputs):
        raise Odd
    """
    with make_runner(tmp_path, source) as runner:
        runner.submit(make_group("red", "a"))
        with pytest.raises(RewardError, match="raised Odd: <exception str"):
            runner.finish()


def test_an_endless_message_is_cut(tmp_path: Path) -> None:
    source = """
    def compute_score(inputs):
        raise ValueError("x" * 1_000_000)
    """
    with make_runner(tmp_path, source) as runner:
        runner.submit(make_group("red", "a"))
        with pytest.raises(RewardError) as caught:
            runner.finish()
    assert len(str(caught.value)) < 30_000
