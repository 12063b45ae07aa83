"""Score of a choice among three positions on a screen: 1 when the first digit 0, 1 or 2 of the response equals the
ground truth, else 0 (also when there is no such digit).

overall and accuracy are the same number. Goes with `examples/format_prompt/android_gui.jinja`.
"""

from __future__ import annotations

import re
from typing import Any

REWARD_NAME = "android_gui"
REWARD_TYPE = "batch"


def score_one(response: str, ground_truth: Any) -> dict[str, float]:
    digit = re.search("[012]", response)
    correct = float(digit is not None and digit.group() == str(ground_truth).strip())
    return {"overall": correct, "accuracy": correct}


def compute_score(reward_inputs: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [score_one(one["response"], one["ground_truth"]) for one in reward_inputs]
