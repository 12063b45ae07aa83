"""What is odd about a column of ground truths by itself, whatever the reward makes of it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from foveal.check.answers import numbers_of, unwrap
from foveal.check.asked import instructions
from foveal.check.findings import Finding
from foveal.check.tries import Case

SUBJECT = "data.answer_key"
NUMBERING = re.compile(r"id|no|nr|idx|index|num|row|key", re.I)
FEW = 8
"""Rows below which a pattern in the column says nothing."""
FILE = re.compile(r"\S+\.(png|jpe?g|webp|gif|bmp|json|mp4)|https?://\S+|[\w.-]+/[\w./-]+/[\w.-]+\.\w{2,4}", re.I)
ID = re.compile(r"[A-Za-z]+[_-]\d+|[0-9a-f]{16,}|\w+-\w+-\d{2,}|[0-9a-f]{8}-[0-9a-f-]{27}")


def odd_truths(cases: Sequence[Case], key: str) -> list[Finding]:
    """Empty truths, the same one everywhere, numbers of rows, names of files, ids, or the question itself."""
    findings = []
    empty = [case for case in cases if _is_empty(case.truth)]
    if empty:
        text = f"the ground truth is empty in {len(empty)} of {len(cases)} rows"
        cure = "Leave these rows out, or set data.answer_key to the column that has the answer"
        findings.append(Finding("warning", SUBJECT, text, cure, tuple(case.prompt.row_index for case in empty)))
    truths = [case.truth for case in cases if not _is_empty(case.truth)]
    if len(truths) < FEW:
        return findings
    reason = _pattern(truths, cases, key)
    if reason:
        text = f"the column {key!r} {reason}"
        findings.append(Finding("warning", SUBJECT, text, "Set data.answer_key to the column that has the answer"))
    return findings


def given_away(cases: Sequence[Case]) -> list[Finding]:
    """Prompts that hold the truth, and prompts that are all the same."""
    own = [instructions(case.text, case.question) for case in cases]
    truths = [str(case.truth).strip() for case in cases]
    if len(cases) < FEW:
        return []
    others = [next((text for text, one in zip(own, truths, strict=True) if one != truth), truth) for truth in truths]
    telling = [
        truth not in other for truth, other in zip(truths, others, strict=True)
    ]  # else the wording has it anyway
    held = all(truth and truth in text for truth, text in zip(truths, own, strict=True))
    if held and sum(telling) > len(telling) / 2:
        text = "every prompt holds its own ground truth outside of the question"
        return [Finding("error", "data.format_prompt", text, "Take the answer's column out of the template")]
    texts, questions = {case.text for case in cases}, {case.question for case in cases}
    if len(texts) == 1 and len(questions) > 1:
        text = "all prompts are the same although the questions differ"
        return [Finding("error", "data.format_prompt", text, "Put {{ content }} where the question goes")]
    return []


def outside_pictures(cases: Sequence[Case]) -> list[Finding]:
    """Boxes and points in pixels that lie outside of their picture."""
    rows = []
    for case in cases:
        numbers = numbers_of(unwrap(case.truth)) if case.asked.kind in ("box", "point") else []
        if not case.sizes or len(numbers) not in (2, 4) or not re.search(r"\bpixels?\b", case.asked.text):
            continue
        height, width = case.sizes[0]
        if max(numbers[0::2]) > width or max(numbers[1::2]) > height:
            rows.append(case.prompt.row_index)
    if not rows:
        return []
    of = f"{len(rows)} of {len(cases)} rows"
    text = f"on {of} the ground truth lies outside of the picture, and the prompt asks for pixels"
    cure = "See whether it is in thousandths, of another size of the picture, or has x and y exchanged"
    return [Finding("warning", SUBJECT, text, cure, tuple(rows))]


def _is_empty(truth: Any) -> bool:
    if isinstance(truth, float):
        return math.isnan(truth)
    if isinstance(truth, str):
        return not truth.strip()
    return truth is None or (isinstance(truth, list | dict | tuple) and not truth)


def _pattern(truths: list[Any], cases: Sequence[Case], key: str) -> str:
    texts = [str(truth).strip() for truth in truths]
    if len(set(texts)) == 1:
        return f"holds the same in every row: {texts[0][:60]!r}"
    if all(FILE.fullmatch(text) for text in texts):
        return f"holds names of files or addresses, as {texts[0][:60]!r}"
    if all(ID.fullmatch(text) for text in texts) and len(set(texts)) == len(texts):
        return f"holds ids, as {texts[0][:60]!r}"
    if all(text == case.question.replace("<image>", "").strip() for text, case in zip(texts, cases, strict=False)):
        return "holds the question itself"
    if all(re.fullmatch(r"\d+", text) for text in texts) and NUMBERING.search(key):
        numbers = [int(text) for text in texts]
        rows = [case.prompt.row_index for case in cases][: len(numbers)]
        if len({number - row for number, row in zip(numbers, rows, strict=False)}) == 1:
            return f"counts the rows ({numbers[0]}, {numbers[1]}, {numbers[2]} …)"
    return ""
