from __future__ import annotations

import io
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from foveal.data.source import load_rows
from foveal.quickstart.task import COLOURS, MAX_HEIGHT, UNIT, draw, make_rows, write_rows


@pytest.mark.parametrize("height", range(1, MAX_HEIGHT + 1))
def test_bar_is_as_tall_as_the_answer_says(height: int) -> None:
    pixels = np.asarray(draw(height, "blue", random.Random(height))).astype(int)
    blue = (pixels[..., 2] - pixels[..., 0]) > 60
    assert blue.any(axis=1).sum() == height * UNIT + 1


def test_same_seed_gives_the_same_rows() -> None:
    assert make_rows("val", 6, seed=3) == make_rows("val", 6, seed=3)
    assert make_rows("val", 6, seed=3) != make_rows("val", 6, seed=4)


def test_splits_share_no_picture() -> None:
    train, val = ({row["images"][0]["bytes"] for row in make_rows(split, 100, seed=1)} for split in ("train", "val"))
    assert not train & val


def test_every_answer_comes_equally_often() -> None:
    answers = Counter(row["answer"] for row in make_rows("val", 2 * MAX_HEIGHT * len(COLOURS), seed=1))
    assert len(answers) == MAX_HEIGHT * len(COLOURS)
    assert set(answers.values()) == {2}


def test_text_tells_nothing_of_the_answer() -> None:
    assert len({row["problem"] for row in make_rows("val", 50, seed=1)}) == 1


def test_parquet_gives_the_rows_back(tmp_path: Path) -> None:
    rows = make_rows("val", 3, seed=1)
    found = load_rows(str(write_rows(rows, tmp_path / "val.parquet")))
    assert [found[i]["answer"] for i in range(3)] == [row["answer"] for row in rows]
    assert found[0]["images"][0]["bytes"] == rows[0]["images"][0]["bytes"]
    assert Image.open(io.BytesIO(found[0]["images"][0]["bytes"])).size == (96, 96)
