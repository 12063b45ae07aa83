"""Score of an answer in R1-V's style: 0.5 × accuracy + 0.5 × format.

accuracy  1 when the text in the first one-line `<answer>…</answer>` (without one: the whole response) equals the ground
          truth, as text or as an expression; else 0
format    1 when the response is `<think>…</think>`, blanks, `<answer>…</answer>` and nothing else; else 0

`worker.reward.reward_function_kwargs='{"format_weight": 0.2}'` changes the weight of the format. Sequential: called for
each answer while others are still being written. Goes with `examples/format_prompt/r1v.jinja`.
"""

from __future__ import annotations

import re
from typing import Any

from mathruler.grader import grade_answer

REWARD_NAME = "r1v"
REWARD_TYPE = "sequential"

ANSWER = re.compile(r"<answer>(.*?)</answer>")
FORMAT = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)


def compute_score(reward_input: dict[str, Any], format_weight: float = 0.5) -> dict[str, float]:
    response = reward_input["response"]
    answer = ANSWER.search(response)
    given = answer.group(1) if answer else response
    accuracy = float(grade_answer(given.strip(), str(reward_input["ground_truth"]).strip()))
    well_formed = float(FORMAT.fullmatch(response) is not None)
    return {
        "overall": (1 - format_weight) * accuracy + format_weight * well_formed,
        "format": well_formed,
        "accuracy": accuracy,
    }
