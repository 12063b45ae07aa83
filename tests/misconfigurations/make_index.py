"""Halve the cases at random (seed 0) and write index.json: python -m tests.misconfigurations.make_index"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.misconfigurations import ALL


def make_index() -> dict[str, dict[str, list[str]]]:
    rng = random.Random(0)
    index: dict[str, dict[str, list[str]]] = {"open": {}, "held_out": {}}
    for kind, sound in (("faults", False), ("sound", True)):
        ids = sorted(case.id for case in ALL if case.sound is sound)
        rng.shuffle(ids)
        half = len(ids) // 2
        index["open"][kind], index["held_out"][kind] = sorted(ids[:half]), sorted(ids[half:])
    return index


if __name__ == "__main__":
    (Path(__file__).parent / "index.json").write_text(json.dumps(make_index(), indent=2) + "\n")
