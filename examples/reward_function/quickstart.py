"""Score of a short answer, such as "4 red" in the quick start or "teal" for easy-vqa: 0.9 × accuracy + 0.1 × format.

accuracy  1 when the response is the ground truth, else 0
format    1 when the response has the form of `pattern` (a number, a blank and a word in the quick start), else 0
"""

from __future__ import annotations

import re
from typing import Any

REWARD_NAME = "quickstart"
REWARD_TYPE = "batch"


def compute_score(
    reward_inputs: list[dict[str, Any]], format_weight: float = 0.1, pattern: str = r"\d+ [a-z]+"
) -> list[dict[str, float]]:
    scores = []
    for given in reward_inputs:
        response = given["response"].strip()
        accuracy = float(response == given["ground_truth"])
        well_formed = float(re.fullmatch(pattern, response) is not None)
        scores.append(
            {
                "overall": (1 - format_weight) * accuracy + format_weight * well_formed,
                "format": well_formed,
                "accuracy": accuracy,
            }
        )
    return scores
