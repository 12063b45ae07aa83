"""Async functions of one answer: as one ends the next begins, and what goes wrong costs the one to blame."""

from __future__ import annotations

import io
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from PIL import Image

from foveal.errors import RewardError
from foveal.reward.contract import FunctionSpec, Outcome
from foveal.reward.flow import Flow, Queued
from foveal.reward.process import Call, RewardProcess
from foveal.types import Media
from tests.reward_support import make_group, make_runner, overall, score, write

SLEEPY = """
import asyncio
REWARD_TYPE = "sequential"
running = most = done = 0
async def compute_score(one):
    global running, most, done
    running += 1
    most = max(most, running)
    await asyncio.sleep(one["ground_truth"])
    running -= 1
    done += 1
    return {"overall": 1.0, "most": most, "done": done}
"""
FAULTY = """
import asyncio, os
REWARD_TYPE = "sequential"
kept = []
async def compute_score(one):
    await asyncio.sleep(one["ground_truth"])
    if one["response"] == "crash":
        os.abort()
    if one["response"] == "hog":
        kept.append(b"x" * 300_000_000)
        await asyncio.sleep(60)
    if one["response"] == "leak":
        kept.append(b"x" * 120_000_000)
    return 1.0
"""


def test_a_slow_answer_holds_up_no_other(tmp_path: Path) -> None:
    slow, quick = make_group(1.5, "a"), [make_group(0.02, "a", "b", "c", "d") for _ in range(5)]
    with make_runner(tmp_path, SLEEPY, concurrency=3) as runner:
        for group in (slow, *quick[:3]):
            runner.submit(group)
        time.sleep(0.3)
        for group in quick[3:]:
            runner.submit(group)
        runner.finish()
    assert slow.responses[0].rewards["done"] == 21.0, "all others went by it in the two other places"
    assert max(response.rewards["most"] for group in quick for response in group.responses) == 3.0


