r"""Responses of a model that does as the prompt says, with an answer of ours in them; and the same in other forms."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from foveal.check.asked import ANSWER_KEY, Asked

LINES = (
    "A first look at the question shows 2 parts.\n"
    "Each of them is worked out by itself, the first before the second.\n\n"
    "Put together they give the result."
)
ONE_LINE = " ".join(LINES.split())
"""As long as `LINES`, so that a reward that looks at lengths treats them alike."""

Write = Callable[[str], str]


@dataclass(frozen=True)
class Form:
    """A way to lay a response out.

    Attributes:
        name: in words, for messages: "reasoning of several lines".
        write: from the answer to the response.
        needed: a model that does as it is told writes so; without, it only may.
        asked: it is what the prompt asks for.
    """

    name: str
    write: Write
    needed: bool = True
    asked: bool = True


def asked_forms(asked: Asked) -> list[Form]:
    """Forms that follow the prompt, the plainest first."""
    place = _place(asked)
    if any(tag.thinks for tag in asked.tags):
        forms = [
            Form("reasoning of several lines", _tagged(asked, LINES, "\n", place)),
            Form("reasoning of one line", _tagged(asked, ONE_LINE, "\n", place)),
        ]
        if asked.separators is None:
            forms.append(Form("an empty line between the tags", _tagged(asked, LINES, "\n\n", place), needed=False))
            forms.append(Form("nothing between the tags", _tagged(asked, ONE_LINE, "", place), needed=False))
        return forms
    reasons = asked.reasons and asked.json_keys is None  # an object has a key for it
    bare = Form("the answer alone", place, needed=not reasons)
    lines = Form("reasoning of several lines before the answer", _after(LINES, place), needed=reasons)
    one = Form("a sentence before the answer", _after(ONE_LINE, place), needed=False)
    forms = [lines, one, bare] if reasons else [bare, lines, one]
    if asked.boxed:
        forms.append(
            Form("a boxed answer in dollars", _after(LINES, lambda answer: f"The answer is ${place(answer)}$."), False)
        )
    if asked.json_keys is not None:
        forms.append(Form("JSON in a code block", lambda answer: f"```json\n{place(answer)}\n```", needed=False))
    if asked.line_is_cue:
        forms.append(Form("the answer alone, without its label", lambda answer: answer, needed=False))
    if not asked.has_place:
        forms.append(Form("a sentence", lambda answer: f"The answer is {answer}.", needed=False))
    if asked.boxed and asked.answer_tag:
        forms += [
            Form("the tags without \\boxed{}", _after(ONE_LINE, _in_tag(asked)), needed=False),
            Form("\\boxed{} without the tags", _after(ONE_LINE, boxed), needed=False),
        ]
    return forms


def other_forms(asked: Asked) -> list[Form]:
    """Forms that rewards often want and the prompt doesn't ask for: what is wrong shows in which of them score."""
    thought = f"<think>\n{LINES}\n</think>\n"
    tag = asked.answer_tag
    forms = {
        "<answer>…</answer>": _after(LINES, lambda answer: f"<answer>{answer}</answer>"),
        "\\boxed{…}": _after(LINES, boxed),
        "<think>…</think> <answer>…</answer>": lambda answer: f"{thought}<answer>{answer}</answer>",
        "<think>…</think> \\boxed{…}": lambda answer: thought + boxed(answer),
        "<answer>\\boxed{…}</answer>": _after(LINES, lambda answer: f"<answer>{boxed(answer)}</answer>"),
        "a line “Answer: …”": _after(LINES, lambda answer: f"Answer: {answer}"),
        "a line “答案:…”": _after(LINES, lambda answer: f"答案:{answer}"),
        "a line “答案：…”": _after(LINES, lambda answer: f"答案：{answer}"),
        "a line “#### …”": _after(LINES, lambda answer: f"#### {answer}"),
        'JSON {"answer": …}': lambda answer: json.dumps({"answer": _typed(answer)}, ensure_ascii=False),
        "the answer alone": lambda answer: answer,
    }
    if tag is not None and len(asked.tags) > 1:
        forms["line breaks inside and between the tags"] = lambda answer: "".join(
            f"{one.opening}\n{ONE_LINE if one.thinks else answer}\n{one.closing}\n" for one in asked.tags
        )
        forms["reasoning of one line, nothing between the tags"] = _tagged(asked, ONE_LINE, "", lambda answer: answer)
        lower = "".join(f"{one.opening}{ONE_LINE if one.thinks else '%s'}{one.closing}" for one in asked.tags).lower()
        forms["tags in lower case"] = lambda answer: lower.replace("%s", answer)
    written = {form.write("7") for form in asked_forms(asked)}
    return [Form(name, write, False, False) for name, write in forms.items() if write("7") not in written]


def boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


def _after(reasoning: str, place: Write) -> Write:
    return lambda answer: f"{reasoning}\n\n{place(answer)}"


def _place(asked: Asked) -> Write:
    """Puts the answer where the prompt wants it, without any reasoning."""
    inner = boxed if asked.boxed else _json(asked) if asked.json_keys is not None else (lambda answer: answer)
    if asked.brackets:
        return lambda answer: f"[[{answer}]]"
    if asked.line:
        joint = "" if asked.line[-1] in "：" or asked.line.endswith(" ") else " "
        end = "**" if asked.line.count("**") == 1 else ""
        return lambda answer: f"{asked.line}{joint}{inner(answer)}{end}"
    tag = asked.answer_tag
    if tag is None or any(one.thinks for one in asked.tags):
        return inner
    before, after = tag.shown or ("", "")
    return lambda answer: f"{tag.opening}{before}{inner(answer)}{after}{tag.closing}"


def _in_tag(asked: Asked) -> Write:
    tag = asked.answer_tag
    return (lambda answer: f"{tag.opening}{answer}{tag.closing}") if tag else (lambda answer: answer)


def _tagged(asked: Asked, reasoning: str, separator: str, place: Write) -> Write:
    """All tags of the prompt in order; what follows them where none of them is for the answer."""

    def write(answer: str) -> str:
        parts = []
        for tag in asked.tags:
            before, after = tag.shown or ("", "")
            inside = reasoning if tag.thinks else place(answer)
            parts.append(f"{tag.opening}{before}{inside}{after}{tag.closing}")
        if asked.answer_tag is None:
            parts.append(place(answer))
        separators = list(asked.separators or ())
        separators += [separator] * (len(parts) - 1 - len(separators))
        return "".join(part + joint for part, joint in zip(parts, [*separators, ""], strict=True))

    return write


def _json(asked: Asked) -> Write:
    keys = asked.json_keys or ()

    def write(answer: str) -> str:
        value = _typed(answer)
        if not keys:
            return answer if isinstance(value, dict | list) else json.dumps({"answer": value}, ensure_ascii=False)
        own = value if isinstance(value, dict) else {}
        last = next((key for key in reversed(keys) if ANSWER_KEY.search(key)), keys[-1])
        filled = {key: own.get(key, value if key == last else ONE_LINE) for key in keys}
        return json.dumps([filled] if asked.json_list else filled, ensure_ascii=False)

    return write


def _typed(answer: str) -> object:
    """The answer as JSON would hold it: a number, a list, or text."""
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return answer
