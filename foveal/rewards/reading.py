r"""Where in a response the answer stands, for the ready-made rewards."""

from __future__ import annotations

import re

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
LINE = re.compile(r"(?:answer|答案)\**\s*[:：]\s*\**\s*([^\n]+)", re.IGNORECASE)
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
FORMATS = {
    "think_boxed": re.compile(r"\s*<think>.*?</think>.*\\boxed\{.*\}.*", re.DOTALL),
    "think_answer": re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL),
    "answer": re.compile(r".*<answer>.*?</answer>\s*", re.DOTALL),
    "boxed": re.compile(r".*\\boxed\{.+\}.*", re.DOTALL),
}
"""The whole response must match. A name of these, or a regular expression, is what `form` takes everywhere."""


def place_of_answer(response: str) -> str | None:
    r"""The last `<answer>…</answer>`, else the last `\boxed{…}`, else behind the last `Answer:`; None without any.

    A `\boxed{…}` inside the tags is opened too.
    """
    tagged = TAGGED.findall(response)
    if tagged:
        inside = boxed(tagged[-1])
        return (tagged[-1] if inside is None else inside).strip()
    inside = boxed(response)
    if inside is not None:
        return inside.strip()
    lines = LINE.findall(response)
    return lines[-1].strip() if lines else None


def answer_in(response: str) -> str:
    """What stands in the answer's place, else the whole response."""
    given = place_of_answer(response)
    return response if given is None else given


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{…}`, braces counted; None without one, or with one that is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for place in range(begin, len(text)):
        if text[place] == "}" and depth == 0:
            return text[begin:place]
        depth += {"{": 1, "}": -1}.get(text[place], 0)
    return None


def well_formed(response: str, form: str) -> bool:
    """Whether the whole response matches `form`: a name in FORMATS, or a regular expression (`.` takes line ends)."""
    pattern = FORMATS.get(form) or re.compile(form, re.DOTALL)
    return pattern.fullmatch(response) is not None


def numbers_in(text: str) -> list[float]:
    """All numbers in a text, separators of thousands taken out."""
    return [float(found.replace(",", "")) for found in NUMBER.findall(text)]


def with_form(response: str, accuracy: float, form: str | None, format_weight: float) -> dict[str, float]:
    """(1 − format_weight) × accuracy + format_weight × format, with its parts; without `form` the accuracy alone."""
    if form is None:
        return {"overall": accuracy, "accuracy": accuracy}
    formed = float(well_formed(response, form))
    overall = (1 - format_weight) * accuracy + format_weight * formed
    return {"overall": overall, "format": formed, "accuracy": accuracy}
