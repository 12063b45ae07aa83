"""Outside trackers that are missing, fail or hang never touch the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from foveal.track import external
from foveal.track.backends import Backend, RunInfo
from foveal.track.external import Background, close_all
from foveal.track.samples import Sample
from foveal.track.trackers import _RunIds
from foveal.types import Metrics

RUN = RunInfo("p", "e", {}, Path("run"), resume_step=0, run_id=None)


class Memory(Backend):
    """Keeps what it is given; fails or hangs where told."""

    package = "memory-sdk"
    cure = "set MEMORY_KEY"

    def __init__(self, fail: str = "", error: BaseException | None = None) -> None:
        self.fail = fail
        self.error = error or ValueError("no\nsecond line")
        self.logged: list[tuple[Metrics, int]] = []
        self.may_go_on = threading.Event()

    def _do(self, call: str) -> None:
        if self.fail == call:
            raise self.error
        if self.fail == f"hang in {call}":
            self.may_go_on.wait()

    def open(self, run: RunInfo) -> str | None:
        self._do("open")
        return "id-1"

    def log(self, metrics: Metrics, step: int) -> None:
        self._do("log")
        self.logged.append((metrics, step))

    def log_samples(self, samples: list[Sample], step: int) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def ids() -> list[str]:
    return []


@pytest.fixture
def hanging() -> Iterator[Memory]:
    backend = Memory("hang in open")
    yield backend
    backend.may_go_on.set()


def warnings_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_everything_arrives_in_order(ids: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    backend = Memory()
    tracker = Background("memory", backend, RUN, ids.append)
    tracker.log({"a": 1.0, "nan": float("nan")}, 1)
    tracker.log({"a": 2.0}, 2)
    close_all([tracker])
    assert backend.logged == [({"a": 1.0}, 1), ({"a": 2.0}, 2)]
    assert ids == ["id-1"]
    assert warnings_of(capsys) == []


def test_a_tracker_that_does_not_start_is_one_warning_with_the_cure(
    ids: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Background("memory", Memory("open"), RUN, ids.append)
    for step in range(5):
        tracker.log({"a": 1.0}, step)
    close_all([tracker])
    assert warnings_of(capsys) == ["warning: memory is off for this run: ValueError: no. To use it, set MEMORY_KEY."]


def test_a_missing_package_says_what_to_install(ids: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    close_all([Background("memory", Memory("open", ImportError("No module named 'x'")), RUN, ids.append)])
    (line,) = warnings_of(capsys)
    assert line.endswith("To use it, install it: pip install memory-sdk.")


def test_an_sdk_that_exits_ends_only_itself(ids: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    close_all([Background("memory", Memory("open", SystemExit(1)), RUN, ids.append)])
    assert len(warnings_of(capsys)) == 1


def test_of_failing_entries_the_first_is_named_and_all_are_counted(
    ids: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Background("memory", Memory("log"), RUN, ids.append)
    for step in range(5):
        tracker.log({"a": 1.0}, step)
    close_all([tracker])
    first, last = warnings_of(capsys)
    assert "memory refused an entry (ValueError: no)" in first
    assert "memory lacks 5 entries" in last


def test_a_tracker_that_hangs_stalls_neither_logging_nor_closing(
    hanging: Memory, ids: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    tracker = Background("memory", hanging, RUN, ids.append, queue_length=3)
    for step in range(100):
        tracker.log({"a": 1.0}, step)
    close_all([tracker], seconds=0.1)
    assert time.monotonic() - start < 5
    full, gone = warnings_of(capsys)
    assert "too slow or hangs" in full
    assert "did not answer in time; 3 or more" in gone and "set MEMORY_KEY" in gone


def test_a_hanging_tracker_takes_no_time_from_the_others(hanging: Memory, ids: list[str]) -> None:
    good = Memory()
    trackers = [Background("bad", hanging, RUN, ids.append), Background("good", good, RUN, ids.append)]
    for tracker in trackers:
        tracker.log({"a": 1.0}, 1)
    close_all(trackers, seconds=0.5)
    assert good.logged == [({"a": 1.0}, 1)]


@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_a_damaged_file_of_run_ids_starts_new_runs(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trackers.json").write_text(content)
    assert _RunIds(tmp_path / "trackers.json", resume_step=1).get("wandb") is None
    assert "is damaged: trackers start a new run" in warnings_of(capsys)[0]


def test_a_tracker_that_does_not_answer_is_told_once(
    hanging: Memory, ids: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external, "STALL_SECONDS", 0.0)
    tracker = Background("memory", hanging, RUN, ids.append)
    for step in range(3):
        tracker.log({"a": 1.0}, step)
    (line,) = warnings_of(capsys)
    assert "memory has not answered for 0 s; the run goes on" in line


def test_of_samples_few_wait_for_a_tracker_that_hangs(
    hanging: Memory, ids: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Background("memory", hanging, RUN, ids.append)
    for step in range(external.WAITING_TABLES + 1):
        tracker.log_samples([], step)
    assert "entries are dropped" in warnings_of(capsys)[0]
    assert tracker._jobs.qsize() == external.WAITING_TABLES


def test_keys_and_passwords_are_not_in_warnings(
    ids: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMORY_API_KEY", "0123456789")
    error = ConnectionError("http://me:secret@host/api refused key 0123456789")
    close_all([Background("memory", Memory("open", error), RUN, ids.append)])
    (line,) = warnings_of(capsys)
    assert "http://***@host/api refused key ***" in line
