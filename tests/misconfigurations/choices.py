"""Multiple choice, classes, yes and no: 7 misconfigurations, 3 sound set-ups."""

from __future__ import annotations

from pathlib import Path

from tests.misconfigurations import rows as make
from tests.misconfigurations.base import ANSWER_ONLY, R1V, Case, Row, batch, sequential, whole

LETTER = """{{ content | trim }}

Think about the question between <think> and </think>, then give the option's letter, such as <answer>A</answer>."""
ONE_LINE = """{{ content | trim }}

Respond in this form: <reasoning>your reasoning</reasoning><answer>Yes or No</answer>"""
ALL_LETTERS = """{{ content | trim }}

Answer with all correct letters in alphabetical order, with commas, such as <answer>B,D</answer>."""

LETTER_SCORE = r"""
def score(response, truth):
    match = re.search(r"<answer>\s*\(?([A-D])\b.*?</answer>", response, re.DOTALL)
    accuracy = 1.0 if match and match.group(1) == truth else 0.0
    formatted = 1.0 if match else 0.0
    return {"overall": 0.8 * accuracy + 0.2 * formatted, "format": formatted, "accuracy": accuracy}
"""


def choices(folder: Path) -> list[Row]:
    return make.choices(folder)


def option_texts(folder: Path) -> list[Row]:
    return [{**row, "answer": row["option"]} for row in make.choices(folder, 20, seed=41)]


def colour_classes(folder: Path) -> list[Row]:
    question = "<image>Name the colour of the rectangle in one word."
    return [{**row, "problem": question, "answer": row["option"]} for row in make.choices(folder, 18, seed=42)]


def mixed_case_letters(folder: Path) -> list[Row]:
    rows = make.choices(folder, 22, seed=43)
    for i, row in enumerate(rows):
        row["answer"] = [row["answer"].lower(), f"({row['answer']})", row["answer"]][i % 3]
    return rows


def fault(name: str, task: str, kind: str, note: str, report: str, rows, prompt, reward, **more) -> Case:
    return Case(name, task, kind, False, note, report, rows, prompt, reward, **more)


def sound(name: str, task: str, kind: str, note: str, report: str, rows, prompt, reward, **more) -> Case:
    return Case(name, task, kind, True, note, report, rows, prompt, reward, **more)


