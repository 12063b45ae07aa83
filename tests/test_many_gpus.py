"""What the comparison of set-ups makes of the steps that were logged."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from benchmarks.many_gpus import speed_ups, summary, table, wait
from foveal.types import Metrics


def step(end: float, gen: float, seconds: float, **others: float) -> Metrics:
    named = {"timing_s/gen": gen, "timing_s/step": seconds, "perf/elapsed_s": end, "perf/total_num_tokens": 12_000}
    return named | others


def side(*steps: Metrics, gpus: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = {"gpus": gpus, "steps": list(steps)}
    return found | {"medians": summary(found, 1)}


def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    found = summary(side(step(50, 9, 20), step(60, 3, 8), step(74, 5, 8), step(86, 4, 8), gpus=2), 1)
    assert found["step"] == 12 and found["gen"] == 4
    assert found["tokens_per_s_per_gpu"] == 500  # of 600, 429 and 500


def test_without_a_warm_up_the_first_step_counts_by_its_own_timer() -> None:
    assert summary(side(step(50, 9, 20)), 0)["step"] == 20


def test_a_side_without_steps_after_the_warm_up_has_no_medians() -> None:
    assert summary(side(step(50, 9, 20)), 1) == {} == summary(side(), 0)


def test_memory_is_the_highest_of_all_steps() -> None:
    memory = {"perf/max_memory_allocated_gb": 30.0, "perf/cpu_memory_used_gb": 90.0}
    found = summary(side(step(50, 9, 20, **memory), step(60, 3, 8, **{"perf/peak_memory_gb/gen": 20.0})), 1)
    assert found["peak_memory_gb"] == 30


def test_speed_is_compared_with_the_first_side_that_was_measured() -> None:
    one = side(step(50, 9, 20), step(70, 8, 20))
    two = side(step(50, 9, 20), step(60, 2, 10), gpus=2)
    assert speed_ups({"failed": side()}) == {}
    found = speed_ups({"failed": side(), "one": one, "two": two})
    assert found == {"one": {"gen": 1, "step": 1}, "two": {"gen": 4, "step": 2}}


def test_the_table_tells_what_failed() -> None:
    sides = {"one": side(step(50, 9, 20), step(70, 8, 20)), "two": side() | {"failure": "status 1", "output": ["why"]}}
    text = table({"sides": sides, "speed_ups": speed_ups(sides)})
    assert text.splitlines()[-2:] == ["two: status 1", "why"]


@pytest.mark.parametrize(("code", "told"), [("", None), ("raise SystemExit(3)", "status 3")])
def test_a_process_is_waited_for(code: str, told: str | None) -> None:
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        found = wait(process, 60)
    assert found is told or (told is not None and found is not None and told in found)


def test_a_process_that_takes_too_long_is_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        assert wait(process, 0.2) == "not done after 0.2 s"
    assert process.returncode
