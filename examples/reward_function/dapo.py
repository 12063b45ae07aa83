r"""Score of DAPO (arXiv 2503.14476): accuracy + overlong × overlong_penalty_factor.

accuracy             +1 when the text behind the last `Answer:` within the last 300 characters, up to the line's end,
                     equals the ground truth after both are normalised; else -1 (also when there is no such line)
overlong             0 up to max_response_length - overlong_buffer_length tokens, then falling in a straight line to -1
                     at max_response_length (section 3.4 of the paper)
accuracy_normalized  accuracy on the scale 0 to 1: use it as `algorithm.filter_key`

All three arguments are needed, as in
`worker.reward.reward_function_kwargs='{"max_response_length":20480,"overlong_buffer_length":4096,"overlong_penalty_factor":1.0}'`.
Goes with `examples/format_prompt/dapo.jinja`.

Normalised (after appendix D of Minerva, arXiv 2206.14858): only what follows the last `=`; articles, blanks, units and
LaTeX spacing removed; `\text{}`, `\boxed{}` and dollars unwrapped; `\frac12` written as `\frac{1}{2}`; commas dropped
from whole numbers.
"""

from __future__ import annotations

import re
from typing import Any

REWARD_NAME = "dapo"
REWARD_TYPE = "batch"

ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
WINDOW = 300

# Plain replacements, in this order.
REWRITTEN = {
    "an ": "",
    "a ": "",
    ".$": "$",
    r"\$": "",
    r"\ ": "",
    " ": "",
    "mbox": "text",
    r",\text{and}": ",",
    r"\text{and}": ",",
    r"\text{m}": r"\text{}",
}
# The order matters here too: a word is gone before a later one is looked for.
WORDS = (
    r"square ways integers dollars mph inches hours km units \ldots sue points feet minutes digits cents degrees cm gm "
    r"pounds meters meals edges students childrentickets multiples"
)
LATEX = r"\text{s} \text{.} \text{}^2 \text{}^3 \text{} \mathrm{th} ^\circ ^{\circ} \; ,\! {,} " + '" ' + r"\dots"
REMOVED = [*WORDS.split(), *LATEX.split()]

FIRST_FORMULA = re.compile(r"^[^\n]*?\$([^\n]*?)\$[^\n]*")
WRAPPERS = [
    re.compile(pattern)
    for pattern in (r"\\text\{(.*?)\}", r"\\textbf\{(.*?)\}", r"\\overline\{(.*?)\}", r"\\boxed\{(.*)\}")
]
BARE_FRAC = re.compile(r"frac([^{])(.)")
BARE_SQRT = re.compile(r"sqrt([^{])")


def normalize(answer: str) -> str:
    answer = answer.rpartition("=")[2]
    for old, new in REWRITTEN.items():
        answer = answer.replace(old, new)
    for word in REMOVED:
        answer = answer.replace(word, "")
    answer = FIRST_FORMULA.sub(r"$\1$", answer)
    for wrapper in WRAPPERS:
        answer = wrapper.sub(r"\1", answer)
    answer = BARE_SQRT.sub(r"sqrt{\1}", BARE_FRAC.sub(r"frac{\1}{\2}", answer))
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return digits if digits.isdigit() else answer.strip()


def accuracy(response: str, ground_truth: Any) -> float:
    answers = ANSWER_LINE.findall(response[-WINDOW:])
    return 1.0 if answers and normalize(answers[-1]) == normalize(str(ground_truth)) else -1.0


def overlong(length: int, max_length: int, buffer: int) -> float:
    excess = length - (max_length - buffer)
    if excess <= 0:
        return 0.0
    return -1.0 if excess >= buffer else -excess / buffer


def compute_score(
    reward_inputs: list[dict[str, Any]],
    max_response_length: int,
    overlong_buffer_length: int,
    overlong_penalty_factor: float,
) -> list[dict[str, float]]:
    scores = []
    for one in reward_inputs:
        right = accuracy(one["response"], one["ground_truth"])
        penalty = overlong(one["response_length"], max_response_length, overlong_buffer_length)
        scores.append(
            {
                "overall": right + penalty * overlong_penalty_factor,
                "accuracy": right,
                "overlong": penalty,
                "accuracy_normalized": (right + 1) / 2,
            }
        )
    return scores
