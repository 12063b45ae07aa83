"""One answer to score: what a reward function gets for it, and how it is shown to people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foveal.reward.contract import Outcome
from foveal.types import Group, Prompt, Response

LONGEST_SHOWN = 5000
"""Characters of each part of a sample that a message shows."""


@dataclass(frozen=True)
class Question:
    """What the answers of a group share, as plain Python values.

    Attributes:
        prompt: what the model was given, as text.
        row: every column of the data set except the media.
        pictures: their names.
        step: of the trainer.
    """

    prompt: str
    ground_truth: Any
    row: dict[str, Any]
    pictures: list[str]
    media: list[bytes]
    uid: str
    row_index: int
    step: int

    @classmethod
    def of(cls, prompt: Prompt, text: str, step: int) -> Question:
        pictures = [medium for medium in prompt.media if medium.kind == "image"]
        return cls(
            prompt=text,
            ground_truth=plain(prompt.answer),
            row=plain(prompt.row),
            pictures=[picture.name for picture in pictures],
            media=[picture.data for picture in pictures],
            uid=prompt.uid,
            row_index=prompt.row_index,
            step=step,
        )


@dataclass
class RewardSample:
    """One answer with its question.

    Attributes:
        index: 0-based number in the round.
        results: what each function that scored it said, by the function's name.
    """

    response: Response
    question: Question
    index: int = 0
    results: dict[str, Outcome] = field(default_factory=dict)

    @property
    def input(self) -> dict[str, Any]:
        """What a reward function gets. The first three keys are EasyR1's; "images" become `RewardPicture`s."""
        question = self.question
        return {
            "response": self.response.text,
            "response_length": len(self.response.token_ids),
            "ground_truth": question.ground_truth,
            "prompt": question.prompt,
            "row": question.row,
            "images": question.pictures,
            "finish_reason": self.response.finish_reason,
            "data_source": question.row.get("data_source"),
            "step": question.step,
            "uid": question.uid,
        }

    def describe(self) -> str:
        """The sample with its row, for a message."""
        question = self.question
        lines = [
            f"sample {self.index} (counted from 0), row {question.row_index} of the data, step {question.step}",
            f"prompt: {_shown(question.prompt)}",
            f"response: {_shown(self.response.text)}",
            f"ground truth: {_shown(question.ground_truth)}",
            f"row: {_shown(question.row)}",
        ]
        if question.pictures:
            lines.append(f"pictures: {', '.join(question.pictures)}")
        return "\n".join(f"  {line}" for line in lines)


def samples_of(group: Group, text: str, step: int) -> list[RewardSample]:
    """A sample for each response of `group`, baseline ones included."""
    question = Question.of(group.prompt, text, step)
    return [RewardSample(response, question) for response in group.responses]


def plain(value: Any) -> Any:
    """`value` with numpy scalars as numbers, and arrays and tuples as lists: what a row read from JSON would hold."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}… ({len(text)} characters)"
