"""`foveal view RUN --export page.html`: one file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foveal.errors import ConfigError
from foveal.view import charts
from foveal.view.answers import Filter
from foveal.view.app import static_file, templates
from foveal.view.runs import Run, alarms, differences

SAMPLES = 100
"""Answers of each run, evenly spread over its validations, or over its training steps where there are none."""
PIXELS = 256
"""The longer side of a picture."""
PICTURES = 4
"""Of each answer."""


def export(runs: Sequence[Run], out: Path) -> None:
    """Writes curves, times, alarms, differing settings and some samples with small pictures.

    Raises:
        ConfigError: the file cannot be written.
    """
    for run in runs:
        run.read_on()
    names = charts.usual(runs)
    data = {"version": "", "charts": charts.curves(runs, names), "times": [charts.times(run) for run in runs]}
    styles = [static_file(name).decode() for name in ("uPlot.min.css", "style.css")]
    scripts = [static_file(name).decode() for name in ("uPlot.iife.min.js", "view.js")]
    differing, _ = differences(list(runs))
    samples = [(run, _samples(run), len(run.answers)) for run in runs]  # before anything tells what is damaged
    page = (
        templates()
        .get_template("export.html")
        .render(
            runs=runs,
            run=None,
            alarms=[alarm for run in runs for alarm in alarms(run)],
            differing=differing,
            samples=samples,
            styles=styles,
            scripts=scripts,
            style_sums=[_sum(text) for text in styles],
            script_sums=[_sum(text) for text in scripts],
            # "<" would let a metric's name end the script element
            data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
            written=time.strftime("%Y-%m-%d %H:%M"),
        )
    )
    part = out.with_name(out.name + ".part")
    try:
        part.write_text(page, encoding="utf-8", errors="backslashreplace")
        os.replace(part, out)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--export {out}: cannot be written ({reason}). Give another file.") from error


def _sum(text: str) -> str:
    """As a content security policy names the one script or style that may be there."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _samples(run: Run) -> list[dict[str, Any]]:
    index = run.answers
    numbers = index.find(Filter(split="val")).numbers
    if not len(numbers):
        numbers = index.find(Filter()).numbers
    if len(numbers) > SAMPLES:
        numbers = numbers[np.linspace(0, len(numbers) - 1, SAMPLES).astype(int)]
    answers = index.fetch(index.places(numbers))
    for answer in answers:
        answer["pictures"] = [(name, _small(run.picture(name))) for name in answer["images"][:PICTURES] if name]
    return answers


def _small(path: Path | None) -> str | None:
    """A picture as a data address; None where it is missing or cannot be read."""
    from PIL import Image

    if path is None:
        return None
    try:
        # of all that Pillow opens only what runs keep: for some formats it starts other programs
        with Image.open(path, formats=["PNG", "JPEG", "GIF", "BMP", "WEBP"]) as image:
            image.thumbnail((PIXELS, PIXELS))
            buffer = io.BytesIO()
            image.convert("RGB").save(buffer, "JPEG", quality=80)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
