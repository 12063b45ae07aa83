"""The picture of a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from foveal.track.curve import draw_curve, moving_mean


@pytest.mark.filterwarnings("error")
def test_the_curve_is_a_picture_that_shows_the_run(tmp_path: Path) -> None:
    log, empty = tmp_path / "log.jsonl", tmp_path / "empty.jsonl"
    rows = [{"step": step, "reward": {"overall": step / 20}, "val": {"reward_score": 0.5}} for step in range(20)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    empty.write_text("")
    draw_curve(log, tmp_path / "full.png")
    draw_curve(empty, tmp_path / "empty.png")
    with Image.open(tmp_path / "full.png") as full, Image.open(tmp_path / "empty.png") as nothing:
        assert full.size == nothing.size and min(full.size) > 500
        assert np.any(np.asarray(full) != np.asarray(nothing))
    assert list(tmp_path.glob("*.part")) == []


def test_a_curve_that_cannot_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw_curve(tmp_path / "log.jsonl", tmp_path / "no" / "folder" / "curve.png")
    assert capsys.readouterr().err.startswith("warning: cannot draw")


def test_the_moving_mean_starts_with_what_there_is() -> None:
    assert moving_mean(np.array([1.0, 3.0, 5.0, 7.0]), 3).tolist() == [1.0, 2.0, 3.0, 5.0]
