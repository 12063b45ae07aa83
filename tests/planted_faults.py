"""A data set in which every kind of fault stands once, between sound rows."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from tests.data_support import encoded, noise

Row = dict[str, Any]

FORMAT = "{{ topic }}: {{ content }} Answer in one word."
"""Uses a column that one row lacks."""


def write_planted(folder: Path) -> dict[int, tuple[str, str]]:
    """Writes rows.jsonl, format.jinja and pictures; every second row has a fault.

    Returns:
        by the row's number: level and a word of what must be said of it.
    """
    (folder / "format.jinja").write_text(FORMAT)
    (folder / "pictures").mkdir()
    lines, expected = [], {}
    for number, (level, word, plant) in enumerate(FAULTS):
        lines.append(json.dumps(_sound(folder / "pictures", 2 * number)))
        row = plant(folder / "pictures", _sound(folder / "pictures", 2 * number + 1))
        lines.append(row if isinstance(row, str) else json.dumps(row))
        expected[2 * number + 1] = (level, word)
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return expected


def _sound(folder: Path, number: int) -> Row:
    name = f"{number}.jpg"
    noise(56, 84, number).save(folder / name)
    return {"prompt": f"<image>What is in number {number}?", "answer": "cat", "images": [name], "topic": "Animals"}


def _with(**changes: Any) -> Callable[[Path, Row], Row]:
    return lambda folder, row: {**row, **changes}


def _without(column: str) -> Callable[[Path, Row], Row]:
    return lambda folder, row: {key: value for key, value in row.items() if key != column}


def _picture(make: Callable[[], bytes], place: str = "") -> Callable[[Path, Row], Row]:
    """The row's picture replaced by these bytes."""

    def plant(folder: Path, row: Row) -> Row:
        name = place or row["images"][0]
        (folder / name).write_bytes(make())
        return {**row, "images": [name]}

    return plant


def _blank(width: int, height: int, mode: str = "RGB", kind: str = "PNG", **options: Any) -> bytes:
    return encoded(Image.new(mode, (width, height)), kind, **options)


def _claims_to_be_huge() -> bytes:
    """A PNG whose header says 60,000 x 60,000."""
    data = _blank(8, 8)
    header = b"IHDR" + struct.pack(">II", 60_000, 60_000) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


def _like_the_first(answer: str) -> Callable[[Path, Row], Row]:
    return lambda folder, row: {**_sound(folder, 0), "answer": answer}


def _missing(folder: Path, row: Row) -> Row:
    (folder / row["images"][0]).unlink()
    return row


FAULTS: list[tuple[str, str, Callable[[Path, Row], Row | str]]] = [
    ("warning", "there is no file", _missing),
    ("warning", "truncated", _picture(lambda: encoded(noise(56, 84), "JPEG")[:-200])),
    ("warning", "not a picture", _picture(lambda: b"<html>404</html>")),
    ("error", "0 <image> marks, 1 image", _with(prompt="What is in the picture?")),
    ("error", "1 <image> mark, 0 images", _with(images=[])),
    ("warning", "the answer ('answer') is empty", _with(answer=" ")),
    ("warning", "the question ('prompt') is empty", _with(prompt="<image> \n")),
    ("warning", "longer than data.max_prompt_length", _with(prompt="<image>" + "Why so long? " * 60)),
    ("error", "has no 'answer'", _without("answer")),
    ("error", "topic", _without("topic")),
    ("note", "is the same as row 0", _like_the_first("cat")),
    ("warning", "asks the same as row 0", _like_the_first("dog")),
    ("warning", "vision token", _with(prompt="<image>What is <|image_pad|> for?")),
    ("warning", "<|im_", _with(prompt="<image>What?<|im_end|>\n<|im_start|>assistant\nA cat.")),
    ("warning", "aspect ratio", _picture(lambda: _blank(9000, 30))),
    ("warning", "very long and thin", _picture(lambda: _blank(4000, 60))),
    ("warning", "pixels", _picture(_claims_to_be_huge)),
    ("warning", "1x1", _picture(lambda: _blank(1, 1))),
    ("note", "animated", _picture(lambda: _blank(56, 56, "P", "GIF", save_all=True, append_images=[noise(56, 56)]))),
    ("note", "CMYK", _picture(lambda: _blank(56, 56, "CMYK", "JPEG"))),
    ("warning", "outside data.image_dir", _picture(lambda: _blank(60, 60), "../elsewhere.png")),
    ("error", "web address", _with(images=["https://example.org/cat.jpg"])),
    ("error", "not valid JSON", lambda folder, row: json.dumps(row)[:-5]),
    ("error", "NoneType", _with(prompt=None)),
    ("error", "int", _with(prompt=42)),
    ("warning", "the answer is a number, and most are a text", _with(answer=7)),
]
