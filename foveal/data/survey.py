"""The look at every row before a model is loaded: marks, lengths and picture headers; no pixel is decoded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foveal.data.images import PictureError, Size
from foveal.data.prompts import Draft, PromptBuilder
from foveal.errors import DataError
from foveal.track.console import phase

if TYPE_CHECKING:
    from foveal.config.schema_data import DataConfig

CHUNK = 256
SHOWN = 5


@dataclass
class Survey:
    """What was found.

    Attributes:
        usable: numbers of the rows that can be used, in order.
        with_images: how many of them have a picture.
        most_images: the most pictures that one of them has.
        too_long: (row, tokens, images) of those longer than `data.max_prompt_length`.
        unreadable: the reason for each row with a missing or unreadable picture.
    """

    usable: list[int] = field(default_factory=list)
    with_images: int = 0
    most_images: int = 0
    too_long: list[tuple[int, int, int]] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def survey(builder: PromptBuilder, split: str) -> Survey:
    """Looks at every row once.

    Raises:
        DataError: a row is wrong in itself; a prompt is too long and `data.filter_overlong_prompts` is false; a picture
            is unreadable and `data.on_bad_row` is "stop"; or no row is left.
    """
    data, rows = builder.data, builder.rows
    found = Survey()
    total = len(rows)
    with (
        ThreadPoolExecutor(data.filter_overlong_prompts_workers) as pool,
        phase(f"{split}: looking at the rows", total) as advance,
    ):
        for start in range(0, total, CHUNK):
            numbers = range(start, min(start + CHUNK, total))
            drafts: list[Draft] = []
            sizes: list[list[Size]] = []
            # Threads, because what takes long is opening pictures; the tokenizer has threads of its own.
            for outcome in pool.map(lambda number: _look(builder, number), numbers):
                if isinstance(outcome, PictureError):
                    found.unreadable.append(str(outcome))
                else:
                    drafts.append(outcome[0])
                    sizes.append(outcome[1])
            lengths = builder.processing.count_tokens([draft.text for draft in drafts], sizes)
            for draft, own, length in zip(drafts, sizes, lengths, strict=True):
                if length > data.max_prompt_length:
                    found.too_long.append((draft.row_index, length, len(own)))
                else:
                    found.usable.append(draft.row_index)
                    found.with_images += bool(own)
                    found.most_images = max(found.most_images, len(own))
            advance(len(numbers))
    _stop_if_refused(found, data, rows.source, total)
    return found


def report(found: Survey, data: DataConfig, source: str, total: int, split: str) -> list[str]:
    """The lines that say what is used and what is not."""
    text_only = len(found.usable) - found.with_images
    lines = [
        f"{split}: {_rows(len(found.usable))} from {source} ({found.with_images} with images, {text_only} text only)"
    ]
    if found.too_long:
        lines.append(f"{split}: {_too_long(found, data, total)}")
    if found.unreadable:
        lines.append(f"{split}: {_unreadable(found, total)}")
    return lines


def _look(builder: PromptBuilder, number: int) -> tuple[Draft, list[Size]] | PictureError:
    try:
        draft = builder.draft(number)
        sizes = draft.sizes()
        for size, (_, name) in zip(sizes, draft.pictures, strict=True):
            try:
                builder.processing.visual_tokens(size)
            except ValueError as error:
                raise PictureError(f"{name}: {size[1]}x{size[0]}: {error}") from error
        return draft, sizes
    except PictureError as error:
        return error


def _stop_if_refused(found: Survey, data: DataConfig, source: str, total: int) -> None:
    repair = "Repair the pictures, or correct data.image_dir"
    shorten = "Raise data.max_prompt_length, or lower data.max_pixels"
    if found.unreadable and data.on_bad_row == "stop":
        raise DataError(f"{source}: {_unreadable(found, total)}. {repair}, or set data.on_bad_row=skip.")
    if found.too_long and not data.filter_overlong_prompts:
        raise DataError(
            f"{source}: {_too_long(found, data, total)}. {shorten}, or set data.filter_overlong_prompts=true to leave "
            f"such rows out. Prompts are never cut."
        )
    if not found.usable:
        reasons = [f"{_too_long(found, data, total)}. {shorten}."] if found.too_long else []
        reasons += [f"{_unreadable(found, total)}. {repair}."] if found.unreadable else []
        raise DataError(f"{source}: no usable row: {' '.join(reasons)}")


def _too_long(found: Survey, data: DataConfig, total: int) -> str:
    shown = ", ".join(
        f"row {row} ({tokens} tokens, {images} image{'' if images == 1 else 's'})"
        for row, tokens, images in found.too_long[:SHOWN]
    )
    more = ", …" if len(found.too_long) > SHOWN else ""
    count = len(found.too_long)
    verb = "dropped as" if data.filter_overlong_prompts else "is" if count == 1 else "are"
    return f"{count} of {_rows(total)} {verb} longer than {data.max_prompt_length} tokens: {shown}{more}"


def _unreadable(found: Survey, total: int) -> str:
    shown = "; ".join(found.unreadable[:SHOWN]) + ("; …" if len(found.unreadable) > SHOWN else "")
    verb = "has an unreadable picture" if len(found.unreadable) == 1 else "have unreadable pictures"
    return f"{len(found.unreadable)} of {_rows(total)} {verb}: {shown}"


def _rows(number: int) -> str:
    return f"{number} row{'' if number == 1 else 's'}"
