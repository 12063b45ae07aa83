"""Scores of tries → what is wrong with reward and prompt, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from foveal.check.asked import Asked
from foveal.check.diagnosis import LEAST, truth_cure, why_unreachable
from foveal.check.findings import REWARD, Finding
from foveal.check.tries import Case, Try

PART = 0.05
"""Of the way from wrong to right that a form must cost to be worth a word."""


@dataclass
class Scored:
    """All tries with the questions that are asked of them.

    Attributes:
        by_case: the tries of each row, by the number of its case.
    """

    cases: Sequence[Case]
    tries: Sequence[Try]
    by_case: dict[int, list[Try]] = field(init=False)

    def __post_init__(self) -> None:
        self.by_case = {}
        for one in self.tries:
            self.by_case.setdefault(one.case, []).append(one)

    def scores(self, case: int, kind: str, form: str | None = None) -> list[float]:
        """`overall` of a row's tries of a kind, in one form or all."""
        return [
            one.score
            for one in self.by_case[case]
            if one.kind == kind and (form is None or one.form == form) and one.score is not None
        ]

    def right(self, case: int, form: str) -> float | None:
        """Of the best way to write the truth in this form."""
        return max(self.scores(case, "right", form), default=None)

    def wrong(self, case: int, form: str) -> list[float]:
        """Of wrong answers in this form; where there are none, of one that says nothing."""
        return self.scores(case, "wrong", form) or self.scores(case, "nonsense") or self.scores(case, "empty place")

    def told(self, case: int, form: str) -> bool:
        """Whether the right answer of a row scores higher than a wrong one does."""
        right, wrong = self.right(case, form), self.wrong(case, form)
        return right is not None and bool(wrong) and right > min(wrong) + LEAST

    def share(self, form: str) -> float:
        """Of the rows that have the form: where right and wrong are told apart."""
        having = [place for place in self.by_case if any(one.name == form for one in self.cases[place].forms)]
        return sum(self.told(place, form) for place in having) / max(len(having), 1)

    @cached_property
    def forms(self) -> list[str]:
        """Names of all forms that some prompt asks for, in their order."""
        return list(dict.fromkeys(form.name for place in self.by_case for form in self.cases[place].forms))

    @cached_property
    def best(self) -> str:
        """The form in which right and wrong are told apart on most rows, and then scores highest."""
        return max(self.forms, key=lambda form: (self.share(form), self._mean(form), -self.forms.index(form)))

    def _mean(self, form: str) -> float:
        found = [value for place in self.by_case if (value := self.right(place, form)) is not None]
        return round(sum(found) / len(found), 3) if found else float("-inf")

    @cached_property
    def lost(self) -> list[int]:
        """Cases whose right answer scores no higher than a wrong one in any form that the prompt asks for."""
        return [
            place for place in self.by_case if not any(self.told(place, form.name) for form in self.cases[place].forms)
        ]

    @cached_property
    def kept(self) -> list[tuple[int, float, float]]:
        """(case, score of the right answer, lowest of wrong ones) in the best form, where the two are told apart."""
        return [
            (place, self.right(place, self.best) or 0.0, min(self.wrong(place, self.best)))
            for place in self.by_case
            if self.told(place, self.best)
        ]

    @cached_property
    def fully(self) -> list[tuple[int, float, float]]:
        """Those of `kept` on which everything was tried, not a right answer and a wrong one alone."""
        return [one for one in self.kept if self.tried(one[0])]

    def tried(self, place: int) -> bool:
        """Whether everything was tried on a row."""
        return any(one.kind == "empty" for one in self.by_case[place])

    def rows(self, places: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.cases[place].prompt.row_index for place in places)

    def share_above(self, kind: str, part: float) -> float:
        """Of the rows in `kept` with tries of this kind: where one gets this part of the way from wrong to right."""
        having = hits = 0
        for place, right, wrong in self.kept:
            given = self.scores(place, kind)
            having += bool(given)
            hits += bool(given) and max(given) >= wrong + part * (right - wrong) - LEAST
        return hits / having if having else 0.0

    def of_kind(self, kind: str) -> Try:
        return next(one for one in self.tries if one.kind == kind and one.score is not None)


