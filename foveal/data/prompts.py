"""Rows to prompts: format prompt, chat template, both lists of token ids, and the proof that they fit the pictures."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from foveal.data.images import locate, media_values, picture_size, to_media
from foveal.data.processing import Processing
from foveal.data.source import Rows
from foveal.errors import DataError, ModelError
from foveal.types import Prompt

if TYPE_CHECKING:
    from foveal.config.schema_data import DataConfig

MARK = re.compile(r"(<image>|<video>)")


@dataclass
class Draft:
    """A row as rendered text, with its pictures found but not read.

    Attributes:
        text: the chat template's output, one placeholder per picture.
        pictures: (encoded bytes or file, name for messages) of each.
    """

    row_index: int
    row: dict[str, Any]
    text: str
    pictures: list[tuple[bytes | Path, str]]

    def sizes(self) -> list[tuple[int, int]]:
        """(height, width) of each picture, from the headers alone; PictureError if one cannot be read."""
        return [picture_size(place, name) for place, name in self.pictures]


class PromptBuilder:
    """Makes prompts of the rows of one source.

    In the text of a row each `<image>` is where the next picture goes; the model's chat template puts its placeholder
    there. Vision tokens that the text quotes are made harmless (`Processing.neutralise`).

    Raises:
        DataError: the prompt or answer column or the format prompt file is missing, or the file is no Jinja template.
    """

    def __init__(self, data: DataConfig, processing: Processing, rows: Rows) -> None:
        rows.require(data.prompt_key, "data.prompt_key")
        rows.require(data.answer_key, "data.answer_key")
        self.data = data
        self.processing = processing
        self.rows = rows
        self._template = _load_template(data.format_prompt) if data.format_prompt else None

    def draft(self, index: int) -> Draft:
        """Renders row `index` and finds its pictures; reads and decodes none of them.

        Raises:
            PictureError: a picture's file is missing.
            DataError: the numbers of marks and media differ, or the row has a video or no usable prompt.
            ModelError: the row has pictures and the model takes text only.
        """
        row = self.rows[index]
        place = f"row {index} of {self.rows.source}"
        for key in (self.data.prompt_key, self.data.answer_key):
            if key not in row:
                raise DataError(f"{place} has no {key!r}; it has: {', '.join(row)}.")
        images = media_values(row.get(self.data.image_key), f"{place}, {self.data.image_key!r}")
        videos = media_values(row.get(self.data.video_key), f"{place}, {self.data.video_key!r}")
        if videos:
            raise DataError(f"{place} has {_count(len(videos), 'video')}; videos are not supported yet. Leave it out.")
        messages = self._messages(row, place)
        self._check_marks(messages, len(images), place)
        if images and self.processing.processor is None:
            raise ModelError(
                f"{place} has {_count(len(images), 'image')}, but the model takes text only (model type "
                f"{self.processing.model_type!r}). Use a vision-language model, or data without "
                f"{self.data.image_key!r}."
            )
        text = self.processing.render([self._chat_message(message) for message in messages])
        if broken := re.search("[\ud800-\udfff]", text):
            raise DataError(
                f"{place}: the prompt holds {broken[0]!r}, half of a character. Write the data again as valid UTF-8."
            )
        pictures = [
            locate(image, self.data.image_dir, f"row {index}, image {number}") for number, image in enumerate(images)
        ]
        rest = {key: value for key, value in row.items() if key not in (self.data.image_key, self.data.video_key)}
        return Draft(index, rest, text, pictures)

    def build(self, index: int, uid: str) -> Prompt:
        """The prompt of row `index`, proved by `check_prompt`.

        Raises:
            PictureError: a picture cannot be read or decoded.
            DataError, ModelError: as `draft`.
        """
        draft = self.draft(index)
        media = [to_media(place, name) for place, name in draft.pictures]
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

    def _messages(self, row: dict[str, Any], place: str) -> list[dict[str, str]]:
        """The chat as {"role", "content"}, media as marks in the content; the last user message is formatted."""
        given = row[self.data.prompt_key]
        if isinstance(given, str):
            return [{"role": "user", "content": self._format(given, row, place)}]
        if not isinstance(given, list) or not all(isinstance(m, dict) and m.get("role") for m in given):
            raise DataError(
                f"{place}: {self.data.prompt_key!r} is a {type(given).__name__}; it must be text, or a list of chat "
                f"messages with role and content."
            )
        messages = [{"role": m["role"], "content": _marked(m.get("content"), place)} for m in given]
        asked = next((message for message in reversed(messages) if message["role"] == "user"), None)
        if asked is None:
            raise DataError(f"{place}: {self.data.prompt_key!r} has no message of the role user.")
        asked["content"] = self._format(asked["content"], row, place)
        return messages

    def _format(self, content: str, row: dict[str, Any], place: str) -> str:
        if self._template is None:
            return content
        variables = {**row, "content": content}
        try:
            return self._template.render(variables)
        except Exception as error:  # whatever the user's template does
            raise DataError(
                f"{place}: the format prompt {self.data.format_prompt} fails: {error}. Its variables are: "
                f"{', '.join(['content', *(name for name in row if name != 'content')])}."
            ) from error

    def _check_marks(self, messages: list[dict[str, str]], images: int, place: str) -> None:
        marks = MARK.findall("".join(message["content"] for message in messages))
        image_marks, video_marks = marks.count("<image>"), marks.count("<video>")
        if image_marks != images:
            unknown = self.data.image_key not in self.rows.columns
            raise DataError(
                f"{place}: {_count(image_marks, '<image> mark')}, {_count(images, 'image')}. "
                + (
                    f"No row has a column {self.data.image_key!r} (data.image_key); the columns are: "
                    f"{', '.join(self.rows.columns)}."
                    if unknown
                    else f"Put one <image> into {self.data.prompt_key!r} for each image of {self.data.image_key!r}, "
                    f"where it belongs, or change the row or data.format_prompt so that the two agree."
                )
            )
        if video_marks:
            raise DataError(f"{place}: {_count(video_marks, '<video> mark')}, 0 videos. Take the mark out.")

    def _chat_message(self, message: dict[str, str]) -> dict[str, Any]:
        """The message as a chat template takes it: text, or parts where there are pictures."""
        pieces = MARK.split(message["content"])
        if len(pieces) == 1:
            return {"role": message["role"], "content": self.processing.neutralise(pieces[0])}
        parts = [
            {"type": "image"} if piece == "<image>" else {"type": "text", "text": self.processing.neutralise(piece)}
            for piece in pieces
            if piece
        ]
        return {"role": message["role"], "content": parts}


def check_prompt(prompt: Prompt, processing: Processing) -> None:
    """Proves that placeholders, media and visual features of a prompt (which has them) fit each other, per modality.

    Raises:
        DataError: names the row and the numbers that differ.
    """
    features = prompt.features or {}
    for kind, token_id in (("image", processing.image_token_id), ("video", processing.video_token_id)):
        media = sum(medium.kind == kind for medium in prompt.media)
        grid = features.get(f"{kind}_grid_thw")
        patches = [int(count) for count in grid.prod(-1)] if grid is not None else []
        pixels = features.get("pixel_values" if kind == "image" else "pixel_values_videos")
        rows = len(pixels) if pixels is not None else 0
        tokens = sum(count // processing.merge_length for count in patches)
        placeholders = prompt.token_ids.count(token_id) if token_id is not None else 0
        expanded = prompt.expanded_ids.count(token_id) if token_id is not None else 0
        if not (placeholders == media == len(patches) and expanded == tokens and rows == sum(patches)):
            raise DataError(
                f"row {prompt.row_index} ({prompt.uid}): {_count(media, kind)}, {placeholders} placeholders, grids of "
                f"{len(patches)}; {expanded} {kind} tokens, {tokens} features; {rows} patches, {sum(patches)} in the "
                f"grids. Each must agree; the model's processor and chat template do not fit each other."
            )
    if _expand(prompt, processing) != prompt.expanded_ids:
        raise DataError(
            f"row {prompt.row_index} ({prompt.uid}): the processor's {len(prompt.expanded_ids)} token ids are not the "
            f"prompt's {len(prompt.token_ids)} with each placeholder repeated per feature, so engine and trainer would "
            f"see different prompts. The model's processor and tokenizer do not fit each other."
        )


def _expand(prompt: Prompt, processing: Processing) -> list[int]:
    """The unexpanded ids with each image placeholder repeated once per visual token."""
    grid = (prompt.features or {}).get("image_grid_thw")
    counts = iter([int(count) // processing.merge_length for count in grid.prod(-1)] if grid is not None else [])
    expanded: list[int] = []
    for token in prompt.token_ids:
        expanded += [token] * next(counts) if token == processing.image_token_id else [token]
    return expanded


def _load_template(file: str) -> jinja2.Template:
    path = Path(file)
    if not path.is_file():
        raise DataError(f"data.format_prompt: there is no file {file} (looked for from {Path.cwd()}).")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    try:
        return environment.from_string(path.read_text(encoding="utf-8").strip())
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"data.format_prompt: {file}, line {error.lineno}: {error.message}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.format_prompt: cannot read {file} as UTF-8 text ({error}).") from error


def _marked(content: Any, place: str) -> str:
    """A message's content as text with marks, whether it came as text or as parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_marked_part(part, place) for part in content)
    raise DataError(f"{place}: a message's content is a {type(content).__name__}; it must be text or a list of parts.")


def _marked_part(part: Any, place: str) -> str:
    kind, text = (part.get("type") or "text", part.get("text") or "") if isinstance(part, dict) else (None, None)
    if kind in ("image", "video"):
        return f"<{kind}>"
    if kind == "text" and isinstance(text, str):
        return text
    raise DataError(
        f'{place}: a message has the part {str(part)[:120]}; allowed are {{"type": "text", "text": …}}, '
        f'{{"type": "image"}} and {{"type": "video"}}, the media themselves being in their own column.'
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
