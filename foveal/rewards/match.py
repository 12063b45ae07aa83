"""The same text, or the same number."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from foveal.rewards.reading import answer_in, numbers_in, with_form

REWARD_NAME = "match"
REWARD_TYPE = "sequential"

ARTICLES = re.compile(r"\b(a|an|the)\b")


def exact(
    reward_input: dict[str, Any], form: str | None = None, format_weight: float = 0.1, strict: bool = False
) -> dict[str, float]:
    """`overall` and `accuracy`: 1 where the answer is the truth, or one of the truths of a list.

    Upper and lower case, full-width forms, articles, blanks and a full stop at the end don't count.

    Args:
        strict: they do count, all but blanks at the ends.
    """
    response = reward_input["response"]
    answer = answer_in(response)
    truth = reward_input["ground_truth"]
    truths = truth if isinstance(truth, list | tuple) else [truth]
    same = str.strip if strict else plain
    accuracy = float(any(same(answer) == same(str(one)) for one in truths))
    return with_form(response, accuracy, form, format_weight)


def number(
    reward_input: dict[str, Any],
    form: str | None = None,
    format_weight: float = 0.1,
    tolerance: float = 1e-6,
    relative: float = 0.0,
) -> dict[str, float]:
    """`overall` and `accuracy`: 1 where the last number of the answer is the last one of the truth.

    Units and separators of thousands don't count; a percent sign that only one of the two has means hundredths.

    Args:
        tolerance, relative: the two may differ by `tolerance`, or by `relative` times the truth (0.05: ChartQA's).
    """
    response = reward_input["response"]
    mine, right = _value(answer_in(response)), _value(str(reward_input["ground_truth"]))
    close = mine is not None and right is not None and abs(mine - right) <= max(tolerance, relative * abs(right))
    return with_form(response, float(close), form, format_weight)


def plain(text: str) -> str:
    """Without what hardly ever makes an answer another one."""
    text = unicodedata.normalize("NFKC", text).casefold().strip().rstrip(".。")
    return " ".join(ARTICLES.sub(" ", text).split())


def _value(text: str) -> float | None:
    found = numbers_in(text)
    return found[-1] / (100 if text.rstrip(" .").endswith("%") else 1) if found else None