@pytest.mark.parametrize(("fault", "kind"), [("crash", "signal 6"), ("hog", "GB of memory")])
def test_what_ends_the_process_takes_nothing_with_it(
    tmp_path: Path, fault: str, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    groups = [make_group(0.02 * place, "a", "b", fault if place == 1 else "c") for place in range(4)]
    metrics = score(make_runner(tmp_path, FAULTY, concurrency=4, on_error="score", memory_limit_gb=0.25), *groups)
    assert [score for group in groups for score in overall(group)] == [
        0.0 if place == 5 else 1.0 for place in range(12)
    ]
    assert metrics["reward/errors"] == 1.0
    assert kind in capfd.readouterr().out


def test_memory_kept_from_answer_to_answer_costs_no_score(tmp_path: Path) -> None:
    group = make_group(0.0, *["leak"] * 9)
    metrics = score(make_runner(tmp_path, FAULTY, concurrency=2, memory_limit_gb=0.5), group)
    assert overall(group) == [1.0] * 9
    assert metrics["reward/restarts"] >= 1.0


def test_a_loop_that_is_blocked_costs_what_was_going_and_nothing_that_waits(tmp_path: Path) -> None:
    source = """
    REWARD_TYPE = "sequential"
    async def compute_score(one):
        while one["response"] == "block":
            pass
        return 1.0
    """
    group = make_group(0.0, "block", *"abc")
    metrics = score(make_runner(tmp_path, source, concurrency=1, time_limit=0.2), group)
    assert overall(group) == [0.0, 1.0, 1.0, 1.0]
    assert metrics["reward/timeouts"] == 1.0


def test_a_cancelled_answer_is_an_error_of_its_own(tmp_path: Path) -> None:
    source = """
    import asyncio
    REWARD_TYPE = "sequential"
    async def compute_score(one):
        if one["response"] == "bad":
            raise asyncio.CancelledError
        return 1.0
    """
    score(make_runner(tmp_path, source, on_error="score"), group := make_group("x", "a", "bad", "c"))
    assert overall(group) == [1.0, 0.0, 1.0]


def test_each_answer_gets_its_own_pictures(tmp_path: Path) -> None:
    source = """
    import asyncio
    REWARD_TYPE = "sequential"
    async def compute_score(one):
        await asyncio.sleep(0.02 * one["ground_truth"])
        return one["images"][0].open().size[0]
    """
    groups = [make_group(5 - width, "a", "b") for width in range(1, 6)]
    for width, group in enumerate(groups, 1):
        buffer = io.BytesIO()
        Image.new("RGB", (width, 2), "red").save(buffer, "PNG")
        group.prompt.media = [Media("image", buffer.getvalue())]
    score(make_runner(tmp_path, source, concurrency=3), *groups)
    assert [overall(group) for group in groups] == [[float(width)] * 2 for width in range(1, 6)]


@pytest.mark.parametrize("form", ["sequential", "async"])
def test_an_answer_that_has_no_score_is_counted_and_ends_no_run(
    tmp_path: Path, form: str, capfd: pytest.CaptureFixture[str]
) -> None:
    source = f"""
    from foveal.reward.contract import NoScore
    REWARD_TYPE = "sequential"
    {"async " if form == "async" else ""}def compute_score(one):
        if one["response"] != "fine":
            raise NoScore("nothing to compare with")
        return 1.0
    """
    metrics = score(make_runner(tmp_path, source, timeout_score=-1.0), group := make_group("x", "fine", "odd", "odd"))
    assert overall(group) == [1.0, -1.0, -1.0]
    assert metrics["reward/errors"] == 2.0
    assert capfd.readouterr().out.count("gave no score: nothing to compare with") == 1


def test_an_answer_that_has_no_score_ends_the_run_where_it_takes_a_batch_with_it(tmp_path: Path) -> None:
    source = "from foveal.reward.contract import NoScore\ndef compute_score(inputs): raise NoScore('why')"
    with pytest.raises(RewardError, match="gave no score: why, in a batch of 2"):
        score(make_runner(tmp_path, source), make_group("x", "a", "b"))


def test_a_function_says_how_long_an_answer_takes(tmp_path: Path) -> None:
    source = "import time\nREWARD_TYPE = 'sequential'\nREWARD_TIME_LIMIT = 0.2\ndef compute_score(one): time.sleep(60)"
    metrics = score(make_runner(tmp_path, source), make_group("x", "a"))
    assert metrics["reward/timeouts"] == 1.0


@pytest.mark.parametrize("value", ["0", "'long'", "float('inf')"])
def test_a_time_that_is_none_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(RewardError, match=r"REWARD_TIME_LIMIT is .*; allowed is a number of seconds above 0"):
        make_runner(tmp_path, f"REWARD_TIME_LIMIT = {value}\ndef compute_score(inputs): ...").start()


def test_a_process_that_ends_between_two_trades_loses_no_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "user_reward.py", FAULTY)
    processes: list[RewardProcess] = []

    def living() -> RewardProcess:
        if not processes or not processes[-1].alive:
            processes.append(RewardProcess(FunctionSpec(str(path), "compute_score", {}, concurrency=3)))
            processes[-1].load()
        return processes[-1]

    def more(most: int) -> list[Queued]:
        if futures[0].done() and len(processes) == 1:
            processes[0].kill()
            while processes[0].alive:
                time.sleep(0.01)
            return [queued.pop()]
        return []

    futures: list[Future[list[Outcome]]] = [Future() for _ in range(4)]
    seconds = (0.0, 0.3, 0.3, 0.3)
    calls = [Call([{"response": "", "ground_truth": one, "images": []}], [[]], 1.0) for one in seconds]
    queued = list(zip(calls, futures, strict=True))
    try:
        Flow(living, 3, lambda: False).run(queued[:3], more)
    finally:
        for process in processes:
            process.close()
    assert [future.result() for future in futures] == [[{"overall": 1.0}]] * 4
    assert len(processes) == 2, "no other was given what it knows nothing of"


def test_a_result_that_cannot_be_read_is_an_error_of_its_own(tmp_path: Path) -> None:
    source = """
    REWARD_TYPE = "sequential"
    class Odd:
        def __repr__(self):
            raise KeyError("odd")
    async def compute_score(one):
        return Odd() if one["response"] == "odd" else 1.0
    """
    metrics = score(make_runner(tmp_path, source, on_error="score"), group := make_group("x", "a", "odd", "c"))
    assert overall(group) == [1.0, 0.0, 1.0]
    assert (metrics["reward/errors"], metrics["reward/restarts"]) == (1.0, 0.0)
