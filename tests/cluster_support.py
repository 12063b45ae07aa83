"""Runs with worker processes: finding everything that they started, and killing some of it at a chosen moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.small_run import small_run

MARK = "HF_FOVEAL_TEST"
"""Variable of all processes of a run; workers of a cluster that was joined get those that begin with HF_."""


def import_this_checkout(patch: pytest.MonkeyPatch) -> None:
    """Ray's processes can import `tests`, too, and don't wait for whatever else runs on the machine."""
    patch.setenv("RAY_worker_niceness", "0")
    root = str(Path(__file__).parents[1])
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))


@contextmanager
def one_machine() -> Iterator[Any]:
    """A cluster for runs to join, of this machine with three CPUs."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: they would wait for whatever else runs
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    try:
        yield made
    finally:
        made.shutdown()


def processes(mark: str) -> dict[int, str]:
    """The processes with this mark, and their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # just gone
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
    return found


def nothing_is_left(mark: str, seconds: float = 15) -> bool:
    end = time.monotonic() + seconds
    while (left := processes(mark)) and time.monotonic() < end:
        time.sleep(0.2)
    return not left


class Run:
    """A run in a process of its own, and what it printed."""

    def __init__(self, root: Path, *overrides: str) -> None:
        self.mark = uuid.uuid4().hex
        arguments = small_run(root, "qwen2_5_vl", "trainer.n_gpus_per_node=2", "trainer.max_steps=5", *overrides)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "foveal", "train", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, MARK: self.mark},
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def wait_for(self, text: str, seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while not any(text in line for line in self.lines):
            assert time.monotonic() < end and self.process.poll() is None, "".join(self.lines)
            time.sleep(0.1)

    def members(self) -> list[int]:
        return [pid for pid, command in processes(self.mark).items() if command.startswith("ray::Member")]

    def end(self, seconds: float) -> tuple[int, str]:
        """Its exit status and output, once nothing of it is left."""
        status = self.process.wait(seconds)
        self._reader.join()
        assert nothing_is_left(self.mark)
        return status, "".join(self.lines)


def kill(crew: Any, victim: Any) -> None:
    os.kill(victim.pid, signal.SIGKILL)


class Strikes:
    """Strikes at a worker in the middle of a stage, for each entry of a plan.

    The worker is stopped before it gets the call, so that the others wait for it; a second later comes the strike.

    Args:
        plan: beginning of the stage's name, how often it passes before, and what is done to the crew and the place of
            the victim.
        pick: the place of the victim; of rank 1 without it.

    Attributes:
        seconds: from each strike until everything was closed.
        victims: process ids.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        plan: list[tuple[str, int, Callable[[Any, Any], None]]],
        pick: Callable[[Any], Any] = lambda crew: crew.places[1],
    ) -> None:
        from foveal.cluster.crew import Crew

        self.plan = plan
        self.pick = pick
        self.seconds: list[float] = []
        self.victims: list[int] = []
        self._began = 0.0
        call, stream, close = Crew.call, Crew.stream, Crew.close

        def struck_call(crew: Crew, stage: str, *arguments: Any, **options: Any) -> list[Any]:
            self._strike(crew, stage)
            return call(crew, stage, *arguments, **options)

        def struck_stream(crew: Crew, stage: str, *arguments: Any) -> Iterator[tuple[int, Any]]:
            self._strike(crew, stage)
            yield from stream(crew, stage, *arguments)

        def noted_close(crew: Crew, timeout: float) -> None:
            close(crew, timeout)
            if self._began:
                self.seconds.append(time.monotonic() - self._began)
                self._began = 0.0

        monkeypatch.setattr(Crew, "call", struck_call)
        monkeypatch.setattr(Crew, "stream", struck_stream)
        monkeypatch.setattr(Crew, "close", noted_close)

    def _strike(self, crew: Any, stage: str) -> None:
        if not self.plan or not stage.startswith(self.plan[0][0]):
            return
        name, passes, strike = self.plan[0]
        if passes:
            self.plan[0] = (name, passes - 1, strike)
            return
        del self.plan[0]
        victim = self.pick(crew)
        self.victims.append(victim.pid)
        os.kill(victim.pid, signal.SIGSTOP)
        self._began = time.monotonic()
        threading.Timer(1, strike, (crew, victim)).start()
