"""A picture task made by code: how many shapes are in the picture, and what colour are they?

Every row asks the same question, so nothing but the picture tells the answer (one of 36).

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

QUESTION = "<image>How many shapes are there and what colour are they?"
COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 90, 200),
    "yellow": (240, 210, 40),
    "purple": (148, 60, 189),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle")
MAX_COUNT = 6
SIDE = 96
"""Width and height of a picture in pixels."""
SPLIT_ROWS = {"warmup": 4096, "train": 2048, "val": 256, "test": 512}
"""Rows of each split: supervised warm-up, GRPO, validation during the run, test after it. Pictures differ between all."""


def draw(count: int, colour: str, rng: random.Random) -> Image.Image:
    """A picture of `count` shapes of one colour that do not touch, of mixed kinds and sizes, on a light ground."""
    ground = rng.randint(215, 255)
    image = Image.new("RGB", (SIDE, SIDE), (ground, ground, ground))
    pen = ImageDraw.Draw(image)
    for x, y, radius in _places(count, rng):
        fill = tuple(max(0, min(255, part + rng.randint(-12, 12))) for part in COLOURS[colour])
        box = (x - radius, y - radius, x + radius, y + radius)
        kind = rng.choice(SHAPES)
        if kind == "circle":
            pen.ellipse(box, fill=fill)
        elif kind == "square":
            pen.rectangle(box, fill=fill)
        else:
            pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=fill)
    return image


def _places(count: int, rng: random.Random) -> list[tuple[int, int, int]]:
    """Centre and radius of each shape; starts afresh when the last ones find no room."""
    while True:
        places: list[tuple[int, int, int]] = []
        for _ in range(200):
            radius = rng.randint(7, 11)
            x, y = (rng.randint(radius + 1, SIDE - radius - 2) for _ in range(2))
            if all(max(abs(x - u), abs(y - v)) > radius + r + 2 for u, v, r in places):
                places.append((x, y, radius))
            if len(places) == count:
                return places


def make_rows(split: str, rows: int, seed: int) -> list[dict[str, Any]]:
    """Rows of a split with columns problem, answer ("4 red") and images ([{"bytes": PNG, "path": None}]).

    Every count comes with every colour equally often (to within one row), in random order. The same split and seed
    give the same rows.
    """
    rng = random.Random(zlib.crc32(split.encode()) + 1_000_003 * seed)
    answers = [(1 + i % MAX_COUNT, list(COLOURS)[i // MAX_COUNT % len(COLOURS)]) for i in range(rows)]
    rng.shuffle(answers)
    return [
        {
            "problem": QUESTION,
            "answer": f"{count} {colour}",
            "images": [{"bytes": _png(draw(count, colour, rng)), "path": None}],
        }
        for count, colour in answers
    ]


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def write_rows(rows: list[dict[str, Any]], path: Path) -> Path:
    """Writes rows as parquet, in the layout of EasyR1's data sets (problem, answer, images)."""
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageFeature

    path.parent.mkdir(parents=True, exist_ok=True)
    features = Features({"problem": Value("string"), "answer": Value("string"), "images": List(ImageFeature())})
    Dataset.from_list(rows, features=features).to_parquet(path)
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
