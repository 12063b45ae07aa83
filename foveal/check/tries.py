"""The answers that the reward is tried on: right ones in the asked form and in others, wrong, empty and broken ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from foveal.check.answers import as_number, contents, shown_number, unwrap
from foveal.check.asked import Asked, read_asked
from foveal.check.forms import LINES, Form, asked_forms, other_forms
from foveal.reward.contract import Outcome
from foveal.types import Prompt

OTHERS = 2
"""Truths of other rows that are tried as wrong answers to a row."""
LONG_CHARACTERS = 12_000
NOTHING = "The question is looked at from both sides, and then once more."


@dataclass
class Try:
    """One answer to score.

    Attributes:
        case: number of its row among the cases.
        kind: "right", "other form", "wrong", "empty", "digit added", …
        form: name of the form; "" where it has none.
        content: what stands where the answer goes.
        length: tokens, where it's not that of the text.
    """

    case: int
    kind: str
    form: str
    content: str
    text: str
    length: int | None = None
    outcome: Outcome | None = None

    @property
    def score(self) -> float | None:
        """`overall`, where there is one."""
        return self.outcome["overall"] if isinstance(self.outcome, dict) else None


@dataclass
class Case:
    """A row with what its prompt asks for and what would be right and wrong there.

    Attributes:
        contents: ways to write the ground truth that fit the prompt.
        wrong: answers that are right for other rows only.
        prefix: what the chat template has begun the answer with.
        sizes: (height, width) of the pictures.
    """

    prompt: Prompt
    text: str
    question: str
    asked: Asked
    contents: list[str]
    prefix: str = ""
    sizes: Sequence[tuple[int, int]] = ()
    wrong: list[str] = field(default_factory=list)

    @property
    def truth(self) -> Any:
        return self.prompt.answer

    @cached_property
    def forms(self) -> list[Form]:
        return asked_forms(self.asked)


def make_case(prompt: Prompt, text: str, question: str, sizes: Sequence[tuple[int, int]]) -> Case:
    """The case of a row; `text` is the rendered prompt, `question` the row's own part of it."""
    asked = read_asked(text, question)
    found = contents(prompt.answer, asked, question, prompt.row, sizes)
    first = asked.tags[0].opening if asked.tags else "<think>"
    prefix = first if text.rstrip().endswith(first) else ""
    return Case(prompt, text, question, asked, found, prefix, sizes)


def add_wrong_answers(cases: Sequence[Case]) -> None:
    """Gives each case the answers of a few others, which are plainly other than its own."""
    for place, case in enumerate(cases):
        own = {one.casefold().strip() for one in [*case.contents, str(unwrap(case.truth))]}
        number = as_number(unwrap(case.truth))
        for step in range(1, len(cases)):
            other = cases[(place + step * 7) % len(cases)] if len(cases) % 7 else cases[(place + step) % len(cases)]
            if not other.contents or other.asked.kind != case.asked.kind:
                continue
            given = other.contents[0]
            value = as_number(given)
            near = number is not None and value is not None and abs(value - number) <= 0.1 * abs(number)
            if given.casefold().strip() not in own | {one.casefold() for one in case.wrong} and not near:
                case.wrong.append(given)
            if len(case.wrong) == OTHERS:
                break
        if not case.wrong and number is not None:
            case.wrong.append(shown_number(number * 3 + 7))
        if not case.wrong and case.asked.kind == "letter":
            case.wrong.append(next(one for one in "ABCD" if one not in case.contents))


def all_tries(place: int, case: Case, limit: int) -> Iterator[Try]:
    """Everything that is tried on a row.

    Args:
        limit: `data.max_response_length`.
    """

    def one(kind: str, form: str, content: str, text: str, length: int | None = None) -> Try:
        return Try(place, kind, form, content, text.removeprefix(case.prefix), length)

    forms = case.forms
    for form in forms:
        for content in case.contents[:4]:
            yield one("right", form.name, content, form.write(content))
        for content in case.wrong:
            yield one("wrong", form.name, content, form.write(content))
    verbatim = str(case.truth).strip()
    for content in list(dict.fromkeys([*case.contents[:1], verbatim])):
        for form in other_forms(case.asked):
            yield one("other form", form.name, content, form.write(content))
        if content not in case.contents:
            yield one("verbatim", forms[0].name, content, forms[0].write(content))
    main = forms[0]
    yield one("empty", "", "", "")
    yield one("empty place", main.name, "", main.write(""))
    yield one("nonsense", main.name, "?", main.write("?"))
    yield one("no answer", "", "", NOTHING)
    if not case.contents:
        return
    right = case.contents[0]
    whole = main.write(right)
    if whole.rfind(right) > 4:
        yield one("cut off", main.name, "", whole[: whole.rfind(right) - 4])
    if (
        right.lstrip("-").isdigit() and len(right.lstrip("-")) > 1
    ):  # one digit may be a class, of which the first counts
        yield one("digit added", main.name, f"{right}0", main.write(f"{right}0"))
        yield one("digit before", main.name, f"1{right}", main.write(f"1{right}"))
    if case.wrong:
        thought = main.write(case.wrong[0]).replace("Each of them", f"It could be {right}. Each of them", 1)
        if right in thought and right not in case.wrong[0]:
            yield one("only thought of", main.name, case.wrong[0], thought)
        yield one("both", main.name, f"{right} or {case.wrong[0]}", main.write(f"{right} or {case.wrong[0]}"))
    yield from (one("long", main.name, content, *_long(main, content, limit // 2)) for content in case.contents[:4])
    text, _ = _long(main, right, limit)
    yield one("long without end", main.name, "", text[: text.rfind(right)] if right in text else text, limit)


def _long(main: Form, content: str, tokens: int) -> tuple[str, int]:
    """A right answer with reasoning of so many tokens, and their number."""
    characters = min(4 * tokens, LONG_CHARACTERS)
    reasoning = (f"{LINES}\n" * (characters // len(LINES) + 1))[:characters]
    return main.write(content).replace(LINES, reasoning, 1), tokens


def plain_tries(place: int, case: Case, limit: int) -> Iterator[Try]:
    """The part of `all_tries` that a function gets which is too slow for all of it."""
    kinds: set[str] = set()
    for one in all_tries(place, case, limit):
        if one.kind in ("right", "wrong", "empty", "cut off", "other form") and one.kind not in kinds:
            kinds.add(one.kind)
            yield one


def few_tries(place: int, case: Case, form: str) -> Iterator[Try]:
    """The right answers in one form and a wrong one: what tells whether a row's truth can be reached."""
    found = next((one for one in case.forms if one.name == form), case.forms[0])
    for content in case.contents[:4]:
        yield Try(place, "right", found.name, content, found.write(content).removeprefix(case.prefix))
    for content in case.wrong[:1]:
        yield Try(place, "wrong", found.name, content, found.write(content).removeprefix(case.prefix))
