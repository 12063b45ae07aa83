r"""What a prompt asks of an answer: tags, `\boxed{}`, JSON, a line that begins so, and what kind of thing goes there.

Read from the text alone, so it is a guess. It decides what `foveal check` tries as the answer of a model that does as
it is told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

Kind = Literal["letter", "letters", "option", "number", "point", "box", "words", "free"]

CHAT_MARK = re.compile(r"<\|(?!(?:begin|end)_of_(?!text))[^|<>]*\|>")
PAIR = re.compile(r"<([^\W\d][\w-]*)>|\[([A-Z][A-Z_]+)\]|<\|begin_of_(\w+)\|>|(【)")
NO_FORM = {"image", "video", "br", "b", "i", "p", "img", "table", "tr", "td", "li", "ul", "a", "sub", "sup"}
ANSWER = re.compile(r"ans|final|result|output|response|solution|conclusion|答案|结果|【", re.IGNORECASE)
THOUGHT = re.compile(
    r"th(ink|ought)|reason|analys|scratch|rationale|cot|plan|reflect|observ|caption|descri|summary|perce|look|step|work|"
    r"思考|推理|分析",
    re.IGNORECASE,
)
CONNECTOR = re.compile(r"\W*(and|tags?|to|or|with|和|与|、|标签)?\W*(the|closing|end)?\W*", re.IGNORECASE)
BOXED = re.compile(r"\\{1,2}boxed\s*\{([^{}]*)\}|\\{1,2}boxed\b|(?<!\w)boxed\{\}")
LINE = re.compile(
    r"(?:#{4}\s?|(?<![\w<])\**(?:the |your |my )?(?:final |correct )?(?:answer|result|choice|答案|最终答案|结果)"
    r"(?: is)?\**\s?[:：]\**|(?<=[\"'“`])the (?:final |correct )?answer is:?)",
    re.IGNORECASE,
)
DOUBLE_BRACKETS = re.compile(r"\[\[([^\[\]]*)\]\]")
ANSWER_KEY = re.compile(rf"{ANSWER.pattern}|b?box|point|coord|count|choice", re.IGNORECASE)
JSON_KEY = re.compile(r"\"(\w+)\"\s*:\s*")
REASONS = re.compile(
    r"think|reason|step[ -]by[ -]step|show your work|explain|each step|思考|推理|步骤|逐步|一步一步", re.IGNORECASE
)
LETTER = re.compile(r"\(?([A-H])\)?\.?")
LETTERS = re.compile(r"[A-H](\s*(?:,|;|and|\s)\s*[A-H])+|[A-H]{2,4}")
NAME_OR_NUMBER = r"(?:[A-Za-z_]\w*|-?\d+(?:\.\d+)?)"
COORDINATES = re.compile(rf"[\[(]+\s*{NAME_OR_NUMBER}(?:\s*[,)\](]+\s*{NAME_OR_NUMBER})+\s*[\])]+")
WORDS_HINTS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("option", re.compile(r"not (?:just )?(?:the|its|a) letter|text of the (?:option|choice)|option'?s? text", re.I)),
    ("letters", re.compile(r"all (?:the )?(?:correct |right )?letters|letters of all", re.I)),
    ("letter", re.compile(r"\bletter\b|选项字母|选项的字母", re.I)),
    ("box", re.compile(r"bounding[ -]box|\bbbox", re.I)),
    ("point", re.compile(r"\(x, ?y\)|\bone point\b|point coordinates", re.I)),
    (
        "number",
        re.compile(
            r"\binteger\b|whole number|decimal|(?:(?:only|just)(?: the| a)?|single|a|the final) number\b|数字|整数",
            re.I,
        ),
    ),
)


@dataclass(frozen=True)
class Tag:
    """A pair of marks: `<answer>` and `</answer>`."""

    opening: str
    closing: str
    thinks: bool
    shown: tuple[str, str] | None = None
    """Blanks inside the pair, before and after its content, where the prompt shows the form."""


@dataclass(frozen=True)
class Asked:
    """What a prompt asks for.

    Attributes:
        tags: in their order.
        separators: between tags, as the prompt shows them; None where it only names them.
        boxed: `\\boxed{}`.
        line: what the line of the answer begins with.
        line_is_cue: it may be meant as a cue only: an answer without it follows the prompt too.
        json_keys: of the object that holds the answer; None where no JSON is asked for.
        json_list: the object stands in a list.
        kind: what the answer is.
        example: how the prompt shows the answer, as `[x1, y1, x2, y2]`, `A`, `0.25`; "" where it doesn't.
        certain: the kind comes from such an example.
        reasons: reasoning is asked for, or allowed.
        text: of the whole prompt.
    """

    tags: tuple[Tag, ...] = ()
    separators: tuple[str, ...] | None = None
    boxed: bool = False
    line: str = ""
    line_is_cue: bool = False
    brackets: bool = False
    json_keys: tuple[str, ...] | None = None
    json_list: bool = False
    kind: Kind = "free"
    example: str = ""
    certain: bool = False
    reasons: bool = False
    text: str = ""

    @property
    def answer_tag(self) -> Tag | None:
        return next((tag for tag in reversed(self.tags) if not tag.thinks), None)

    @property
    def has_place(self) -> bool:
        """Whether the answer has a place of its own in the response."""
        return bool(self.answer_tag or self.boxed or self.line or self.brackets or self.json_keys is not None)

    def describe(self) -> str:
        """As "<think>…</think> <answer>…</answer>", or "an answer without tags"."""
        parts = [f"{tag.opening}…{tag.closing}" for tag in self.tags]
        parts += ["\\boxed{…}"] * self.boxed + ["[[…]]"] * self.brackets
        parts += [f"{self.line}…"] * bool(self.line) + ["JSON"] * (self.json_keys is not None)
        return " ".join(parts) or "an answer without tags"


def instructions(text: str, question: str) -> str:
    """The text of a prompt without chat marks and without the row's own question."""
    text = CHAT_MARK.sub("\n", text)
    for piece in re.split(r"<image>|<video>", question):
        if len(piece.strip()) > 3:
            text = text.replace(piece.strip(), "\n")
    return text


