"""Calls to several processes: what they return, and what is said when one dies, fails or stops."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ray: Any = pytest.importorskip("ray")

from foveal.cluster.actor import Actor as Base  # noqa: E402
from foveal.cluster.crew import Crew, _result  # noqa: E402
from foveal.cluster.engines import Engines  # noqa: E402
from foveal.cluster.launch import everyone, gather  # noqa: E402
from foveal.cluster.ray_cluster import Cluster  # noqa: E402
from foveal.config import load_config  # noqa: E402
from foveal.errors import DataError, WorkerError  # noqa: E402
from foveal.signals import Stopped, StopSignals  # noqa: E402
from tests.cluster_support import import_this_checkout  # noqa: E402
from tests.crew_actor import Actor  # noqa: E402
from tests.small_run import small_run  # noqa: E402

pytestmark = pytest.mark.slow


class Dying(Base):
    """Ends before it can tell where it is."""

    def __init__(self, folder: str) -> None:
        print("something of use", file=sys.stderr, flush=True)
        os._exit(3)

    def _sampler(self) -> Any: ...

    def _sample(self, *_: Any) -> Any: ...


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        import_this_checkout(patch)
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield
        ray.shutdown()


@pytest.fixture
def crew(cluster: None) -> Iterator[Crew]:
    actor_class = ray.remote(concurrency_groups={"control": 1})(Actor)
    actors = [actor_class.options(num_cpus=1).remote(rank) for rank in range(2)]
    places = ray.get([actor.whereabouts.remote() for actor in actors])
    made = Crew(actors, places, timeout=5)
    yield made
    made.close(0)


def test_results_come_in_the_order_of_ranks(crew: Crew, capsys: pytest.CaptureFixture[str]) -> None:
    assert crew.call("doubling", "double", lambda rank: (10 + rank,)) == [20, 22]
    assert capsys.readouterr().out == "from 0\nworker 1 on here: from 1\n"


def failure(crew: Crew, how: str) -> str:
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        crew.call("the stage", "fail", lambda rank: (how, 1))
    assert time.monotonic() - started < 40
    with pytest.raises(WorkerError) as again:
        crew.call("the next stage", "double", lambda rank: (1,))
    assert str(again.value) == str(caught.value)  # whichever thread calls next says why
    assert "something of use" in str(caught.value)  # the end of its log
    return str(caught.value)


def test_a_death_is_named_before_what_follows_from_it(crew: Crew) -> None:
    message = failure(crew, "die")
    assert message.startswith(f"worker 1 (here, process {crew.places[1].pid}) died during the stage: ")


def test_calls_of_two_threads_end_with_one_explanation(crew: Crew) -> None:
    with ThreadPoolExecutor(1) as beside:
        dying = beside.submit(crew.call, "the stage", "fail", lambda rank: ("die", 1), beside=True)
        time.sleep(0.3)
        with pytest.raises(WorkerError) as caught:
            crew.call("the next stage", "double", lambda rank: (1,))
        assert str(dying.exception()) == str(caught.value)


def test_a_worker_that_makes_no_progress_is_named(crew: Crew) -> None:
    message = failure(crew, "sleep")
    assert "in the stage" in message and "worker 1 (here" in message and "worker 0" not in message
    assert "trainer.stage_timeout (5 s)" in message


def test_a_bug_comes_with_its_traceback(crew: Crew) -> None:
    message = failure(crew, "bug")
    assert message.startswith("worker 1 (here") and "ZeroDivisionError: a bug" in message and "in fail" in message


def test_a_mistake_of_the_users_comes_as_it_is(crew: Crew) -> None:
    with pytest.raises(DataError, match=r"^the user's mistake$"):
        crew.call("the stage", "fail", lambda rank: ("mistake", 1))


def test_items_come_as_they_are_made(crew: Crew) -> None:
    items = list(crew.stream("counting", "count", lambda rank: (5 + rank,)))
    assert [value for rank, value in items if rank == 0] == list(range(5))
    assert [value for rank, value in items if rank == 1] == list(range(6))


@pytest.mark.parametrize("in_step", [False, True])
def test_a_stream_that_was_left_is_broken_off_before_the_next_call(crew: Crew, in_step: bool) -> None:
    crew.in_step = in_step
    for _ in crew.stream("counting", "count", lambda rank: (100_000,)):
        break
    started = time.monotonic()
    assert crew.call("doubling", "double", lambda rank: (1,)) == [2, 2]
    assert time.monotonic() - started < 20
    assert len(list(crew.stream("counting", "count", lambda rank: (2,)))) == 4


def test_after_a_mistake_in_a_stream_the_workers_can_be_called(crew: Crew) -> None:
    with pytest.raises(DataError):
        list(crew.stream("counting", "count", lambda rank: (4 if rank else 100_000,)))
    assert crew.call("doubling", "double", lambda rank: (1,)) == [2, 2]


def test_where_all_take_every_step_together_a_failure_of_one_ends_the_calls_at_once(crew: Crew) -> None:
    crew.in_step = True
    started = time.monotonic()
    with pytest.raises(DataError):
        list(crew.stream("counting", "count", lambda rank: (4 if rank else 100_000,)))
    with pytest.raises(WorkerError, match="have ended"):
        crew.call("doubling", "double", lambda rank: (1,))
    assert time.monotonic() - started < 20


def test_a_stop_signal_comes_out_of_rays_compiled_code_as_it_is(crew: Crew) -> None:
    busy = crew.actors[0].fail.remote("sleep", 0)
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with StopSignals() as signals, pytest.raises(Stopped), signals.interruptible():
        _result(busy)


def test_a_worker_that_dies_before_it_can_tell_where_it_is(cluster: None) -> None:
    config = load_config(["trainer.n_gpus_per_node=2", "worker.rollout.n=2"])
    held = Cluster(config)
    try:
        with pytest.raises(WorkerError) as caught:
            gather(config, held, Dying, range(2), in_step=False)
    finally:
        held.close()
    message = str(caught.value)
    assert re.match(r"a worker \(\S+, process \d+\) died during the start of the processes: ", message), message
    assert "something of use" in message


def test_an_engine_that_fails_while_it_takes_weights_ends_the_workers_that_wait_for_it(
    crew: Crew, tmp_path: Path
) -> None:
    config = load_config(small_run(tmp_path, "qwen2_5_vl"))
    config.trainer.n_gpus_per_node = 2
    engines = Engines(config, Crew(crew.actors[1:], crew.places[1:], timeout=5))
    engines._all = everyone([crew])
    with pytest.raises(WorkerError, match="no room for the weights"):  # after an EngineError the workers would save
        engines.hand_over()
    engines.close(0)
    started = time.monotonic()
    crew.close(20)
    assert time.monotonic() - started < 10
