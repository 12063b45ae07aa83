"""Boxes and points on screenshots: 4 misconfigurations, 3 sound set-ups."""

from __future__ import annotations

from pathlib import Path

from tests.misconfigurations import rows as make
from tests.misconfigurations.base import Case, Row, batch, sequential

BOX = """{{ content | trim }}

Give its bounding box in pixels as <answer>[x1, y1, x2, y2]</answer>, with the upper left and the lower right corner."""
SHARES = """{{ content | trim }}

Give its bounding box as <answer>[x1, y1, x2, y2]</answer>, as shares of the width and height between 0 and 1 with three
decimals."""
POINT = """{{ content | trim }}

Where would you click? Think between <think> and </think>, then give one point in pixels as <answer>(x, y)</answer>."""
COUNT = "{{ content | trim }}\n\nCount them and give the result as a single integer: <answer>N</answer>."

IOU = r"""
NUMBER = r"\s*(-?\d+(?:\.\d+)?)\s*"
BOX = re.compile(r"<answer>\s*\[" + ",".join([NUMBER] * 4) + r"\]\s*</answer>")


def iou(a, b):
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    inter = max(width, 0) * max(height, 0)
    area = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inter
    return inter / area if area > 0 else 0.0
"""
HALF = r"""


def score(response, truth):
    match = BOX.search(response)
    if match is None:
        return {"overall": 0.0, "format": 0.0, "accuracy": 0.0}
    box = [float(text) for text in match.groups()]
    accuracy = 1.0 if iou(box, truth) > 0.5 else 0.0
    return {"overall": 0.9 * accuracy + 0.1, "format": 1.0, "accuracy": accuracy}
"""


def boxes(folder: Path) -> list[Row]:
    return make.boxes(folder)


def shares(folder: Path) -> list[Row]:
    rows = make.boxes(folder, 16, seed=51)
    for row in rows:
        limits = (make.WIDTH, make.HEIGHT, make.WIDTH, make.HEIGHT)
        row["answer"] = [round(value / limit, 3) for value, limit in zip(row["answer"], limits, strict=True)]
    return rows


def fault(name: str, kind: str, note: str, report: str, rows, prompt, reward, **more) -> Case:
    return Case(name, "boxes on screenshots", kind, False, note, report, rows, prompt, reward, **more)


def sound(name: str, kind: str, note: str, report: str, rows, prompt, reward, **more) -> Case:
    return Case(name, "boxes on screenshots", kind, True, note, report, rows, prompt, reward, **more)


CASES = [
    fault(
        "counting_prompt_for_boxes",
        "format prompt of another task",
        "The format prompt is the counting task's and asks for one integer; the reward reads four numbers.",
        "https://github.com/om-ai-lab/VLM-R1/issues/44",
        boxes,
        COUNT,
        batch(IOU + HALF),
    ),
    fault(
        "corners_taken_for_width_and_height",
        "xyxy against xywh",
        "The truth is [x1, y1, x2, y2]; the reward takes it for COCO's [x, y, w, h] and adds.",
        "https://github.com/hshjerry/VideoEspresso/issues/15",
        boxes,
        BOX,
        batch(
            IOU
            + HALF.replace(
                "    accuracy =",
                "    x, y, w, h = truth\n    truth = [x, y, x + w, y + h]\n    accuracy =",
            )
        ),
    ),
    fault(
        "thousandths_against_pixels",
        "normalised against pixels",
        "The prompt asks for pixels, as the truth has; the reward takes answers for thousandths of the picture.",
        "https://github.com/Liuziyu77/Visual-RFT/issues/143",
        boxes,
        BOX,
        sequential(
            IOU
            + HALF.replace(
                "    accuracy =",
                "    box = [value * size / 1000 for value, size in zip(box, (640, 480, 640, 480))]\n    accuracy =",
            )
        ),
    ),
    fault(
        "threshold_never_reached",
        "threshold out of reach",
        "The union counts the overlap twice, so the IoU ends at 0.5, and more than 0.5 is wanted.",
        "https://github.com/Liuziyu77/Visual-RFT/issues/232",
        boxes,
        BOX,
        batch((IOU + HALF).replace(" - inter\n", "\n")),
    ),
    sound(
        "continuous_iou",
        "continuous values",
        "The IoU itself is the score, without threshold or format part.",
        "https://github.com/Liuziyu77/Visual-RFT/issues/32",
        boxes,
        BOX,
        batch(
            IOU
            + r"""


def score(response, truth):
    match = BOX.search(response)
    value = iou([float(text) for text in match.groups()], truth) if match else 0.0
    return {"overall": value, "iou": value, "accuracy": float(value > 0.5)}
"""
        ),
    ),
    sound(
        "boxes_in_shares",
        "normalised boxes",
        "Prompt and truth both use shares between 0 and 1, though the question names pixels.",
        "https://github.com/Liuziyu77/Visual-RFT/issues/174",
        shares,
        SHARES,
        sequential(IOU + HALF),
    ),
    sound(
        "point_in_box",
        "answer in another form than the truth",
        "The truth is a box, the answer a point that must lie in it: the truth itself isn't a valid answer.",
        "https://github.com/InfiXAI/InfiGUI-R1/issues/9",
        boxes,
        POINT,
        batch(
            r"""
            POINT = re.compile(r"<answer>\s*\(\s*(\d+(?:\.\d+)?)\s*,\s*(\d+(?:\.\d+)?)\s*\)\s*</answer>")


            def score(response, truth):
                match = POINT.search(response)
                if match is None:
                    return {"overall": 0.0, "format": 0.0, "accuracy": 0.0}
                x, y = map(float, match.groups())
                inside = float(truth[0] <= x <= truth[2] and truth[1] <= y <= truth[3])
                return {"overall": 0.1 + 0.9 * inside, "format": 1.0, "accuracy": inside}
            """
        ),
    ),
]
