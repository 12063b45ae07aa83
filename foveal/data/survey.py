"""The look at every row before a model is loaded: marks, lengths and picture headers; no pixel is decoded."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from foveal.data.images import PictureError
from foveal.data.length_cache import Lengths, cache_path
from foveal.data.measure import measure_all
from foveal.data.prompts import PromptBuilder
from foveal.data.rows import Rows, count
from foveal.errors import DataError, FovealError
from foveal.track.console import phase

if TYPE_CHECKING:
    from foveal.config.schema_data import DataConfig

KEPT_FROM_SECONDS = 1.0
"""Lengths that took less to find out are not kept on disk."""
SHOWN = 5


@dataclass
class Survey:
    """What was found.

    Attributes:
        usable: numbers of the rows that can be used, in order.
        with_images, with_videos: how many of them have a picture, or a video.
        text_only: how many have neither.
        most_images: the most that one of them has.
        too_long: (row, tokens, images) of those longer than `data.max_prompt_length`.
        unreadable: the reason for each row with a missing or unreadable picture.
    """

    usable: list[int]
    with_images: int
    with_videos: int
    text_only: int
    most_images: int
    too_long: list[tuple[int, int, int]]
    unreadable: list[str]


def survey(builder: PromptBuilder, split: str) -> Survey:
    """Looks at every row once.

    Raises:
        DataError: a row is wrong in itself; a prompt is too long and `data.filter_overlong_prompts` is false; a picture
            is unreadable and `data.on_bad_row` is "stop"; or no row is left.
        ModelError: there are pictures and the model takes text only.
    """
    data, rows = builder.data, builder.rows
    lengths, faults = look_at_rows(builder, split)
    wrong = {row: fault for row, fault in faults.items() if not isinstance(fault, PictureError)}
    if wrong:
        first = next(iter(wrong.values()))
        raise type(first)(_with_others(str(first), list(wrong), rows))
    fits = (lengths.tokens > 0) & (lengths.tokens <= data.max_prompt_length)
    images, videos = lengths.images[fits], lengths.videos[fits]
    found = Survey(
        usable=np.flatnonzero(fits).tolist(),
        with_images=int(np.count_nonzero(images)),
        with_videos=int(np.count_nonzero(videos)),
        text_only=int(np.count_nonzero((images == 0) & (videos == 0))),
        most_images=int(images.max(initial=0)),
        too_long=[
            (row, int(lengths.tokens[row]), int(lengths.images[row]))
            for row in np.flatnonzero(lengths.tokens > data.max_prompt_length).tolist()
        ],
        unreadable=[str(fault) for fault in faults.values()],
    )
    _stop_if_refused(found, data, rows)
    return found


def look_at_rows(builder: PromptBuilder, split: str) -> tuple[Lengths, dict[int, FovealError]]:
    """The length of every row, and why one cannot be used, by row in order.

    What was found out at an earlier start is taken from disk (`length_cache`); rows that could not be used then, or
    whose pictures have changed, are looked at again.
    """
    path, total = cache_path(builder), len(builder.rows)
    lengths = Lengths.load(path, total) if path is not None else Lengths(total)
    lengths.forget_changed()
    rows = lengths.unknown()
    faults: dict[int, FovealError] = {}
    begin = time.monotonic()
    with phase(f"{split}: looking at the rows", len(rows)) as advance:
        for measured in measure_all(builder, rows, builder.data.filter_overlong_prompts_workers):
            lengths.add(measured)
            faults.update((one.row, one.fault) for one in measured if one.fault is not None)
            advance(len(measured))
    if path is not None and time.monotonic() - begin > KEPT_FROM_SECONDS:
        lengths.save(path)
    return lengths, dict(sorted(faults.items()))


def report(found: Survey, data: DataConfig, rows: Rows, split: str) -> list[str]:
    """The lines that say what is used and what is not."""
    kinds = [f"{found.with_images} with images"]
    kinds += [f"{found.with_videos} with videos"] if found.with_videos else []
    kinds.append(f"{found.text_only} text only")
    lines = [f"{split}: {count(len(found.usable), 'row')} from {rows.source} ({', '.join(kinds)})"]
    if found.too_long:
        lines.append(f"{split}: {_too_long(found, data, rows)}")
    if found.unreadable:
        lines.append(f"{split}: {_unreadable(found, len(rows))}")
    return lines


def left_out(found: Survey, data: DataConfig, rows: Rows) -> list[str]:
    """Why each row that isn't used is not, with its number."""
    limit = f"data.max_prompt_length is {data.max_prompt_length}"
    too_long = [
        f"{rows.name(row)}: {tokens} tokens with {count(images, 'image')}; {limit}"
        for row, tokens, images in found.too_long
    ]
    return too_long + found.unreadable


def _stop_if_refused(found: Survey, data: DataConfig, rows: Rows) -> None:
    repair = "Repair the pictures, or correct data.image_dir"
    shorten = "Raise data.max_prompt_length, or lower data.max_pixels"
    if found.unreadable and data.on_bad_row == "stop":
        raise DataError(f"{rows.source}: {_unreadable(found, len(rows))}. {repair}, or set data.on_bad_row=skip.")
    if found.too_long and not data.filter_overlong_prompts:
        raise DataError(
            f"{rows.source}: {_too_long(found, data, rows)}. {shorten}, or set data.filter_overlong_prompts=true to "
            f"leave such rows out. Prompts are never cut."
        )
    if not found.usable:
        reasons = [f"{_too_long(found, data, rows)}. {shorten}."] if found.too_long else []
        reasons += [f"{_unreadable(found, len(rows))}. {repair}."] if found.unreadable else []
        raise DataError(f"{rows.source}: no usable row: {' '.join(reasons)}")


def _too_long(found: Survey, data: DataConfig, rows: Rows) -> str:
    shown = ", ".join(
        f"{rows.name(row)} ({tokens} tokens, {count(images, 'image')})"
        for row, tokens, images in found.too_long[:SHOWN]
    )
    number = len(found.too_long)
    more = ", …" if number > SHOWN else ""
    verb = "dropped as" if data.filter_overlong_prompts else "is" if number == 1 else "are"
    return f"{number} of {count(len(rows), 'row')} {verb} longer than {data.max_prompt_length} tokens: {shown}{more}"


def _unreadable(found: Survey, total: int) -> str:
    shown = "; ".join(found.unreadable[:SHOWN]) + ("; …" if len(found.unreadable) > SHOWN else "")
    verb = "has an unreadable picture" if len(found.unreadable) == 1 else "have unreadable pictures"
    return f"{len(found.unreadable)} of {count(total, 'row')} {verb}: {shown}"


def _with_others(message: str, wrong: list[int], rows: Rows) -> str:
    if len(wrong) == 1:
        return message
    shown = ", ".join(rows.name(row).removeprefix("row ") for row in wrong[: SHOWN * 4])
    more = ", …" if len(wrong) > SHOWN * 4 else ""
    return (
        f"{message}\n{len(wrong)} of {count(len(rows), 'row')} are wrong: rows {shown}{more}. `foveal check` lists "
        f"each with its fault."
    )
