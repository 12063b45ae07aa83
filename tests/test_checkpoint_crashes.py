"""Whatever kills a process in the middle of saving, there is a checkpoint to go on from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

WAYS = ("at once", "background")


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, dict[str, Any]]]:
    """What could be loaded after each kill, by the way of saving, of which one is tried on each core.

    In memory where possible, as flushing to a disk takes most of the time.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as root:
        programs = {
            way: subprocess.Popen(
                [sys.executable, "-m", "tests.checkpoint_crashes", root, way],
                cwd=Path(__file__).parent.parent,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            for way in WAYS
        }
        try:
            outputs = {way: program.communicate(timeout=900)[0] for way, program in programs.items()}
        finally:
            for program in programs.values():  # and its child, which else would save for ever
                with suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)
        assert [program.returncode for program in programs.values()] == [0, 0]
        yield {way: json.loads(output) for way, output in outputs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_killed_before_any_change_of_the_file_system(found: dict[str, dict[str, Any]], way: str) -> None:
    steps = list(found[way]["every call"].values())
    assert len(steps) > 40  # two saves of step 3, after steps 1 and 2
    assert steps == sorted(steps) and set(steps) == {2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_killed_at_random_moments(found: dict[str, dict[str, Any]], way: str) -> None:
    steps = found[way]["random"]
    assert len(steps) == 20
    assert steps == sorted(steps) and steps[-1] > steps[0] > 0  # what was saved is never lost