CASES = [
    fault(
        "option_text_as_truth",
        "multiple choice",
        "choice letter against choice text",
        "Prompt and reward want a letter, the column holds the option's text.",
        "https://github.com/dhcode-cpp/X-R1/issues/24",
        option_texts,
        LETTER,
        batch(LETTER_SCORE),
    ),
    fault(
        "first_truth_for_all",
        "multiple choice",
        "wrong row's ground truth",
        "The batch function compares every answer with the first row's truth.",
        "the kind of https://github.com/NVIDIA-NeMo/RL/pull/3635 (scores that belong to another row)",
        choices,
        LETTER,
        whole(
            r"""
            def letter(text):
                match = re.search(r"<answer>\s*([A-D])\s*</answer>", text)
                return match.group(1) if match else None


            def compute_score(reward_inputs):
                truth = reward_inputs[0]["ground_truth"]
                scores = []
                for one in reward_inputs:
                    given = letter(one["response"])
                    accuracy = 1.0 if given == truth else 0.0
                    scores.append({"overall": accuracy, "format": float(given is not None), "accuracy": accuracy})
                return scores
            """
        ),
    ),
    fault(
        "only_first_letter_read",
        "multiple choice",
        "several right answers",
        "Half of the rows have two or three letters as truth; only the answer's first letter is compared.",
        "the kind of https://github.com/open-compass/VLMEvalKit (multiple-answer questions)",
        lambda folder: make.several_choices(folder),
        ALL_LETTERS,
        batch(LETTER_SCORE),
    ),
    fault(
        "answer_lowered_truth_not",
        "yes/no",
        "upper and lower case",
        "The answer is put into lower case, the truth stays `Yes` or `No`.",
        "https://github.com/verl-project/verl/pull/6793",
        lambda folder: make.yes_no(folder),
        ANSWER_ONLY,
        sequential(
            r"""
            def score(response, truth):
                match = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
                given = match.group(1).strip().lower().rstrip(".") if match else ""
                accuracy = 1.0 if given == truth else 0.0
                formatted = 1.0 if match else 0.0
                return {"overall": 0.9 * accuracy + 0.1 * formatted, "format": formatted, "accuracy": accuracy}
            """
        ),
    ),
    fault(
        "pattern_wants_line_breaks",
        "yes/no",
        "strict pattern",
        "The prompt shows the form on one line; the pattern wants a line break at both ends of each tag, or all is 0.",
        "https://github.com/unslothai/unsloth/issues/1761",
        lambda folder: make.yes_no(folder, 16, seed=44),
        ONE_LINE,
        batch(
            r"""
            STRICT = re.compile(r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n(.*?)\n</answer>\n$", re.DOTALL)


            def score(response, truth):
                match = STRICT.match(response)
                if not match:
                    return {"overall": 0.0, "format": 0.0, "accuracy": 0.0}
                accuracy = 1.0 if match.group(1).strip().lower() == truth.lower() else 0.0
                return {"overall": 0.5 + 0.5 * accuracy, "format": 1.0, "accuracy": accuracy}
            """
        ),
    ),
    fault(
        "think_wanted_not_asked",
        "classes",
        "think tags not asked for",
        "The prompt asks for the answer tag and nothing else; without <think> the score is 0.",
        "https://github.com/Liuziyu77/Visual-RFT/issues/217",
        colour_classes,
        ANSWER_ONLY,
        batch(
            r"""
            def score(response, truth):
                formatted = bool(re.fullmatch(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", response, re.DOTALL))
                match = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
                accuracy = float(bool(match) and match.group(1).strip().lower() == truth.lower())
                return {"overall": accuracy * formatted, "format": float(formatted), "accuracy": accuracy}
            """
        ),
    ),
    fault(
        "empty_answer_contained_in_truth",
        "classes",
        "wrong answers score",
        "Containment either way: an empty answer is in every truth and gets full marks.",
        "https://github.com/Liuziyu77/Visual-RFT/issues/176",
        colour_classes,
        R1V,
        batch(
            r"""
            def score(response, truth):
                match = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
                answer = match.group(1).strip().lower() if match else ""
                accuracy = 1.0 if truth in answer or answer in truth else 0.0
                formatted = 1.0 if match else 0.0
                return {"overall": 0.8 * accuracy + 0.2 * formatted, "format": formatted, "accuracy": accuracy}
            """
        ),
    ),
    sound(
        "letters_brought_to_one_form",
        "multiple choice",
        "truths in several spellings, handled",
        "Truths are `b`, `(C)` and `A`; both sides are brought to one form.",
        "https://github.com/om-ai-lab/VLM-R1/pull/184",
        mixed_case_letters,
        LETTER,
        batch(
            r"""
            def letter(text):
                match = re.search(r"(?<![A-Za-z])([A-Da-d])(?![A-Za-z])", text)
                return match.group(1).upper() if match else None


            def score(response, truth):
                match = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
                given = letter(match.group(1)) if match else None
                accuracy = float(given is not None and given == letter(truth))
                formatted = float("</think>" in response and match is not None)
                return {"overall": 0.9 * accuracy + 0.1 * formatted, "format": formatted, "accuracy": accuracy}
            """
        ),
    ),
    sound(
        "share_of_letters",
        "multiple choice",
        "several right answers, partial credit",
        "The F1 of the sets of letters; a wrong letter may leave a good part of the score.",
        "https://github.com/allenai/open-instruct/pull/596",
        lambda folder: make.several_choices(folder, 18, seed=45),
        ALL_LETTERS,
        sequential(
            r"""
            def score(response, truth):
                match = re.search(r"<answer>\s*([A-D](?:\s*,\s*[A-D])*)\s*</answer>", response)
                if match is None:
                    return {"overall": 0.0, "format": 0.0, "accuracy": 0.0}
                given, right = set(re.findall("[A-D]", match.group(1))), set(truth.split(","))
                f1 = 2 * len(given & right) / (len(given) + len(right))
                return {"overall": f1, "format": 1.0, "accuracy": float(given == right)}
            """
        ),
    ),
    sound(
        "mostly_no",
        "yes/no",
        "few different truths",
        "Four of five truths are `No`, so another row's answer is often right.",
        "the kind of POPE and other yes/no data, out of balance",
        lambda folder: make.yes_no(folder, 25, seed=46, share_of_yes=0.2),
        R1V,
        batch(
            r"""
            def score(response, truth):
                match = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
                given = match.group(1).strip().lower().strip(".!") if match else ""
                accuracy = 1.0 if given == truth.lower() else 0.0
                formatted = 1.0 if match and "</think>" in response else 0.0
                return {"overall": 0.9 * accuracy + 0.1 * formatted, "format": formatted, "accuracy": accuracy}
            """
        ),
    ),
]
