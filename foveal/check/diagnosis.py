"""Why right answers don't score: the form, the truth's spelling, or nothing that was tried."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from foveal.check.answers import LONG, as_number, unwrap
from foveal.check.findings import REWARD, Finding
from foveal.check.tries import Case

if TYPE_CHECKING:
    from foveal.check.judging import Scored

LEAST = 1e-6
"""By which a score must be higher to count as higher."""
SHOWN = 120


def why_unreachable(scored: Scored, level: Literal["error", "warning"]) -> Finding:
    """The finding for rows whose right answer scores no higher than a wrong one in any form that is asked for."""
    lost = scored.lost
    rows = scored.rows(lost)
    place = next((one for one in lost if scored.cases[one].contents), lost[0])
    case = scored.cases[place]
    of = f"{len(lost)} of {len(scored.by_case)} rows"
    if not case.contents:
        text = (
            f"on {of} the ground truth cannot be written in the form that the prompt asks for "
            f"({_asked(case)}): {_shown(case.truth)}"
        )
        cure = truth_cure(case) or "Use a format prompt of this task, or another data.answer_key"
        return Finding(level, "prompt and ground truth", text, cure, rows)
    right = scored.right(place, scored.forms[0]) if scored.right(place, scored.forms[0]) is not None else 0.0
    best = next(one for one in scored.by_case[place] if one.kind == "right")
    text = (
        f"on {of} a right answer in the form that the prompt asks for ({_asked(case)}) scores no more than a wrong "
        f"one: {right:g}. Tried: {_shown(best.text[-SHOWN:])} where the ground truth is {_shown(case.truth)}"
    )
    reaching = _reaching(scored)
    if reaching:
        text += f". It would score with {reaching}"
        cure = f"Make prompt and reward agree: ask for {reaching}, or let the reward read what the prompt asks for"
        if reaching == "the ground truth as it stands":
            cure = truth_cure(case) or "Bring ground truth and answer to one form in the reward, or change the column"
    else:
        cure = truth_cure(case) or (
            "See what the reward compares: print the extracted answer and the ground truth, with repr(), for one row"
        )
    return Finding(level, REWARD, text, cure, rows)


def _reaching(scored: Scored) -> str:
    """What most often tells right from wrong on the lost rows although the prompt doesn't ask for it."""
    found: Counter[str] = Counter()
    for place in scored.lost:
        low = min((value for form in scored.forms for value in scored.wrong(place, form)), default=0.0)
        for one in scored.by_case[place]:
            if one.kind in ("other form", "verbatim") and one.score is not None and one.score > low + LEAST:
                asked = "" if one.content in scored.cases[place].contents else ", the ground truth as it stands in it"
                found["the ground truth as it stands" if one.kind == "verbatim" else one.form + asked] += 1
    if not found:
        return ""
    name, count = found.most_common(1)[0]
    return name if count >= 0.3 * sum(scored.tried(place) for place in scored.lost) else ""


def truth_cure(case: Case) -> str:
    """What about the truth itself is unusual, and what to do about it."""
    truth: Any = case.truth
    key = "the column of data.answer_key"
    if truth is None or truth == "":
        return f"Fill in {key}, or leave such rows out"
    if isinstance(truth, list | tuple | dict):
        return f"{key} holds a {type(truth).__name__}, not text: unpack it in the reward, or write the answer there"
    if isinstance(truth, bool | int | float):
        return f"{key} holds a {type(truth).__name__} and the response is text: compare str() with str(), or numbers"
    text = str(truth)
    if text != text.strip():
        return f"{key} has blanks or line breaks at its ends: strip() it in the reward, as the answer is"
    if re.search(r"</?\w+>", text):
        return f"{key} holds tags: take them off in the reward"
    if len(text) > LONG and text != str(unwrap(text)):
        return f"{key} looks like a worked solution: set data.answer_key to the column of the final answer"
    if "\\" in text or "$" in text:
        return f"{key} is LaTeX: compare expressions (math-verify), or ask for LaTeX in the prompt"
    if as_number(text) is not None and not re.fullmatch(r"[-+]?\d+(\.\d+)?", text):
        return f"{key} holds more than a plain number (a unit, %, commas): take it off in the reward"
    if case.asked.kind in ("letter", "letters") and not re.fullmatch(r"[A-H]([, ]*[A-H])*", text):
        return f"the prompt asks for a letter, {key} holds {_shown(text)}: use a column of letters, or ask for the text"
    if len(text) > 1 and text.lower() != text:
        return "See whether upper and lower case are treated alike on both sides"
    return ""


def _asked(case: Case) -> str:
    kinds = {
        "letter": "a letter",
        "letters": "letters",
        "option": "the text of an option",
        "number": "a number",
        "point": "a point",
        "box": "a box",
    }
    kind = kinds.get(case.asked.kind)
    return f"{case.asked.describe()}, {kind}" if kind else case.asked.describe()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN + 20 else f"{text[:SHOWN]}…"
