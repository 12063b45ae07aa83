"""Prompts as the model will get them, for the terminal and as a page with their pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from PIL import Image

from foveal.check.findings import Finding, name_rows
from foveal.data.prompts import PromptBuilder
from foveal.errors import DataError, FovealError

SIDE = 384
"""Of a picture on the page, in pixels at most."""
TERMINAL_CHARACTERS = 1500
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
article { border: 1px solid #ccc; border-radius: 6px; margin: 1rem 0; padding: .5rem 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; padding: .5rem; }
img { vertical-align: middle; margin: 2px; max-width: 100%; }
h2 { font-size: 1rem; }
.error { color: #a00; } .warning { color: #960; } .note { color: #357; }
"""


@dataclass
class Medium:
    """A picture or video as it is shown: `caption`, as "640x480, 391 tokens", and a small JPEG of it if it has one."""

    caption: str
    jpeg: bytes | None = None


@dataclass
class Shown:
    """A row as it is shown.

    Attributes:
        pieces: the prompt's text, cut where its media are.
        faults: (level, text) of what was found in the row.
    """

    place: str
    pieces: list[str]
    media: list[Medium]
    answer: str
    faults: list[tuple[str, str]]

    def text(self) -> str:
        """For the terminal."""
        marks = [f"[{medium.caption}]" for medium in self.media] + [""]
        prompt = "".join(piece + mark for piece, mark in zip(self.pieces, marks, strict=True))
        if len(prompt) > TERMINAL_CHARACTERS:
            prompt = f"{prompt[:TERMINAL_CHARACTERS]}… ({len(prompt)} characters)"
        lines = "\n".join(f"  | {line}" for line in prompt.splitlines())
        return f"\n{self.place}, as the model gets it:\n{lines}\n  answer: {self.answer}"

    def html(self) -> str:
        parts = [escape(self.pieces[0])]
        for piece, medium in zip(self.pieces[1:], self.media, strict=True):
            parts += [_picture(medium), escape(piece)]
        faults = "".join(f'<p class="{level}">{level}: {escape(text)}</p>' for level, text in self.faults)
        return (
            f"<article><h2>{escape(self.place)}</h2>{faults}<pre>{''.join(parts)}</pre>"
            f"<p>answer: <code>{escape(self.answer)}</code></p></article>"
        )


def show(builder: PromptBuilder, row: int, faults: list[tuple[str, str]]) -> Shown:
    """A row with its pictures made small; one that cannot be read is shown as far as it can."""
    place, processing = builder.rows.place(row), builder.processing
    try:
        draft = builder.draft(row)
    except FovealError as error:
        return Shown(place, [f"(no prompt: {error})"], [], "", faults)
    pieces, media = [draft.text], []
    for medium in draft.media:
        token = str(processing.tokenizer.convert_ids_to_tokens(processing.placeholders[medium.kind]))
        head, _, tail = pieces[-1].partition(token)
        pieces[-1:] = [head, tail]
        try:
            size = medium.size()
            caption = f"{medium.kind} {medium.name}, {processing.visual_tokens(size)} tokens"
            images = processing.pictures([medium.read()])  # none of a video
            media.append(Medium(caption, _small(images[0]) if images else None))
        except (FovealError, ValueError) as error:
            media.append(Medium(f"{medium.kind} that cannot be read: {error}"))
    return Shown(place, pieces, media, str(draft.row[builder.data.answer_key]), faults)


def write_page(path: Path, shown: Sequence[Shown], findings: Sequence[Finding], lines: Sequence[str]) -> None:
    """One HTML file that needs no other: the account, the findings, then the prompts.

    Raises:
        DataError: it cannot be written.
    """
    items = "".join(
        f'<li class="{one.level}"><b>{one.level}</b>, {escape(one.subject)}: {escape(one.text)}'
        f"{escape(f' [{name_rows(one.rows)}]') if one.rows else ''}<br>{escape(one.cure)}</li>"
        for one in findings
    )
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>foveal check</title>'
        f"<style>{STYLE}</style><h1>foveal check</h1><pre>{escape(chr(10).join(lines))}</pre>"
        f"<ul>{items}</ul>{''.join(one.html() for one in shown)}</html>\n"
    )
    try:
        path.write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise DataError(f"--html: cannot write {path}: {error.strerror or error}. Give another file.") from error


def _picture(medium: Medium) -> str:
    caption = escape(medium.caption, quote=True)
    if medium.jpeg is None:
        return f"<i>[{caption}]</i>"
    data = base64.b64encode(medium.jpeg).decode()
    return f'<img alt="{caption}" title="{caption}" src="data:image/jpeg;base64,{data}">'


def _small(image: Image.Image) -> bytes:
    image.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()
