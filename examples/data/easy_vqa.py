"""Turns the PyPI package easy-vqa (64×64 pictures of shapes, with questions) into parquet files for training.

    pip install easy-vqa
    python examples/data/easy_vqa.py --out data/easy_vqa

Writes warmup.parquet, train.parquet and test.parquet with columns problem, answer and images. The pictures of the
package's training part are shared out between warmup (supervised steps) and train (GRPO); no picture is in both.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from foveal.quickstart.task import write_rows

Question = tuple[str, str, int]
"""Text, answer, number of the picture."""


def import_package() -> Any:
    """The installed package, not this file, which has its name and whose folder Python puts on the path."""
    here = Path(__file__).resolve().parent
    sys.path = [place for place in sys.path if Path(place).resolve() != here]
    import easy_vqa

    return easy_vqa


def share_out(questions: list[Question], share: float, rng: random.Random) -> tuple[list[Question], list[Question]]:
    """Two parts of the questions with different pictures; the first has `share` of the pictures."""
    pictures = sorted({picture for _, _, picture in questions})
    chosen = set(rng.sample(pictures, round(share * len(pictures))))
    return [q for q in questions if q[2] in chosen], [q for q in questions if q[2] not in chosen]


def make_rows(questions: list[Question], paths: dict[int, str], limit: int, rng: random.Random) -> list[dict[str, Any]]:
    """Rows of up to `limit` questions (-1: all) in random order."""
    chosen = rng.sample(questions, len(questions) if limit < 0 else min(limit, len(questions)))
    return [
        {
            "problem": f"<image>{text}",
            "answer": answer,
            "images": [{"bytes": Path(paths[picture]).read_bytes(), "path": f"{picture}.png"}],
        }
        for text, answer, picture in chosen
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/easy_vqa"), help="folder for the three files")
    parser.add_argument("--limit", type=int, default=-1, help="the most rows per file; -1 (default): all")
    parser.add_argument("--warmup-share", type=float, default=0.5, help="share of the pictures for the warm-up")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if not 0 < options.warmup_share < 1:
        parser.error(
            f"--warmup-share {options.warmup_share}: must lie between 0 and 1, so that both parts have pictures"
        )

    easy_vqa = import_package()
    rng = random.Random(options.seed)
    train = list(zip(*easy_vqa.get_train_questions(), strict=True))
    test = list(zip(*easy_vqa.get_test_questions(), strict=True))
    warmup, rest = share_out(train, options.warmup_share, rng)
    train_paths, test_paths = easy_vqa.get_train_image_paths(), easy_vqa.get_test_image_paths()
    for name, questions, paths in (
        ("warmup", warmup, train_paths),
        ("train", rest, train_paths),
        ("test", test, test_paths),
    ):
        rows = make_rows(questions, paths, options.limit, rng)
        print(f"{write_rows(rows, options.out / f'{name}.parquet')}: {len(rows)} rows")


if __name__ == "__main__":
    main()
