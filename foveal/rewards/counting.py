"""How many things there are."""

from __future__ import annotations

from typing import Any

from foveal.rewards.reading import answer_in, numbers_in, with_form

REWARD_NAME = "counting"
REWARD_TYPE = "sequential"


def compute_score(
    reward_input: dict[str, Any], form: str | None = None, format_weight: float = 0.1, near: float = 0.0
) -> dict[str, float]:
    """`overall` and `accuracy`: 1 for the right count, else `near` × (1 − |difference| / count), at least 0.

    The truth is a number, or a list whose items are counted. The answer must be a whole number.

    Args:
        near: most that a wrong count may get; 0: nothing.
    """
    response = reward_input["response"]
    numbers = numbers_in(answer_in(response))
    truth = reward_input["ground_truth"]
    right = len(truth) if isinstance(truth, list | tuple) else next(iter(numbers_in(str(truth))), None)
    accuracy = 0.0
    if numbers and right is not None and numbers[-1].is_integer():
        difference = abs(numbers[-1] - right)
        accuracy = 1.0 if difference == 0 else near * max(0.0, 1 - difference / max(right, 1))
    return with_form(response, accuracy, form, format_weight)
