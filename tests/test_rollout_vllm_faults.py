"""A vLLM engine that fails, hangs or idles: one error that says so, and no answer from it afterwards."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from foveal.errors import EngineError
from foveal.rollout import vllm_engine
from foveal.rollout.vllm_engine import IDLE_LIMIT
from foveal.rollout.watchdog import Watchdog
from foveal.types import Sampling
from tests.vllm_support import Side

pytestmark = pytest.mark.slow

SAMPLING = Sampling(n=2, max_tokens=8, seed=5)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    side = Side(tmp_path_factory.mktemp("faults") / "model", "qwen3")
    yield side
    side.engine.close()


@pytest.fixture
def side(started: Side) -> Iterator[Side]:
    """The engine, which is well again after the test."""
    yield started
    engine = started.engine
    engine._died = None
    engine.abort([job.prompt.uid for job in engine._open.values()])
    list(engine.collect())
    started.hand_over()
    assert started.gap(engine.generate(started.prompts([0]), SAMPLING, 0)) < 1e-4


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    side = Side(tmp_path_factory.mktemp("faults_seeing") / "model", "qwen3_vl")
    yield side
    side.engine.close()


def failing(message: str) -> Any:
    def step() -> None:
        raise RuntimeError(message)

    return step


def test_an_engine_that_failed_says_so_from_then_on(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = side.prompts([0, 0])
    side.engine.submit(prompts[:1], SAMPLING, 0)
    with monkeypatch.context() as patched:
        patched.setattr(side.engine.core, "step_fn", failing("deliberate failure"))
        with pytest.raises(EngineError, match="deliberate failure"):
            list(side.engine.collect())
    for call in (
        lambda: side.engine.submit(prompts[1:], SAMPLING, 0),
        lambda: list(side.engine.collect()),
        side.hand_over,
    ):
        with pytest.raises(EngineError, match="deliberate failure"):
            call()


def test_an_engine_that_was_interrupted_gives_no_answers_with_gaps(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = side.engine.core.step_fn, iter(range(3))

    def interrupted() -> Any:
        outputs = step()
        if next(steps) == 2:
            raise KeyboardInterrupt
        return outputs

    side.engine.submit(side.prompts([0]), SAMPLING, 0)
    with monkeypatch.context() as patched:
        patched.setattr(side.engine.core, "step_fn", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(side.engine.collect())
    with pytest.raises(EngineError, match=r"in the middle of a step: KeyboardInterrupt"):
        list(side.engine.collect())


def test_memory_that_runs_out_names_the_keys_to_change(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    side.engine.submit(side.prompts([0]), SAMPLING, 0)
    with monkeypatch.context() as patched:
        patched.setattr(side.engine.core, "step_fn", failing("CUDA out of memory. Tried to allocate 2.00 GiB"))
        with pytest.raises(EngineError, match=r"gpu_memory_utilization.*max_num_batched_tokens=1024"):
            list(side.engine.collect())


def test_answers_that_vllm_lost_are_not_waited_for(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a request is too large for ever, which it doesn't say either."""
    core, steps = side.engine.core, iter(range(3 * IDLE_LIMIT))
    prompts = side.prompts([0, 0, 0])
    side.engine.submit(prompts[:2], replace(SAMPLING, max_tokens=100, ignore_eos=True), 0)
    side.engine.submit(prompts[2:], SAMPLING, 0)
    next(side.engine.collect())
    core.abort_requests(list(side.engine._open))
    step = core.step_fn
    with monkeypatch.context() as patched:
        patched.setattr(core, "step_fn", lambda: (next(steps), step())[1])  # raises, should it go on for ever
        with pytest.raises(EngineError, match=rf"nothing although 4 answers are open \(prompts {prompts[0].uid}, "):
            list(side.engine.collect())


