r"""Mathematics: is the answer the same expression as the truth? With EasyR1's scores by default.

`compute_score` is EasyR1's math reward: the last `\boxed{}` graded by mathruler, 0.9 × accuracy + 0.1 × format, where
the format is `<think>…</think>` and then `\boxed{…}`. `grader: math_verify` compares with math-verify instead, which
knows sets, intervals, equations and units; `grader: either` takes what one of the two takes.
"""

from __future__ import annotations

import re
from typing import Any

from foveal.rewards.reading import boxed, place_of_answer, with_form

REWARD_NAME = "math"
REWARD_TYPE = "sequential"

BLANKS = re.compile(r"\s*([<>/])\s*")
GRADERS = ("mathruler", "math_verify", "either")


def compute_score(
    reward_input: dict[str, Any],
    grader: str = "mathruler",
    format_weight: float = 0.1,
    form: str | None = "think_boxed",
) -> dict[str, float]:
    r"""`overall`, `format`, `accuracy`.

    Args:
        grader: "mathruler" (EasyR1's), "math_verify" or "either".
        form: what the response must look like (`reading.FORMATS`); None: nothing, and no part for it.
    """
    if grader not in GRADERS:
        raise ValueError(f"grader={grader!r}; allowed: {', '.join(GRADERS)}")
    response = BLANKS.sub(r"\1", reward_input["response"])
    truth = str(reward_input["ground_truth"])
    right = grader != "math_verify" and _by_mathruler(response, truth)
    right = right or (grader != "mathruler" and _by_math_verify(response, truth))
    return with_form(response, float(right), form, format_weight)


def _by_mathruler(response: str, truth: str) -> bool:
    from mathruler.grader import extract_boxed_content, grade_answer

    return bool(grade_answer(extract_boxed_content(response), truth))


def _by_math_verify(response: str, truth: str) -> bool:
    from math_verify import parse, verify

    given = place_of_answer(response)
    inside = boxed(truth)
    gold = parse(f"${(truth if inside is None else inside).strip().strip('$')}$", parsing_timeout=None)
    # its own time limit is a signal that async and threaded callers cannot take; worker.reward.time_limit holds here
    return bool(
        given is not None
        and gold
        and verify(gold, parse(f"${given.strip('$')}$", parsing_timeout=None), timeout_seconds=None)
    )
