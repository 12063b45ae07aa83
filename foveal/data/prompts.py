"""Rows to prompts: format prompt, chat template, both lists of token ids, and the proof that they fit the pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jinja2

from foveal.data.contract import check_prompt
from foveal.data.download import fetch, is_url
from foveal.data.format_prompt import FormatPrompt
from foveal.data.images import PictureError, media_values
from foveal.data.media import MediaSize, MediaSource
from foveal.data.messages import Message, media_inside, read_messages, up_to_question
from foveal.data.processing import Processing
from foveal.data.rows import Rows, count
from foveal.errors import DataError, ModelError
from foveal.types import Prompt

if TYPE_CHECKING:
    from foveal.config.schema_data import DataConfig

MARK = re.compile(r"(<image>|<video>)")
MOST_BYTES = 256 * 1024 * 1024
"""Of a picture that is downloaded."""


@dataclass
class Draft:
    """A row as rendered text, with its pictures and videos found but not read.

    Attributes:
        text: the chat template's output, one placeholder per medium.
        media: in the order of their placeholders.
    """

    row_index: int
    row: dict[str, Any]
    text: str
    media: list[MediaSource]

    def sizes(self) -> list[MediaSize]:
        """What decides the number of each medium's tokens, from the headers; PictureError if one cannot be read."""
        return [medium.size() for medium in self.media]


