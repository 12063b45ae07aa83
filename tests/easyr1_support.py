"""The checkpoints that EasyR1's code wrote (tests/fixtures/make_easyr1_checkpoints.py), for its tests."""

from __future__ import annotations

import shutil
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures" / "easyr1"


def copied(name: str, folder: Path) -> Path:
    """A copy of a run with one checkpoint, in `folder`; returns the checkpoint's actor folder."""
    shutil.copytree(FIXTURES / name, folder / name)
    return folder / name / "global_step_3" / "actor"
