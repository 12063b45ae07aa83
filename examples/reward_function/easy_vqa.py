"""Score of an answer to a question of easy-vqa, such as "teal" or "yes": 0.9 × accuracy + 0.1 × format.

accuracy  1 when the response is the ground truth, else 0
format    1 when the response is one word in small letters, else 0
"""

from __future__ import annotations

import re
from typing import Any

REWARD_NAME = "easy_vqa"
REWARD_TYPE = "batch"

FORMAT = re.compile(r"[a-z]+")


def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    scores = []
    for given in reward_inputs:
        response = given["response"].strip()
        accuracy = float(response == given["ground_truth"])
        well_formed = float(FORMAT.fullmatch(response) is not None)
        scores.append(
            {
                "overall": (1 - format_weight) * accuracy + format_weight * well_formed,
                "format": well_formed,
                "accuracy": accuracy,
            }
        )
    return scores
