"""What is wrong or odd in the text and the answers of rows that can be read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

from foveal.check.kinds import Faults
from foveal.config.schema_data import DataConfig
from foveal.data.processing import Processing
from foveal.data.prompts import MARK, Draft
from foveal.data.video import Stills

RARE = 0.2
"""Answers of another type than most are named if they are fewer than this part."""
OPENING = 24
"""Characters of a question that are looked for in its prompt."""
LOST = 0.9
"""The format prompt forgets the question if more than this part of the prompts lacks it."""

Seen = dict[bytes, tuple[str, str]]
"""(place, answer) by the digest of a question and its pictures."""


class TextCheck:
    """Looks at one row after the other; `finish` adds what only shows when all have been seen.

    Args:
        seen: shared by all sources of a split, so that rows that stand in two of them are found.
        trained: that of the training rows, when these are for validation.
    """

    def __init__(self, data: DataConfig, processing: Processing, faults: Faults, seen: Seen, trained: Seen) -> None:
        self._data = data
        self._processing = processing
        self._faults = faults
        self._seen = seen
        self._trained = trained
        self._control_tokens = _control_tokens(processing)
        self._rows = 0
        self._answers: dict[str, list[tuple[int, str]]] = {}  # (row, place) by type
        self._empty: list[tuple[int, str]] = []
        self._lost: list[tuple[int, str]] = []

    def look(self, draft: Draft, place: str) -> None:
        """`place` names the row in messages."""
        self._rows += 1
        question = text_of(draft.row[self._data.prompt_key])
        self._look_at_question(draft, question, place)
        answer = draft.row[self._data.answer_key]
        found = self._empty if _is_empty(answer) else self._answers.setdefault(_kind(answer), [])
        found.append((draft.row_index, place))
        self._look_for_copy(draft, question, answer, place)

    def finish(self) -> None:
        key = self._data.answer_key
        kind = "no answers" if len(self._empty) == self._rows else "empty answer"
        for row, place in self._empty:
            self._faults.add(kind, row, place=place, key=key)
        most = max(self._answers, key=lambda name: len(self._answers[name]), default="")
        for name, rows in self._answers.items():
            if name != most and len(rows) <= RARE * self._rows:
                for row, place in rows:
                    self._faults.add("answer type", row, place=place, found=name, most=most, key=key)
        if len(self._lost) > LOST * self._rows:
            for row, place in self._lost:
                self._faults.add("question lost", row, place=place, file=self._data.format_prompt)

    def _look_at_question(self, draft: Draft, question: str, place: str) -> None:
        bare = MARK.sub("", question).strip()
        if not bare:
            self._faults.add("empty question", draft.row_index, place=place, key=self._data.prompt_key)
        if self._processing.neutralise(question) != question:
            self._faults.add("vision token", draft.row_index, place=place)
        token = next((token for token in self._control_tokens if token in question), None)
        if token is not None:
            self._faults.add("control token", draft.row_index, place=place, token=token)
        if self._data.format_prompt and bare and bare.splitlines()[0][:OPENING].strip() not in draft.text:
            self._lost.append((draft.row_index, place))

    def _look_for_copy(self, draft: Draft, question: str, answer: Any, place: str) -> None:
        digest = hashlib.blake2b(question.encode(errors="surrogatepass"), digest_size=16)
        for medium in draft.media:
            for part in medium.place.frames if isinstance(medium.place, Stills) else (medium.place,):
                digest.update(part if isinstance(part, bytes) else os.fsencode(os.path.abspath(part)))
        key, truth = digest.digest(), json.dumps(answer, default=str, sort_keys=True)
        if key in self._trained:
            self._faults.add("in training", draft.row_index, place=place, first=self._trained[key][0])
        first, first_truth = self._seen.setdefault(key, (place, truth))
        if first != place:
            kind = "copy" if first_truth == truth else "contradiction"
            self._faults.add(kind, draft.row_index, place=place, first=first)


def _control_tokens(processing: Processing) -> list[str]:
    """Special tokens of the tokenizer other than those of pictures, which are made harmless."""
    tokens = processing.tokenizer.added_tokens_decoder.items()
    return [token.content for id, token in tokens if token.special and id not in processing.forbidden_ids]


def text_of(prompt: Any) -> str:
    """The text of a prompt as the row has it: a string, or the contents of its messages."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return "\n".join(text_of(part) for part in prompt)
    if isinstance(prompt, dict):
        return text_of(next((prompt[key] for key in ("content", "value", "text") if prompt.get(key)), ""))
    return ""


def _is_empty(answer: Any) -> bool:
    return answer is None or answer in ([], {}) or (isinstance(answer, str) and not answer.strip())


def _kind(answer: Any) -> str:
    if isinstance(answer, bool):  # which Python counts among the numbers
        return "truth value"
    names = {str: "text", int: "number", float: "number", list: "list", tuple: "list", dict: "mapping"}
    return names.get(type(answer), type(answer).__name__)


def spread(rows: Sequence[int], most: int) -> Sequence[int]:
    """At most so many of the rows, evenly spread, the first among them."""
    return [rows[index * len(rows) // most] for index in range(most)] if len(rows) > most else rows