def judge(scored: Scored) -> list[Finding]:
    """All that the scores tell, the reason for most of the rest first."""
    values = [one.score for one in scored.tries if one.score is not None]
    if not values:
        return []
    if max(values) - min(values) <= LEAST:
        text = (
            f"gives {values[0]:g} to every one of {len(values)} answers: right, wrong and empty ones, in every form "
            "that was tried. Nothing can be learned from it"
        )
        cure = (
            "See that it reads the keys it is given (response, ground_truth, row …), that no `except` hides an error, "
            "and that it looks for the form that the prompt asks for"
        )
        odd = truth_cure(scored.cases[scored.tries[0].case])
        cure += f"; {odd}" if odd else ""
        return [Finding("error", REWARD, text, cure)]
    lost = len(scored.lost) / len(scored.by_case)
    if lost >= 0.5:
        return [_inverted(scored) or why_unreachable(scored, "error")]
    findings = [] if not scored.lost else [why_unreachable(scored, "warning")]
    return findings + [one for check in CHECKS if (one := check(scored)) is not None]


def _inverted(scored: Scored) -> Finding | None:
    lower = [
        place
        for place in scored.lost
        if (right := scored.right(place, scored.best)) is not None
        and (wrong := scored.scores(place, "wrong", scored.best))
        and right < min(wrong) - LEAST
    ]
    if len(lower) < len(scored.by_case) / 2:
        return None
    return Finding(
        "error",
        REWARD,
        f"gives right answers less than wrong ones on {len(lower)} of {len(scored.by_case)} rows",
        "Turn the sign: `overall` must be higher for better answers",
    )


def _needed_form(scored: Scored) -> Finding | None:
    """A form that follows the prompt and loses what another such form gets."""
    for name in scored.forms:
        having = [
            place
            for place, _, _ in scored.fully
            if any(form.name == name and form.needed for form in scored.cases[place].forms)
            and any(one.kind == "right" and one.form == name for one in scored.by_case[place])
        ]
        low = [place for place, _, wrong in scored.fully if place in having and _loses(scored, place, name, wrong)]
        if len(low) >= max(0.3 * len(having), 1):
            mean = sum(scored.right(place, name) or 0 for place in low) / len(low)
            best = sum(scored.right(place, scored.best) or 0 for place in low) / len(low)
            asked = scored.cases[low[0]].asked
            return Finding(
                "warning",
                REWARD,
                f"a right answer with {name} gets {mean:.2f}, with {scored.best} {best:.2f}. The prompt asks for "
                f"{asked.describe()}, and models write it both ways",
                "Let the pattern take line breaks and blanks (re.DOTALL, \\s*), or show the exact form in the prompt",
            )
    return None


def _loses(scored: Scored, place: int, name: str, wrong: float) -> bool:
    """Whether a right answer in this form gets less than in another of about the same length, or nothing at all."""
    own = scored.right(place, name)
    if own is None or not scored.told(place, name):
        return True
    written = {form.name: len(form.write(scored.cases[place].contents[0])) for form in scored.cases[place].forms}
    alike = [form for form, length in written.items() if abs(length - written[name]) <= 0.2 * written[name]]
    best = max(scored.right(place, form) or own for form in alike)
    return own < best - PART * (best - wrong)


def _better_elsewhere(scored: Scored) -> Finding | None:
    """A form that the prompt does not ask for and that scores higher."""
    better: Counter[str] = Counter()
    rows = 0
    for place, right, wrong in scored.fully:
        best = max(scored.right(place, form) or right for form in scored.forms)
        higher = {
            one.form
            for one in scored.by_case[place]
            if one.kind == "other form"
            and one.score is not None
            and one.score > best + PART * abs(best - wrong)
            # a shorter one may score higher for being short
            and len(one.text) >= 0.8 * len(scored.cases[place].forms[0].write(one.content))
        }
        rows += bool(higher)
        better.update(higher)
    if not better or rows < 0.5 * len(scored.fully):
        return None
    form = better.most_common(1)[0][0]
    place = scored.fully[0][0]
    high = max(one.score or 0 for one in scored.by_case[place] if one.form == form)
    return Finding(
        "warning",
        REWARD,
        f"a right answer in the form that the prompt asks for ({scored.cases[place].asked.describe()}) gets "
        f"{scored.right(place, scored.best):g}; one with {form}, which it does not ask for, gets {high:g}",
        f"Ask for {form} in data.format_prompt, or let the reward take the form that is asked for",
    )