def read_asked(text: str, question: str) -> Asked:
    """What the prompt `text`, as the chat template renders it, asks for; `question` is the row's part of it."""
    own = instructions(text, question)
    asked = _read(own, CHAT_MARK.sub("\n", text))
    return asked if asked.has_place or asked.tags else _read(CHAT_MARK.sub("\n", text), CHAT_MARK.sub("\n", text))


@lru_cache(maxsize=4096)
def _read(text: str, whole: str) -> Asked:
    tags, separators, example = _tags(text)
    boxed = list(BOXED.finditer(text))
    boxed_example = next((match[1].strip() for match in boxed if match[1] and match[1].strip(" .…")), "")
    if "boxed" in example:
        example = boxed_example
    json_keys, json_example = _json(text)
    brackets = DOUBLE_BRACKETS.search(text)
    line = _line(text)
    answer_tag = any(not tag.thinks for tag in tags)
    marker, behind, quoted = line if line else ("", "", False)
    marker = marker if not (answer_tag or boxed or json_keys is not None) else ""
    example = example or boxed_example or json_example or (brackets[1].strip() if brackets else "")
    example = example or (behind if marker else "") or _coordinates(text)
    kind, certain = _kind(example, text, whole)
    return Asked(
        tags=tags,
        separators=separators,
        boxed=bool(boxed),
        line=marker,
        line_is_cue=bool(marker) and not quoted,
        brackets=brackets is not None and not answer_tag,
        json_keys=json_keys,
        json_list=bool(json_keys) and re.search(r"\[\s*\{\s*\"", text) is not None,
        kind=kind,
        example=example if certain else "",
        certain=certain,
        reasons=bool(REASONS.search(text)) or any(tag.thinks for tag in tags),
        text=whole,
    )


def _tags(text: str) -> tuple[tuple[Tag, ...], tuple[str, ...] | None, str]:
    """The tags in order, the blanks between them where the form is shown, and what is shown in the answer's."""
    pairs = list(_pairs(text))
    if not pairs:
        return (), None, ""
    shown = _shown_sequence(text, pairs)
    names = list(dict.fromkeys(pair[0] for pair in pairs))
    if shown and len({pair[0] for pair in shown}) == len(names):
        chosen, separators = shown, tuple(text[a[3] : b[2]] for a, b in pairwise(shown))
    else:
        chosen, separators = [next(pair for pair in pairs if pair[0] == name) for name in names], None
    thinks = [bool(THOUGHT.search(pair[0][0])) and not ANSWER.search(pair[0][0]) for pair in chosen]
    tags = []
    for (marks, content, _, _), thought in zip(chosen, thinks, strict=True):
        blanks = None
        if separators is not None:
            bare = content.strip()
            at = content.find(bare) if bare else len(content)
            blanks = (content[:at], content[at + len(bare) :])
        tags.append(Tag(marks[0], marks[1], thought, blanks))
    answer = next((tag for tag in reversed(tags) if not tag.thinks), None)
    contents = [p[1].strip() for p in pairs if answer and p[0] == (answer.opening, answer.closing)]
    shown_contents = list(dict.fromkeys(one for one in contents if one and not CONNECTOR.fullmatch(one)))
    example = next(iter(shown_contents), "")
    if (
        len(shown_contents) > 1
        and kind_of_example(example) is None
        and len(options_in(" or ".join(shown_contents))) > 1
    ):
        example = " or ".join(shown_contents)  # <answer>yes</answer> or <answer>no</answer>
    return tuple(tags), separators, example


