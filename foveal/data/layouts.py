"""LLaMA-Factory's layouts of a row, ShareGPT and Alpaca → the columns that `data.prompt_key` and the others name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from foveal.data.messages import ROLES, Message, is_chat, media_inside, read_messages, up_to_question
from foveal.data.rows import Row, Rows
from foveal.errors import DataError
from foveal.track.console import note

if TYPE_CHECKING:
    from foveal.config.schema_data import DataConfig

CHATS = ("conversations", "messages")
IMAGES = ("images", "image")
VIDEOS = ("videos", "video")
ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
"""The columns of Alpaca's rows by LLaMA-Factory's names."""


@dataclass(frozen=True)
class Layout:
    """Where rows of a source hold what.

    Attributes:
        kind: "sharegpt": a chat, whose last answer is the truth; "alpaca": instruction, input and output.
        columns: the source's column by LLaMA-Factory's name: messages (ShareGPT); prompt, query, response, history
            (Alpaca); system, images, videos. Those that the source lacks may be missing.
        role_key, content_key: where a message has role and content; None finds out.
        roles: our name for each role of the source.
        folder: where relative paths of media start without `data.image_dir`.
    """

    kind: Literal["sharegpt", "alpaca"]
    columns: Mapping[str, str]
    role_key: str | None = None
    content_key: str | None = None
    roles: Mapping[str, str] = field(default_factory=lambda: ROLES)
    folder: Path | None = None


def guess_layout(rows: Rows, data: DataConfig) -> Layout | None:
    """The layout of rows without the columns `data.prompt_key` and `data.answer_key`; None where none is recognised."""
    has = set(rows.columns)
    candidates = {"images": (data.image_key, *IMAGES), "videos": (data.video_key, *VIDEOS)}
    media = {name: column for name, columns in candidates.items() if (column := _first(columns, has))}
    # A chat may hold its own answer; other prompts without an answer column are a mistake.
    if data.prompt_key in has and (data.answer_key in has or not is_chat(_first_row(rows).get(data.prompt_key))):
        return None
    chat = _first((data.prompt_key, *CHATS), has)
    if chat is not None:
        return Layout("sharegpt", {"messages": chat, "system": "system", **media})
    if {"instruction", "output"} <= has:
        return Layout("alpaca", {**ALPACA, "history": "history", "system": "system", **media})
    return None


def apply_layout(layout: Layout, rows: Rows, data: DataConfig) -> None:
    """Gives the rows their prompt, answer and media columns, and says so in a line; other columns stay.

    Raises:
        DataError: a column of the layout that every row needs is missing.
    """
    needed = "messages" if layout.kind == "sharegpt" else "prompt"
    rows.require(layout.columns[needed], f"column {needed} of the layout {layout.kind}")
    new = [data.prompt_key, data.answer_key]
    new += [key for key, name in _media_keys(data) if layout.columns.get(name) in rows.columns]
    note(
        f"{rows.source}: read in the layout {'ShareGPT' if layout.kind == 'sharegpt' else 'Alpaca'}, "
        f"{layout.columns[needed]} → {data.prompt_key}"
    )
    columns = list(dict.fromkeys([*rows.columns, *new]))
    rows.change(partial(_convert, layout=layout, data=data), columns, repr(layout))


def _convert(row: Row, place: str, layout: Layout, data: DataConfig) -> Row:
    found = {name: row[column] for name, column in layout.columns.items() if column in row}
    for name, kind in (("images", "image"), ("videos", "video")):
        if inside := not found.get(name) and media_inside(found.get("messages"), kind):
            found[name] = inside
    for unread in ("audios", "tools"):
        if row.get(layout.columns.get(unread, unread)) not in (None, [], "", "[]"):
            raise DataError(f"{place} has {unread}, which are not supported. Leave it out.")
    messages, answer = (_of_chat if layout.kind == "sharegpt" else _of_alpaca)(found, layout, place)
    if found.get("system") and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": str(found["system"])}, *messages]
    media = {key: _placed(found[name], layout, data) for key, name in _media_keys(data) if name in found}
    changed = {**row, **media, data.prompt_key: messages}
    # What a registry says counts for more than a column that happens to be called so.
    if data.answer_key not in row or (layout.folder is not None and answer is not None):
        if answer is None:
            raise DataError(f"{place} has no {data.answer_key!r}, and no answer after its last question.")
        changed[data.answer_key] = answer
    return changed


def _of_chat(found: Mapping[str, Any], layout: Layout, place: str) -> tuple[list[Message], Any]:
    chat = read_messages(
        found.get("messages"),
        f"{place}, {layout.columns['messages']!r}",
        role_key=layout.role_key,
        content_key=layout.content_key,
        roles=layout.roles,
    )
    asked = up_to_question(chat, f"{place}, {layout.columns['messages']!r}")
    answers = [message["content"] for message in chat[len(asked) :] if message["role"] == "assistant"]
    return asked, answers[-1] if answers else found.get("response")


def _of_alpaca(found: Mapping[str, Any], layout: Layout, place: str) -> tuple[list[Message], Any]:
    turns = found.get("history") or []
    if not isinstance(turns, Sequence) or not all(isinstance(turn, Sequence) and len(turn) == 2 for turn in turns):
        raise DataError(f"{place}: the history must be a list of [question, answer].")
    chat = [
        {"role": role, "content": str(text)}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    question = "\n".join(str(found[name]) for name in ("prompt", "query") if found.get(name))
    return [*chat, {"role": "user", "content": question}], found.get("response")


def _media_keys(data: DataConfig) -> tuple[tuple[str, str], tuple[str, str]]:
    return (data.image_key, "images"), (data.video_key, "videos")


def _placed(media: Any, layout: Layout, data: DataConfig) -> Any:
    """Relative paths made to start in the layout's folder, as LLaMA-Factory has it."""
    if layout.folder is None or data.image_dir is not None:
        return media
    if isinstance(media, list):
        return [_placed(item, layout, data) for item in media]
    inside = isinstance(media, str) and os.path.isfile(layout.folder / media)  # False for a picture in base64, too
    return str(layout.folder / media) if inside else media


def _first(names: Sequence[str], has: set[str]) -> str | None:
    return next((name for name in names if name in has), None)


def _first_row(rows: Rows) -> Row:
    """The first row that can be read; broken ones are named when every row is looked at."""
    for index in range(len(rows)):
        with suppress(DataError):
            return rows[index]
    return {}
