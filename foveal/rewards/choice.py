"""Multiple choice: one letter, or several."""

from __future__ import annotations

import re
from typing import Any

from foveal.rewards.reading import answer_in, with_form

REWARD_NAME = "choice"
REWARD_TYPE = "sequential"

SINGLE = re.compile(r"\(?\s*([A-Z])\s*\)?(?:[.:、．)]\s*.*|\s*)", re.DOTALL)
SEVERAL = re.compile(r"\(?[A-Z]\)?(?:\s*(?:[,;&、/]|and|\s)\s*\(?[A-Z]\)?)+|[A-Z]{2,}")


def compute_score(
    reward_input: dict[str, Any], form: str | None = None, format_weight: float = 0.1, partial: bool = False
) -> dict[str, float]:
    """`overall` and `accuracy`, and `format` with `form`.

    The answer is read where `<answer>`, `\\boxed{}` or `Answer:` puts it, else the whole response. `C`, `(c)`, `C.` and
    `C. blue` are the letter C. Letters of an answer with several may stand in any order.

    Args:
        partial: several letters score the F1 of the two sets, not all or nothing.
    """
    response = reward_input["response"]
    mine, right = letters(answer_in(response)), letters(reward_input["ground_truth"])
    accuracy = float(bool(right) and mine == right)
    if partial and mine and right:
        accuracy = 2 * len(mine & right) / (len(mine) + len(right))
    return with_form(response, accuracy, form, format_weight)


def letters(answer: Any) -> frozenset[str]:
    """The letters that an answer names; none where it's anything else."""
    if isinstance(answer, list | tuple):
        return frozenset().union(*(letters(one) for one in answer)) if answer else frozenset()
    text = str(answer).strip()
    several = text if re.fullmatch(r"[A-Z]{2,}", text) else text.upper().replace(" AND ", " and ")
    if SEVERAL.fullmatch(several):
        return frozenset(re.findall(r"[A-Z]", several.replace("and", "")))
    single = SINGLE.fullmatch(text if len(text) > 3 else text.upper())
    return frozenset(single[1]) if single else frozenset()
