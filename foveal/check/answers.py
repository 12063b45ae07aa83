"""A ground truth → what a model that knows it would write where the prompt wants the answer."""

from __future__ import annotations

import ast
import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from foveal.check.asked import LETTER, NAME_OR_NUMBER, Asked, options_in
from foveal.rewards.reading import boxed

FRACTION = re.compile(r"(-?)\\[dt]?frac\{(-?[\d.]+)\}\{([\d.]+)\}|(-?)([\d.]+)\s*/\s*([\d.]+)")
WITH_UNIT = re.compile(r"[$€£¥]?\s*([-+]?\d[\d,]*\.?\d*|[-+]?\.\d+)\s*(%|[A-Za-zµ°²³/\^ \u4e00-\u9fff]{0,20})\.?")
OPTION = re.compile(r"(?:^|\n|\s{2,}|\s(?=\())\s*\(?([A-H])[).:、．]\s*([^\n]+?)(?=\s*(?:\n|\s\(?[A-H][).:]|$))")
ANSWER_KEYS = ("answer", "ground_truth", "final_answer", "label", "value", "target", "solution", "text", "bbox", "box")
NUMBER_WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
SHARES = re.compile(r"between 0 and 1\b(?!0)|shares? of|from 0 to 1\b(?!0)|\[0, ?1\]|normali[sz]ed")
THOUSANDTHS = re.compile(r"between 0 and (?:1000|999)|0 ?(?:-|to|–) ?(?:1000|999)|normali[sz]ed to 1000")
LONG = 60
"""Characters beyond which a truth may be a worked solution."""


def contents(
    truth: Any, asked: Asked, question: str, row: Mapping[str, Any], sizes: Sequence[tuple[int, int]] = ()
) -> list[str]:
    """Ways to write the truth that fit what the prompt asks for, the likeliest first; none where there is no such way.

    Args:
        sizes: (height, width) of the row's pictures.
    """
    value = unwrap(truth)
    kind = asked.kind
    options = options_of(question, row)
    found: list[str] = []
    if kind in ("letter", "letters"):
        found = _letters(value, asked, options)
    elif kind == "option":
        found = [options[one] for one in _as_letters(value, options) if one in options]
    elif kind == "number":
        found = _numbers(value, asked, truth)
    elif kind in ("point", "box"):
        found = _coordinates(value, asked, sizes)
    elif kind == "words":
        found = _words(value, asked)
    if found or asked.certain:
        return list(dict.fromkeys(found))
    return list(dict.fromkeys(_free(value, asked)))


def unwrap(truth: Any) -> Any:
    r"""The answer inside a truth: out of tags, `\boxed{}`, dollars, a solution's text, JSON, a list of one."""
    if isinstance(truth, list | tuple) and len(truth) == 1:
        return unwrap(truth[0])
    if isinstance(truth, Mapping):
        for key in ANSWER_KEYS:
            if key in truth:
                return unwrap(truth[key])
        return truth
    if not isinstance(truth, str):
        return truth
    text = truth.strip()
    if all(unicodedata.east_asian_width(character) == "F" for character in text):
        text = unicodedata.normalize("NFKC", text)
    if tagged := re.search(r"<answer>(.*?)</answer>", text, re.DOTALL):
        return unwrap(tagged[1])
    if final := re.search(r"####\s*(.+)\s*$", text):
        return unwrap(final[1])
    if (inside := boxed(text)) is not None:
        return unwrap(inside)
    if len(text) > LONG and (said := re.search(r"answer is:?\s*\$?([^\n$]+?)\$?\.?\s*$", text)):
        return unwrap(said[1])
    if len(text) > 2 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
        return unwrap(text[1:-1])
    if text[:1] in "[{" and text[-1:] in "]}":
        parsed = _parsed(text)
        if parsed is not None:
            return unwrap(parsed)
    return text


def options_of(question: str, row: Mapping[str, Any]) -> dict[str, str]:
    """The options of a question by their letter: from its text, or from a column of choices."""
    found = {match[1]: match[2].strip() for match in OPTION.finditer(question)}
    if len(found) >= 2:
        return found
    for name in ("options", "choices"):
        values = row.get(name)
        if isinstance(values, Mapping):
            values = list(values.values()) if all(len(str(key)) == 1 for key in values) else None
        if isinstance(values, list) and 2 <= len(values) <= 26:
            return {chr(65 + place): str(value) for place, value in enumerate(values)}
    return {}