def test_a_step_that_never_returns_ends_the_process(
    side: Side, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, over = side.engine.core.step_fn, threading.Event()

    def hanging() -> Any:
        assert over.wait(10), "nobody noticed"
        return step()

    monkeypatch.setattr(side.engine, "watchdog", Watchdog("the vLLM engine", 0.2, give_up=over.set))
    side.engine.submit(side.prompts([0]), SAMPLING, 0)
    with monkeypatch.context() as patched:
        patched.setattr(side.engine.core, "step_fn", hanging)
        next(side.engine.collect())
    error = capsys.readouterr().err
    assert "the vLLM engine: no progress for" in error


def test_long_answers_are_progress(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(side.engine, "watchdog", Watchdog("the vLLM engine", 0.4, give_up=lambda: ended.append(1)))
    step = side.engine.core.step_fn

    def slow() -> Any:
        threading.Event().wait(0.02)
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(side.engine.core, "step_fn", slow)
        side.engine.generate(side.prompts([0]), Sampling(n=1, max_tokens=40, ignore_eos=True), 0)
    assert not ended


def test_a_sleep_that_fails_is_explained(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side.engine, "on_cpu", False)
    monkeypatch.setattr(side.engine.core, "sleep", lambda *_: failing("Memory usage increased after sleeping.")())
    with pytest.raises(EngineError, match="another process uses the same device"):
        side.engine.sleep()


def test_an_engine_that_is_only_half_awake_does_not_pretend_to_sleep(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side.engine, "on_cpu", False)
    monkeypatch.setattr(side.engine, "_asleep", {"kv_cache"})
    with pytest.raises(EngineError, match="before it is awake"):
        side.engine.sleep()


def test_the_cache_takes_its_memory_when_prompts_come(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[list[str]] = []
    monkeypatch.setattr(side.engine, "_asleep", {"kv_cache"})
    monkeypatch.setattr(side.engine.core, "wake_up", woken.append)
    side.hand_over()
    assert woken == []
    assert side.gap(side.engine.generate(side.prompts([0]), SAMPLING, side.version)) < 1e-4
    assert woken == [["kv_cache"]]


def test_memory_that_the_hand_over_left_in_reserve_is_free_for_the_cache(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(side.engine, "_asleep", {"kv_cache"})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("reserve given back"))
    monkeypatch.setattr(side.engine.core, "wake_up", lambda tags: order.append("memory taken"))
    side.engine.generate(side.prompts([0]), SAMPLING, side.version)
    assert order == ["reserve given back", "memory taken"]


def test_pictures_are_no_memory_that_is_absent_in_sleep(seeing: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = seeing.engine
    engine.generate(seeing.prompts([1, 1]), SAMPLING, 0)
    pictures = engine.core.model_executor.driver_worker.model_runner.encoder_cache
    assert len(pictures) == 2

    def sleep(*_: Any) -> None:
        engine.core._reset_caches()  # which vLLM's own does, and unmaps its memory: 1000 here
        monkeypatch.setattr(vllm_engine, "_free_bytes", lambda: 2000 - len(pictures))

    monkeypatch.setattr(engine, "on_cpu", False)
    monkeypatch.setattr(vllm_engine, "_free_bytes", lambda: 1000 - len(pictures))
    monkeypatch.setattr(engine.core, "sleep", sleep)
    monkeypatch.setattr(engine.core, "wake_up", lambda tags: None)
    engine.sleep()
    assert engine.asleep_bytes == 1000
    engine.wake()
    assert engine.asleep_bytes == 0


@pytest.mark.parametrize(("free", "woken"), [(100, [["kv_cache", "weights"]]), (99, [])])
def test_an_engine_that_ends_asleep_is_woken_where_there_is_room(
    side: Side, monkeypatch: pytest.MonkeyPatch, free: int, woken: list[list[str]]
) -> None:
    seen: list[Any] = []
    with monkeypatch.context() as patched:
        ending = weakref.finalize(side, seen.append, "shut down")
        patched.setattr(side.engine, "_shut_down", ending)
        patched.setattr(side.engine, "_asleep", {"weights", "kv_cache"})
        patched.setattr(side.engine, "asleep_bytes", 100)
        patched.setattr(vllm_engine, "_free_bytes", lambda: free)
        patched.setattr(side.engine.core, "wake_up", seen.append)
        side.engine.close()
        side.engine.close()
    assert seen == [*woken, "shut down"]


def test_a_waking_that_fails_keeps_nothing_from_its_end(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(side.engine, "_shut_down", weakref.finalize(side, seen.append, "shut down"))
        patched.setattr(side.engine, "_asleep", {"weights", "kv_cache"})
        patched.setattr(side.engine.core, "wake_up", lambda tags: failing("CUDA Error: out of memory")())
        side.engine.close()
    assert seen == ["shut down"]


def test_a_cache_that_is_not_emptied_ends_the_engine(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(side.engine.core, "reset_prefix_cache", lambda: False)
        with pytest.raises(EngineError, match="former weights"):
            side.hand_over()
    with pytest.raises(EngineError, match="former weights"):
        side.engine.submit(side.prompts([0]), SAMPLING, 0)


def test_an_engine_without_weights_takes_no_prompts(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side.engine, "_version", None)
    with pytest.raises(EngineError, match="no weights yet"):
        side.engine.submit(side.prompts([0]), SAMPLING, 0)
