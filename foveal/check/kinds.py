"""Every kind of fault that a row can have although a run would take it: how grave it is, its words, its cure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from foveal.check.findings import Finding, Level

# kind → (level, text, cure); what stands in braces is given to `Faults.add`
KINDS: dict[str, tuple[Level, str, str]] = {
    "empty question": (
        "warning",
        "{place}: the question ({key!r}) is empty",
        "Fill it in, leave the row out, or set data.prompt_key to the column with the question",
    ),
    "vision token": (
        "warning",
        "{place}: the question quotes a vision token of the model, which the model reads as plain text",
        "Write <image> where a picture goes, and take the token out",
    ),
    "control token": (
        "warning",
        "{place}: the question holds {token!r}, which to the model is no text but a sign between messages",
        "Take it out; the chat template adds what is needed",
    ),
    "question lost": (
        "error",
        "{place}: the question is not in the prompt that {file} makes of it",
        "Write {{{{ content }}}} where the question goes",
    ),
    "no answers": (
        "warning",
        "no row has an answer in {key!r}",
        "Set data.answer_key to the column with the truth, unless the reward needs none",
    ),
    "empty answer": (
        "warning",
        "{place}: the answer ({key!r}) is empty",
        "Fill it in or leave the row out: the reward has nothing to compare with",
    ),
    "answer type": (
        "warning",
        "{place}: the answer is a {found}, and most are a {most}",
        "Write {key!r} the same way in every row, or let the reward function take both",
    ),
    "copy": ("note", "{place} is the same as {first}", "Leave the copies out, unless the row is meant to count more"),
    "contradiction": (
        "warning",
        "{place} asks the same as {first}, and has another answer",
        "Correct the wrong answer, or leave one of them out",
    ),
    "in training": (
        "warning",
        "{place} is also there to train on ({first})",
        "Validate on other rows: a score on rows that were trained on says little",
    ),
    "thin": (
        "warning",
        "{name} is {width}x{height} pixels, very long and thin",
        "Look whether it was cut wrongly",
    ),
    "tiny": (
        "warning",
        "{name} is {width}x{height} pixels",
        "Look whether it only stands where a picture is missing",
    ),
    "large": (
        "note",
        "{name} is {width}x{height} pixels; each use decodes it whole, which takes a second or more",
        "Make it smaller once, before the run",
    ),
    "outside": (
        "warning",
        "{name} lies outside data.image_dir ({folder})",
        "Copy it there, so that the data can be moved and no other file is read",
    ),
    "animated": ("note", "{name} is animated; its first frame is used", "Give the frame you mean, or a video"),
    "printing colours": (
        "note",
        "{name} has printing colours (CMYK), which change a little when they become RGB",
        "Save it as RGB",
    ),
}


@dataclass
class _Fault:
    level: Level
    text: str
    cure: str
    rows: list[int]


class Faults:
    """Collects the faults of one source by kind: the first row's words, and the numbers of all."""

    def __init__(self) -> None:
        self._by_kind: dict[str, _Fault] = {}

    def add(self, kind: str, row: int, **words: object) -> None:
        """One of `KINDS`."""
        level, text, cure = KINDS[kind]
        self.add_other(kind, row, level, text.format(**words), cure.format(**words))

    def add_other(self, kind: str, row: int, level: Level, text: str, cure: str) -> None:
        """A fault with words of its own; equal `kind`s are told together."""
        self._by_kind.setdefault(kind, _Fault(level, text, cure, [])).rows.append(row)

    def findings(self, subject: str) -> Iterator[Finding]:
        for fault in self._by_kind.values():
            rows = tuple(sorted(set(fault.rows)))
            others = len(rows) - 1
            more = f" (and {others} more row{'s' if others > 1 else ''} of this kind)" if others else ""
            yield Finding(fault.level, subject, fault.text + more, fault.cure, rows)