class PromptBuilder:
    """Makes prompts of the rows of one source.

    In the text of a row each `<image>` or `<video>` is where the next one goes; the model's chat template puts its
    placeholder there. Vision tokens that the text quotes are made harmless (`Processing.neutralise`).

    Raises:
        DataError: the format prompt file is missing, or no Jinja template.
    """

    def __init__(self, data: DataConfig, processing: Processing, rows: Rows) -> None:
        self.data = data
        self.processing = processing
        self.rows = rows
        self._format = FormatPrompt(data.format_prompt) if data.format_prompt else None

    def draft(self, index: int) -> Draft:
        """Renders row `index` and finds its media; reads and decodes none of them.

        Raises:
            PictureError: a picture's or video's file is missing.
            DataError: the numbers of marks and media differ, or the row has no usable prompt.
            ModelError: the row has media and the model takes text only.
        """
        row = self.rows[index]
        place = self.rows.place(index)
        for key in (self.data.prompt_key, self.data.answer_key):
            if key not in row:
                raise DataError(f"{place} has no {key!r}; it has: {', '.join(row)}.")
        chat = row[self.data.prompt_key]
        images = media_values(row.get(self.data.image_key), f"{place}, {self.data.image_key!r}")
        videos = media_values(row.get(self.data.video_key), f"{place}, {self.data.video_key!r}")
        inside = media_inside(chat, "image"), media_inside(chat, "video")
        if any(inside):
            images, videos = images or inside[0], videos or inside[1]
            # Once as media is enough: rows are kept, and sent to the processes of the reward function.
            row = {**row, self.data.prompt_key: read_messages(chat, f"{place}, {self.data.prompt_key!r}")}
        messages = self._messages(row, place)
        marks = self._check_marks(messages, {"image": len(images), "video": len(videos)}, place)
        for kind, values, key in (("image", images, self.data.image_key), ("video", videos, self.data.video_key)):
            if values and kind not in self.processing.placeholders:
                takes = "pictures but no videos" if self.processing.placeholders else "text only"
                raise ModelError(
                    f"{place} has {count(len(values), kind)}, but the model takes {takes} (model type "
                    f"{self.processing.model_type!r}). Use a vision-language model, or data without {key!r}."
                )
        text = self._render(messages, place)
        if broken := re.search("[\ud800-\udfff]", text):
            raise DataError(
                f"{place}: the prompt holds {broken[0]!r}, half of a character. Write the data again as valid UTF-8."
            )
        row_name = self.rows.name(index)
        found: dict[str, Iterator[MediaSource]] = {
            "image": iter([self._find("image", one, f"{row_name}, image {n}") for n, one in enumerate(images)]),
            "video": iter([self._find("video", one, f"{row_name}, video {n}") for n, one in enumerate(videos)]),
        }
        rest = {key: value for key, value in row.items() if key not in (self.data.image_key, self.data.video_key)}
        return Draft(index, rest, text, [next(found[kind]) for kind in marks])

    def build(self, index: int, uid: str) -> Prompt:
        """The prompt of row `index`, proved by `check_prompt`.

        Raises:
            PictureError: a picture or video cannot be read or decoded.
            DataError, ModelError: as `draft`.
        """
        draft = self.draft(index)
        media = [medium.read() for medium in draft.media]
        token_ids, expanded_ids, features = self.processing.encode(draft.text, media)
        prompt = Prompt(
            uid=uid,
            token_ids=token_ids,
            expanded_ids=expanded_ids,
            media=media,
            row=draft.row,
            row_index=index,
            answer=draft.row[self.data.answer_key],
            features=features,
        )
        check_prompt(prompt, self.processing)
        self.processing.hold(prompt)
        return prompt

    def _messages(self, row: dict[str, Any], place: str) -> list[Message]:
        """The chat up to its last question, which is formatted; media are marks in the content."""
        given = row[self.data.prompt_key]
        if isinstance(given, str):
            messages = [{"role": "user", "content": given}]
        else:
            key_place = f"{place}, {self.data.prompt_key!r}"
            messages = up_to_question(read_messages(given, key_place), key_place)
        if self.data.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.data.system_prompt})
        if self._format is not None:
            messages[-1]["content"] = self._format.render(messages[-1]["content"], row, place)
        return messages

    def _render(self, messages: list[Message], place: str) -> str:
        try:
            return self.processing.render([self._chat_message(message) for message in messages])
        except jinja2.TemplateError as error:  # a template of the user's, or a model's that refuses, say, a system role
            name = self.data.override_chat_template or "of the model"
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise DataError(
                f"{place}: the chat template {name}{line} fails: {error}. The prompt's roles are: "
                f"{', '.join(message['role'] for message in messages)}. Change the messages, or the template "
                f"(data.override_chat_template)."
            ) from error

    def _find(self, kind: Literal["image", "video"], value: Any, name: str) -> MediaSource:
        """As `MediaSource.find`; a web address, where it is allowed, is downloaded."""
        try:
            value = _downloaded(value) if self.data.allow_urls else value
        except DataError as error:
            raise PictureError(f"{name}: {error}") from error
        return MediaSource.find(kind, value, self.data.image_dir, name)

    def _check_marks(self, messages: list[Message], given: dict[str, int], place: str) -> list[str]:
        """The kinds of media in the order of their marks, of which there must be as many as are given."""
        marks = [mark[1:-1] for mark in MARK.findall("\0".join(message["content"] for message in messages))]
        for kind, key in (("image", "image_key"), ("video", "video_key")):
            if marks.count(kind) == given[kind]:
                continue
            column = getattr(self.data, key)
            if column not in self.rows.columns:
                cure = (
                    f"No row has a column {column!r} (data.{key}); the columns are: {', '.join(self.rows.columns)}. "
                    f"Set data.{key}, or take the mark out."
                )
            else:
                cure = (
                    f"Put one <{kind}> into {self.data.prompt_key!r} for each {kind} of {column!r}, where it belongs, "
                    f"or change the row or data.format_prompt so that the two agree."
                )
            raise DataError(
                f"{place}: {count(marks.count(kind), f'<{kind}> mark')}, {count(given[kind], kind)}. {cure}"
            )
        return marks

    def _chat_message(self, message: Message) -> dict[str, Any]:
        """The message as a chat template takes it: text, or parts where there are media."""
        pieces = MARK.split(message["content"])
        if len(pieces) == 1:
            return {"role": message["role"], "content": self.processing.neutralise(pieces[0])}
        parts = [
            {"type": piece[1:-1]}
            if MARK.fullmatch(piece)
            else {"type": "text", "text": self.processing.neutralise(piece)}
            for piece in pieces
            if piece
        ]
        return {"role": message["role"], "content": parts}


def _downloaded(value: Any) -> Any:
    """A picture or video, or the frames of one, with files in the place of web addresses."""
    if isinstance(value, list):
        return [_downloaded(one) for one in value]
    if isinstance(value, dict) and "frames" in value:
        return {**value, "frames": _downloaded(value["frames"])}
    address = value.get("path") if isinstance(value, dict) and not value.get("bytes") else value
    return fetch(address, MOST_BYTES) if is_url(address) else value
