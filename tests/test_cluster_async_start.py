"""One step off: what is said and corrected at the start, and which side's waiting is told."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foveal.config import load_config
from foveal.errors import ConfigError
from foveal.preflight import check_runnable
from foveal.track.lines import StepLines
from foveal.track.metrics import staleness
from foveal.track.timing import BusyClock
from foveal.types import Group, Prompt, Response
from tests.small_run import small_run

AHEAD = ("trainer.n_gpus_per_node=2", "cluster.rollout_devices=1", "trainer.async_rollout=true")


@pytest.mark.parametrize(
    ("overrides", "correction", "said"),
    [
        ([], "tis", "algorithm.correction=tis corrects for"),
        (["algorithm.correction=icepop"], "icepop", ""),
        (["algorithm.correction=none"], "none", ""),
        (["algorithm.old_logprobs=rollout"], "none", ""),
        (["worker.rollout.top_p=0.9"], "none", "nothing corrects for it, since with worker.rollout.top_p"),
    ],
)
def test_old_answers_are_corrected_unless_told_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], correction: str, said: str
) -> None:
    pytest.importorskip("vllm")
    pytest.importorskip("ray")
    config = load_config(small_run(tmp_path, "qwen2_5_vl", "worker.rollout.name=vllm", *AHEAD, *overrides))
    check_runnable(config)
    captured = capsys.readouterr()
    assert config.algorithm.correction == correction
    assert said in captured.out + captured.err
    assert bool(said) == ("one step old" in captured.out + captured.err)


def test_it_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    config = load_config(small_run(tmp_path, "qwen2_5_vl", "trainer.async_rollout=true"))
    with pytest.raises(ConfigError, match=r"trainer\.async_rollout=true: .*cluster\.rollout_devices is 0"):
        check_runnable(config)


def test_a_clock_knows_what_was_idle_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("foveal.track.timing.time", SimpleNamespace(perf_counter=lambda: now))
    clock = BusyClock()
    assert clock.idle(5.0) == 5.0
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with clock.busy():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait()
    now = 103.0
    assert clock.idle(2.0) == 0.0  # it is still at work
    assert clock.idle(5.0) == 2.0
    leave.set()
    thread.join()
    now = 104.0
    assert clock.idle(4.5) == 1.5
    assert clock.idle(2.0) == 1.0


def test_a_side_that_waits_for_more_than_a_tenth_of_a_step_is_told() -> None:
    metrics = {"perf/time_per_step": 20.0, "perf/idle_s/trainer": 1.9, "perf/idle_s/engine": 6.0}
    line = StepLines().training(3, 10, metrics, now=0.0)
    assert "20 s  engine idle 30 %" in line and "trainer" not in line


def test_staleness_counts_updates() -> None:
    prompt = Prompt("train-0-0", [1], [1], [], {}, 0, None)
    groups = [Group(prompt, [_answer(4), _answer(5)]), Group(prompt, [_answer(5), _answer(5)])]
    assert staleness(groups, 5) == {"rollout/staleness": 0.25}
    assert staleness([], 5) == {}
    assert staleness(groups, 5, first=5) == {"rollout/staleness": 0.0}  # the critic alone has learned until then


def test_trainers_without_an_engine_keep_prompts_for_one_step(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from foveal.cluster.delivery import Delivery
    from foveal.cluster.member import Member
    from foveal.cluster.transport import pack_groups

    class Scorer:
        engine = None
        forgotten = 0

        def forget_step(self) -> None:
            self.forgotten += 1

        def values(self, groups: list[Group]) -> None: ...

    member: Any = Member(str(tmp_path))
    member.worker = Scorer()
    new = Delivery(groups=pack_groups([], logprobs=False))
    for delivery in (new, Delivery(), new):  # no update in between: the critic warms up
        member.run("values", delivery, {})
    assert member.worker.forgotten == 2


def _answer(version: int) -> Response:
    import numpy as np

    return Response(np.array([1]), np.array([-1.0], np.float32), "stop", weight_spans=[(0, version)])
