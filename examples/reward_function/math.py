r"""Score of a mathematical answer: 0.9 × accuracy + 0.1 × format.

accuracy  1 when the content of the last `\boxed{}` equals the ground truth (as text or as an expression), else 0
format    1 when the response is `<think>…</think>`, anything, `\boxed{…}`, anything; else 0

Blanks around `<`, `>` and `/` don't count. `worker.reward.reward_function_kwargs='{"format_weight": 0.2}'` changes the
weight of the format. Goes with `examples/format_prompt/math.jinja`.
"""

from __future__ import annotations

import re
from typing import Any

from mathruler.grader import extract_boxed_content, grade_answer

REWARD_NAME = "math"
REWARD_TYPE = "batch"

BLANKS = re.compile(r"\s*([<>/])\s*")
FORMAT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def score_one(response: str, ground_truth: Any, format_weight: float) -> dict[str, float]:
    response = BLANKS.sub(r"\1", response)
    accuracy = float(grade_answer(extract_boxed_content(response), str(ground_truth)))
    well_formed = float(FORMAT.fullmatch(response) is not None)
    return {
        "overall": (1 - format_weight) * accuracy + format_weight * well_formed,
        "format": well_formed,
        "accuracy": accuracy,
    }


def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    return [score_one(one["response"], one["ground_truth"], format_weight) for one in reward_inputs]
