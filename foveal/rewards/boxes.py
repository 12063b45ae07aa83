"""Boxes and points in pictures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from foveal.rewards.reading import answer_in, with_form

REWARD_NAME = "boxes"
REWARD_TYPE = "sequential"

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# figures in names, as in "bbox_2d" and "x1", are no coordinates
NAME = re.compile(r"[A-Za-z_]\w*")
Box: TypeAlias = tuple[float, float, float, float]


def iou(
    reward_input: dict[str, Any], form: str | None = None, format_weight: float = 0.1, threshold: float | None = None
) -> dict[str, float]:
    """`overall` and `accuracy`: the intersection over union of boxes [x1, y1, x2, y2]; `iou` as well.

    Several boxes are matched greedily, the best pairs first; the score is the mean over the larger number of boxes, so
    that missing and surplus ones cost the same.

    Args:
        threshold: from which the accuracy is 1, and below it 0; None: the accuracy is the IoU itself.
    """
    response = reward_input["response"]
    mine, right = boxes_in(answer_in(response)), boxes_in(reward_input["ground_truth"])
    pairs = sorted(((box_iou(a, b), i, j) for i, a in enumerate(mine) for j, b in enumerate(right)), reverse=True)
    used_mine: set[int] = set()
    used_right: set[int] = set()
    total = 0.0
    for value, i, j in pairs:
        if i not in used_mine and j not in used_right:
            used_mine.add(i)
            used_right.add(j)
            total += value
    value = total / max(len(mine), len(right), 1)
    accuracy = value if threshold is None else float(value >= threshold)
    return {**with_form(response, accuracy, form, format_weight), "iou": value}


def point(
    reward_input: dict[str, Any],
    form: str | None = None,
    format_weight: float = 0.1,
    radius: float = 0.0,
    size: float | None = None,
) -> dict[str, float]:
    """`overall` and `accuracy`: 1 where the answer's point (x, y) lies in the box of the truth.

    Args:
        radius: where the truth is a point: how far the answer's may be from it.
        size: with a point as truth, the distance at which a falling score reaches 0, in place of `radius`.
    """
    response = reward_input["response"]
    mine = _numbers(answer_in(response))
    right = _numbers(reward_input["ground_truth"])
    accuracy = 0.0
    if len(mine) == 2 and len(right) == 4:
        accuracy = float(right[0] <= mine[0] <= right[2] and right[1] <= mine[1] <= right[3])
    elif len(mine) == 2 and len(right) == 2:
        distance = math.dist(mine, right)
        accuracy = float(distance <= radius) if size is None else max(0.0, 1 - distance / size)
    return with_form(response, accuracy, form, format_weight)


def box_iou(a: Box, b: Box) -> float:
    """Intersection over union of two boxes; 0 where one has no area."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if min(width, height) <= 0:
        return 0.0
    shared = width * height
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def boxes_in(value: Any) -> list[Box]:
    """Every four numbers of a text, a list or a dict, as a box; [] where their count is no multiple of four."""
    numbers = _numbers(value)
    if len(numbers) % 4:
        return []
    return [(numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]) for i in range(0, len(numbers), 4)]


def _numbers(value: Any) -> list[float]:
    if isinstance(value, str):
        return [float(found) for found in NUMBER.findall(NAME.sub("", value))]
    if isinstance(value, Mapping):
        return [number for one in value.values() for number in _numbers(one)]
    if isinstance(value, Sequence):
        return [number for one in value for number in _numbers(one)]
    return [float(value)] if isinstance(value, int | float) else []