def _wrong_as_right(scored: Scored) -> Finding | None:
    pairs = hits = 0
    barely = 0
    for place, right, _ in scored.kept:
        for value in scored.scores(place, "wrong", scored.best):
            pairs += 1
            hits += value >= right - LEAST
        wrong = scored.wrong(place, scored.best)
        low = min([*scored.scores(place, "empty"), *scored.scores(place, "no answer"), *wrong])
        barely += right - min(wrong) < 0.1 * (right - low)
    if pairs and hits > 0.3 * pairs:
        text = f"gives {hits} of {pairs} wrong answers (right ones of other rows) as much as right ones"
        return Finding("warning", REWARD, text, "Compare the whole answer with the ground truth of its own row")
    if scored.kept and barely > 0.5 * len(scored.kept):
        text = (
            "gives a wrong answer in the asked form over 90 % of what a right one gets: the form pays, not the answer"
        )
        return Finding("warning", REWARD, text, "Give the accuracy more weight and the form less")
    return None


def _empty(scored: Scored) -> Finding | None:
    words = {
        "empty": "an empty response",
        "empty place": "an answer with nothing in its place",
        "nonsense": "the answer “?”",
        "no answer": "reasoning without an answer",
        "cut off": "a response that is cut off before its answer",
    }
    for kind, name in words.items():
        share = scored.share_above(kind, 0.7)
        if share >= 0.3:
            one = scored.of_kind(kind)
            return Finding(
                "error" if share > 0.7 else "warning",
                REWARD,
                f"{name} ({one.text[-80:]!r}) gets nearly as much as a right one, or as much: {one.score:g} on "
                f"{share:.0%} of the rows tried",
                "Give nothing where no answer is found or parsed; `'' in text` is true for every text",
            )
    return None


def _contained(scored: Scored) -> Finding | None:
    for kind, what in (("digit added", "one digit more at the end"), ("digit before", "one digit more in front")):
        if scored.share_above(kind, 0.9) >= 0.5:
            one = scored.of_kind(kind)
            text = f"takes a number with {what} for right: {one.content} gets {one.score:g}"
            return Finding(
                "warning", REWARD, text, "Compare numbers, or whole texts with ==, not with `in` or a prefix"
            )
    if _has_place(scored) and scored.share_above("only thought of", 0.9) >= 0.5:
        one = scored.of_kind("only thought of")
        text = f"takes a wrong answer for right when the reasoning names the right one: {one.score:g}"
        return Finding("warning", REWARD, text, "Look for the answer only where the prompt wants it")
    return None


def _has_place(scored: Scored) -> bool:
    return all(scored.cases[place].asked.has_place for place in scored.by_case)


def _long(scored: Scored) -> Finding | None:
    low = [
        place
        for place, _, wrong in scored.fully
        if (given := scored.scores(place, "long")) and max(given) <= wrong + LEAST
    ]
    if not low or len(low) < 0.5 * len(scored.fully):
        return None
    one = scored.of_kind("long")
    return Finding(
        "warning",
        REWARD,
        f"a right answer of {one.length} tokens, half of data.max_response_length, gets {one.score:g}, no more than a "
        "short wrong one",
        "Begin the penalty for length later, make it smaller, or count tokens (`response_length`), not characters",
    )


def _form_ignored(scored: Scored) -> Finding | None:
    same = 0
    having = 0
    for place, right, _ in scored.kept:
        asked: Asked = scored.cases[place].asked
        bare = [
            one.score
            for one in scored.by_case[place]
            if one.form == "the answer alone" and one.kind == "other form" and one.score is not None
        ]
        if asked.tags and bare:
            having += 1
            same += bare[0] >= right - LEAST
    if not having or same < 0.9 * having:
        return None
    text = "an answer without the form that the prompt asks for gets as much as one with it"
    return Finding("note", REWARD, text, "Nothing to do if that is meant; else add a part for the format")


def _both(scored: Scored) -> Finding | None:
    if not _has_place(scored) or scored.share_above("both", 0.9) < 0.5:
        return None
    one = scored.of_kind("both")
    text = f"takes an answer that names a right and a wrong one ({one.content!r}) for right"
    return Finding("note", REWARD, text, "If models begin to list answers, compare the whole answer")


CHECKS = (_needed_form, _better_elsewhere, _wrong_as_right, _empty, _contained, _long, _form_ignored, _both)
