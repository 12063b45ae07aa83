"""Set-ups to try `foveal check` on: 40 with one seeded misconfiguration each and 20 sound ones, from public reports.

Written without sight of the detector. `index.json` halves both classes at random into `open` and `held_out`; the second
is for the final count only. `make_index.py` made it.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.misconfigurations import boxes, choices, figures, reading, text_math
from tests.misconfigurations.base import Case

__all__ = ["ALL", "Case", "cases"]

ALL: list[Case] = [*text_math.CASES, *figures.CASES, *choices.CASES, *boxes.CASES, *reading.CASES]


def cases(split: str) -> list[Case]:
    """The cases of a split, "open" or "held_out", by id."""
    ids = json.loads((Path(__file__).parent / "index.json").read_text())[split]
    known = {case.id: case for case in ALL}
    return [known[name] for kind in ("faults", "sound") for name in ids[kind]]