_Pair = tuple[tuple[str, str], str, int, int]


def _pairs(text: str) -> Iterator[_Pair]:
    """((opening, closing), content, start, end) of each pair of marks in the text."""
    for match in PAIR.finditer(text):
        if (match[1] or "").lower() in NO_FORM:
            continue
        closing = (
            f"</{match[1]}>"
            if match[1]
            else f"[/{match[2]}]"
            if match[2]
            else f"<|end_of_{match[3]}|>"
            if match[3]
            else "】"
        )
        end = text.find(closing, match.end())
        if end >= 0:
            yield (match[0], closing), text[match.end() : end], match.start(), end + len(closing)


def _shown_sequence(text: str, pairs: list[_Pair]) -> list[_Pair]:
    """The longest run of pairs with nothing but blanks between them and something that can stand in each."""
    best: list[_Pair] = []
    run: list[_Pair] = []
    for pair in pairs:
        if re.fullmatch(r"\s*(and|和|与|to)\s*", pair[1]):
            run = []
            continue
        run = [*run, pair] if run and not text[run[-1][3] : pair[2]].strip() else [pair]
        if len(run) >= max(len(best), 2):
            best = run
    return best


def _line(text: str) -> tuple[str, str, bool] | None:
    """The last "Answer:"-like beginning of a line that the prompt names, what is shown behind it, whether in quotes."""
    matches = [match for match in LINE.finditer(text) if _is_label(text, match)]
    if not matches:
        return None
    quoted = [match for match in matches if text[max(match.start() - 1, 0)] in "\"'“`「『"]
    match = (quoted or matches)[-1]
    behind = re.match(r"[ $]*([^\s\"'”`」』，,。.]*)", text[match.end() :])
    return match[0], behind[1].strip("*") if behind else "", bool(quoted)


def _is_label(text: str, match: re.Match[str]) -> bool:
    before = text[max(match.start() - 1, 0) : match.start()]
    first = match[0].lstrip("*")[0]
    return before in ("", "\n") or before in "\"'“`「『" or first.isupper() or first in "#答最结"


def _json(text: str) -> tuple[tuple[str, ...] | None, str]:
    keys = list(JSON_KEY.finditer(text))
    if keys and "{" in text[: keys[0].start()]:
        last = next((key for key in reversed(keys) if ANSWER_KEY.search(key[1])), keys[-1])
        value = re.match(r"\"([^\"]*)\"|(\[[^\]]*\])|([\w.<>-]+)", text[last.end() :])
        example = next((one for one in value.groups() if one), "") if value else ""
        return tuple(dict.fromkeys(key[1] for key in keys)), example
    return ((), "") if re.search(r"\bJSON\b", text) else (None, "")


def _coordinates(text: str) -> str:
    found = [match[0] for match in COORDINATES.finditer(text) if re.search(r"[xy]", match[0]) or "bbox" in text]
    return found[-1] if found else ""


def _kind(example: str, text: str, whole: str) -> tuple[Kind, bool]:
    kind = kind_of_example(example)
    if kind is not None:
        return kind, True
    for hinted, pattern in WORDS_HINTS:
        if pattern.search(whole if hinted in ("letter", "option", "letters") else text):
            return hinted, False
    return "free", False


def kind_of_example(example: str) -> Kind | None:
    """What an example such as `A`, `[x1, y1, x2, y2]`, `0.25`, `Yes or No` shows; None for a mere placeholder."""
    example = example.strip()
    if LETTER.fullmatch(example):
        return "letter"
    if LETTERS.fullmatch(example):
        return "letters"
    if COORDINATES.fullmatch(example):
        count = len(re.findall(NAME_OR_NUMBER, example))
        return {2: "point", 4: "box"}.get(count)  # type: ignore[return-value]
    if re.fullmatch(r"-?\d+(\.\d+)?|N|(an? |the )?(final )?(number|integer|数字|整数)", example, re.IGNORECASE):
        return "number"
    if len(options_in(example)) > 1:
        return "words"
    return None


def options_in(example: str) -> list[str]:
    """["Yes", "No"] of `Yes or No`, `yes/no`, `left | right`."""
    parts = [part.strip(" '\"`") for part in re.split(r"\s+or\s+|\s*[/|]\s*|,\s*(?:or\s+)?", example)]
    short = [part for part in parts if part and len(part.split()) <= 2]
    return short if len(short) == len(parts) and 2 <= len(parts) <= 8 else []
