"""Whatever kills a process in the middle of saving, there is a checkpoint to go on from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """What could be loaded after each kill; in memory where possible, as flushing to a disk takes most of the time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as root:
        program = subprocess.run(
            [sys.executable, "-m", "tests.checkpoint_crashes", root],
            cwd=Path(__file__).parent.parent,
            stdout=subprocess.PIPE,
            timeout=300,
            check=True,
        )
        yield json.loads(program.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["at once", "background"])
def test_killed_before_any_change_of_the_file_system(found: dict[str, Any], way: str) -> None:
    steps = list(found[f"every call {way}"].values())
    assert len(steps) > 40  # two saves of step 3, after steps 1 and 2
    assert steps == sorted(steps) and set(steps) == {2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["at once", "background"])
def test_killed_at_random_moments(found: dict[str, Any], way: str) -> None:
    steps = found[f"random {way}"]
    assert len(steps) == 20
    assert steps == sorted(steps) and steps[-1] > steps[0] > 0  # what was saved is never lost