def as_number(value: Any) -> float | None:
    """The number that a truth says, with unit, separators of thousands and simple fractions read; else None."""
    try:
        number = _as_number(value)
    except (ValueError, OverflowError):  # `192.168.0.0/16`; an int beyond 1e308
        return None
    return number if number is not None and math.isfinite(number) else None


def _as_number(value: Any) -> float | None:
    if isinstance(value, int | float):
        return None if isinstance(value, bool) else float(value)
    if not isinstance(value, str):
        return None
    text = unicodedata.normalize("NFKC", value).strip().strip("$").replace("\\%", "%")
    fraction = FRACTION.fullmatch(text)
    if fraction:
        sign, above, below = fraction.group(1, 2, 3) if fraction[2] else fraction.group(4, 5, 6)
        return (-1 if sign else 1) * float(above) / float(below) if float(below) else None
    plain = WITH_UNIT.fullmatch(text)
    return float(plain[1].replace(",", "")) if plain else None


def shown_number(value: float, places: int = 4) -> str:
    """`4`, `0.25`, `1.3333`."""
    return str(int(value)) if float(value).is_integer() else f"{value:.{places}f}".rstrip("0")


def _parsed(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def _letters(value: Any, asked: Asked, options: Mapping[str, str]) -> list[str]:
    letters = _as_letters(value, options)
    if not letters:
        return []
    if asked.kind == "letter" and isinstance(value, int):
        return letters  # counted from 0, or from 1
    if len(letters) == 1:
        return [LETTER.sub(lambda match: match[0].replace(match[1], letters[0]), asked.example, count=1) or letters[0]]
    separator = re.sub(r"[A-H]", "\0", asked.example).strip("\0").split("\0")[0] if asked.example else ","
    return [separator.join(letters)]


def _as_letters(value: Any, options: Mapping[str, str]) -> list[str]:
    if isinstance(value, bool):
        return []
    if isinstance(value, int):
        return [chr(65 + place) for place in (value, value - 1) if 0 <= place < 26]
    if isinstance(value, list | tuple):
        found = [_as_letters(one, options)[:1] for one in value]
        return [one[0] for one in found] if all(found) else []
    text = str(value).strip()
    bare = text.strip(" .").casefold()
    by_text = [letter for letter, option in options.items() if option.strip(" .").casefold() == bare]
    if by_text and not re.fullmatch(r"[A-Ha-h]", text):
        return by_text[:1]
    if single := re.fullmatch(r"(?:option\s*)?\(?([A-Ha-h])\)?(?:[.:、．]\s*.*|\s*)", text, re.IGNORECASE | re.DOTALL):
        return [single[1].upper()]
    if re.fullmatch(r"[A-Ha-h](?:\s*[,;&、 ]\s*[A-Ha-h])+|[A-H]{2,6}", text):
        return re.findall(r"[A-H]", text.upper())
    if re.fullmatch(r"\d{1,2}", text):
        return _as_letters(int(text), options)
    return []


def _numbers(value: Any, asked: Asked, truth: Any) -> list[str]:
    if isinstance(value, list | tuple | Mapping):
        return [str(len(value))]
    number = as_number(value)
    if number is None:  # an expression may be wanted all the same, a word or a letter is not
        text = str(value).strip()
        named = NUMBER_WORDS.index(text.lower()) if text.lower() in NUMBER_WORDS else None
        return [str(named)] if named is not None else [text] if re.search(r"[\d\\]", text) else []
    places = re.search(r"\b(one|two|three|four|[1-4]) decimal", asked.text)
    if places:
        count = {"one": 1, "two": 2, "three": 3, "four": 4}.get(places[1]) or int(places[1])
        return list(dict.fromkeys([f"{number:.{count}f}", shown_number(round(number, count))]))
    percent = re.search(r"percent|%", asked.text, re.IGNORECASE)
    share = re.search(r"fraction|share|between 0 and 1|0 to 1", asked.text, re.IGNORECASE)
    if isinstance(truth, float) and 0 < number < 1 and percent and not share:
        return [shown_number(number * 100)]
    text = str(value).strip()
    exact = [text.replace(",", "")] if re.fullmatch(r"[-+]?[\d,]*\.?\d+", text) else []
    if "/" in text and "decimal" not in asked.text:
        exact = [text]
    return [*exact, shown_number(number), *([text] if "," in text else [])]


def _coordinates(value: Any, asked: Asked, sizes: Sequence[tuple[int, int]]) -> list[str]:
    if isinstance(value, list | tuple) and len(value) > 1 and all(isinstance(one, list | tuple) for one in value):
        return [json.dumps(value)] if asked.kind == "box" and any(len(one) == 4 for one in value) else []
    numbers = numbers_of(value)
    if len(numbers) not in (2, 4):
        return []
    x_first = numbers
    sized = re.search(r"\bw(idth)?\b\W+h(eight)?\b", asked.example)
    if sized and len(numbers) == 4 and sizes:
        height, width = sizes[0]
        if numbers[0] + numbers[2] > width or numbers[1] + numbers[3] > height:  # two corners; the size is asked for
            x_first = [*numbers[:2], numbers[2] - numbers[0], numbers[3] - numbers[1]]
        return [_like(asked.example, x_first)]
    if len(numbers) == 4 and (numbers[2] < numbers[0] or numbers[3] < numbers[1]):  # x, y, width, height
        x_first = [numbers[0], numbers[1], numbers[0] + numbers[2], numbers[1] + numbers[3]]
    if asked.kind == "point" and len(x_first) == 4:
        x_first = [(x_first[0] + x_first[2]) / 2, (x_first[1] + x_first[3]) / 2]
    if asked.kind == "box" and len(x_first) == 2:
        return []
    scaled = _in_asked_unit(x_first, asked.text, sizes)
    example = asked.example or ("(x, y)" if asked.kind == "point" else "[x1, y1, x2, y2]")
    return [_like(example, scaled)]


def _like(example: str, numbers: Sequence[float]) -> str:
    """The numbers written as in the example, `[x1, y1, x2, y2]`."""
    waiting = iter(numbers)
    return re.sub(NAME_OR_NUMBER, lambda match: shown_number(next(waiting, 0.0), places=3), example)


def numbers_of(value: Any) -> list[float]:
    """The numbers of a box or a point, however it is written."""
    if isinstance(value, Mapping):
        return numbers_of(list(value.values()))
    if isinstance(value, list | tuple):
        if len(value) == 1 or (value and isinstance(value[0], list | tuple) and len(value[0]) == 4):
            return numbers_of(value[0])
        nested = [numbers_of(one) if isinstance(one, list | tuple) else [as_number(one)] for one in value]
        flat = [number for part in nested for number in part]
        return [one for one in flat if one is not None] if None not in flat else []
    if isinstance(value, str):
        found = [float(one) for one in re.findall(r"-?\d+(?:\.\d+)?", value)]
        return found if all(map(math.isfinite, found)) else []
    return []


def _in_asked_unit(numbers: list[float], prompt: str, sizes: Sequence[tuple[int, int]]) -> list[float]:
    """The coordinates in the unit that the prompt names, if they are plainly in another."""
    height, width = sizes[0] if sizes else (1000, 1000)
    edges = [float(width), float(height)] * (len(numbers) // 2)
    shares = all(0 <= one <= 1 for one in numbers)
    if THOUSANDTHS.search(prompt):
        if not shares and max(numbers) <= 1000:
            return numbers
        return [round(one / (1.0 if shares else edge) * 1000) for one, edge in zip(numbers, edges, strict=True)]
    if SHARES.search(prompt):
        return numbers if shares else [round(one / edge, 3) for one, edge in zip(numbers, edges, strict=True)]
    if re.search(r"\bpixels?\b", prompt) and shares:
        return [round(one * edge) for one, edge in zip(numbers, edges, strict=True)]
    return numbers


def _words(value: Any, asked: Asked) -> list[str]:
    options = options_in(asked.example)
    text = {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value).strip()
    same = [one for one in options if one.casefold() == text.casefold().rstrip(".")]
    if isinstance(value, bool):
        same = same or [one for one in options if one.casefold() == str(value).casefold()]
    if not same and re.fullmatch(r"[01]|true|false|y|n", text, re.IGNORECASE):
        return []  # a model that is told to say Yes or No does not write 1
    return same or [text]


def _free(value: Any, asked: Asked) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return ["Yes" if value else "No", str(value)]
    if isinstance(value, int | float):
        number = as_number(value)
        return [str(value)] if number is None else [shown_number(number), str(value)]
    if isinstance(value, Mapping):
        return [json.dumps(value, ensure_ascii=False)]
    if isinstance(value, list | tuple):
        texts = [str(one) for one in value]
        if value and all(isinstance(one, int | float) for one in value):
            return [json.dumps(list(value)), ", ".join(texts)]
        return [" ".join(texts), ", ".join(texts), json.dumps(list(value), ensure_ascii=False), *texts[:2]]
    return [str(value)]
