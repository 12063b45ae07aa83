"""Inputs of the data tests: pictures made by code, a tiny model folder, rows on disk."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from foveal.config.schema_data import DataConfig
from foveal.data.loader import PromptLoader
from foveal.data.processing import Processing
from foveal.data.prompts import PromptBuilder
from foveal.data.source import open_rows
from foveal.data.survey import survey


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def picture_rows(folder: Path, count: int) -> list[dict[str, Any]]:
    """Rows with one 64x64 picture each, saved into `folder`."""
    for index in range(count):
        noise(64, 64, index).save(folder / f"{index}.jpg", quality=95)
    return [{"prompt": "<image>Which?", "answer": str(i), "images": [f"{i}.jpg"]} for i in range(count)]


def builder_of(processing: Processing, spec: str | list[str], **options: Any) -> PromptBuilder:
    data = DataConfig(**options)
    return PromptBuilder(data, processing, open_rows(data, spec))


def loader_of(processing: Processing, spec: str | list[str], split: str = "train", **options: Any) -> PromptLoader:
    builder = builder_of(processing, spec, **options)
    return PromptLoader(builder, survey(builder, split).usable, split)  # type: ignore[arg-type]
