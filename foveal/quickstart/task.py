"""A picture task made by code: how tall is the bar, and what colour is it?

Every row asks the same question, so nothing but the picture tells the answer (one of 48).

    python -m foveal.quickstart.task FOLDER --seed 1
"""

from __future__ import annotations

import argparse
import io
import random
import zlib
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

QUESTION = "<image>How tall is the bar and what colour is it?"
COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 90, 200),
    "yellow": (240, 210, 40),
    "purple": (148, 60, 189),
    "black": (20, 20, 20),
}
MAX_HEIGHT = 8
SIDE = 96
"""Width and height of a picture in pixels."""
UNIT = 11
"""Pixels of the bar per unit of its height."""
SPLIT_ROWS = {"warmup": 4096, "train": 4096, "val": 256, "test": 512}
"""Rows of each split, with pictures of its own: warm-up, GRPO, validation during the run, test after it."""


def draw(height: int, colour: str, rng: random.Random) -> Image.Image:
    """A picture of one bar, `height` units tall, that stands on a line; place, width, shade and ground vary."""
    ground = rng.randint(215, 255)
    image = Image.new("RGB", (SIDE, SIDE), (ground, ground, ground))
    pen = ImageDraw.Draw(image)
    fill = tuple(max(0, min(255, part + rng.randint(-12, 12))) for part in COLOURS[colour])
    width = rng.randint(10, 30)
    left = rng.randint(2, SIDE - 3 - width)
    floor = SIDE - 4
    pen.rectangle((left, floor - height * UNIT, left + width, floor), fill=fill)
    pen.line((0, floor + 1, SIDE, floor + 1), fill=(0, 0, 0))
    return image


def make_rows(split: str, rows: int, seed: int) -> list[dict[str, Any]]:
    """Rows of a split: problem, answer ("4 red": height and colour), images ([{"bytes": PNG, "path": None}]).

    Every height comes with every colour equally often (to within one row), in random order. The same split and seed
    give the same rows.
    """
    rng = random.Random(zlib.crc32(split.encode()) + 1_000_003 * seed)
    answers = [(1 + i % MAX_HEIGHT, list(COLOURS)[i // MAX_HEIGHT % len(COLOURS)]) for i in range(rows)]
    rng.shuffle(answers)
    return [
        {
            "problem": QUESTION,
            "answer": f"{height} {colour}",
            "images": [{"bytes": _png(draw(height, colour, rng)), "path": None}],
        }
        for height, colour in answers
    ]


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def write_rows(rows: list[dict[str, Any]], path: Path) -> Path:
    """Writes rows as parquet, in the layout of EasyR1's data sets: problem, answer, images (decoded by `datasets`)."""
    import pyarrow
    from datasets import Features, List, Value
    from datasets import Image as ImageFeature
    from pyarrow import parquet

    features = Features({"problem": Value("string"), "answer": Value("string"), "images": List(ImageFeature())})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=features.arrow_schema), path)
    return path


def build_task(folder: str | Path, seed: int = 1) -> dict[str, Path]:
    """Writes `SPLIT.parquet` for every split of `SPLIT_ROWS`; returns the paths by split."""
    folder = Path(folder)
    return {
        split: write_rows(make_rows(split, rows, seed), folder / f"{split}.parquet")
        for split, rows in SPLIT_ROWS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the quick start's picture task as parquet files.")
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for path in build_task(options.folder, options.seed).values():
        print(path)


if __name__ == "__main__":
    main()
