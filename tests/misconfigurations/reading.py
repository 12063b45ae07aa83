"""Signs to read, numbers with units, Chinese, captions: 5 misconfigurations, 4 sound set-ups."""

from __future__ import annotations

from pathlib import Path

from tests.misconfigurations import rows as make
from tests.misconfigurations.base import ANSWER_ONLY, R1V, Case, Row, batch, sequential

NUMBER_ONLY = "{{ content | trim }}\n\nShow your work. Give only the number in the answer, like <answer>12</answer>."
CHINESE = "{{ content | trim }}\n\n请一步一步思考，并在最后一行写出“答案：X”，其中X是一个数字。"

EQUAL = r"""
def score(response, truth):
    match = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
    given = match.group(1).strip() if match else ""
    accuracy = 1.0 if given == truth else 0.0
    formatted = 1.0 if match else 0.0
    return {"overall": 0.9 * accuracy + 0.1 * formatted, "format": formatted, "accuracy": accuracy}
"""


def signs(folder: Path) -> list[Row]:
    return make.signs(folder)


def lines_from_a_file(folder: Path) -> list[Row]:
    return [{**row, "answer": f"{row['answer']}\n"} for row in make.signs(folder, 18, seed=61)]


def some_without_truth(folder: Path) -> list[Row]:
    rows = make.signs(folder, 20, seed=62)
    for row in rows[2::4]:
        row["answer"] = ""
    return rows


def with_spellings(folder: Path) -> list[Row]:
    rows = make.signs(folder, 14, seed=63)
    for row in rows:
        word = row["answer"]
        row["answer"] = [word, word.upper(), word.replace(" ", "")]
    return rows


def fault(name: str, task: str, kind: str, note: str, report: str, rows, prompt, reward, **more) -> Case:
    return Case(name, task, kind, False, note, report, rows, prompt, reward, **more)


def sound(name: str, task: str, kind: str, note: str, report: str, rows, prompt, reward, **more) -> Case:
    return Case(name, task, kind, True, note, report, rows, prompt, reward, **more)


CASES = [
    fault(
        "line_end_in_truth",
        "signs",
        "whitespace in the ground truth",
        "The truths end with a line break; the answer is stripped, the truth is not.",
        "https://github.com/huggingface/open-r1/pull/157 (blanks that no one sees)",
        lines_from_a_file,
        ANSWER_ONLY,
        batch(EQUAL),
    ),
    fault(
        "empty_truths",
        "signs",
        "ground truth empty in some rows",
        "A quarter of the truths are empty: there, an answer without tags counts as right and a real one as wrong.",
        "https://github.com/verl-project/verl-omni/issues/643",
        some_without_truth,
        ANSWER_ONLY,
        batch(EQUAL),
    ),
    fault(
        "end_token_wanted",
        "signs",
        "special tokens removed",
        "The pattern ends with <|im_end|>, which skip_special_tokens (on by default) takes out of the text.",
        "https://github.com/lsdefine/simple_GRPO/issues/19",
        signs,
        R1V,
        sequential(
            r"""
            FORMAT = re.compile(r"^\s*<think>.*?</think>\s*<answer>(.*?)</answer>\s*<\|im_end\|>$", re.DOTALL)


            def score(response, truth):
                match = FORMAT.match(response)
                if match is None:
                    return {"overall": 0.0, "format": 0.0, "accuracy": 0.0}
                accuracy = 1.0 if match.group(1).strip().lower() == truth.lower() else 0.0
                return {"overall": 0.2 + 0.8 * accuracy, "format": 1.0, "accuracy": accuracy}
            """
        ),
    ),
    fault(
        "unit_in_truth",
        "numbers with units",
        "unit in the ground truth",
        "The truth is `120 km`; float() of it raises, which counts as wrong.",
        "https://github.com/huggingface/Math-Verify/issues/61",
        lambda folder: make.lengths(),
        NUMBER_ONLY,
        batch(
            r"""
            def score(response, truth):
                match = re.search(r"<answer>\s*(.*?)\s*</answer>", response, re.DOTALL)
                try:
                    accuracy = 1.0 if abs(float(match.group(1)) - float(truth)) < 1e-3 else 0.0
                except (AttributeError, ValueError):
                    accuracy = 0.0
                formatted = 1.0 if match else 0.0
                return {"overall": 0.9 * accuracy + 0.1 * formatted, "format": formatted, "accuracy": accuracy}
            """
        ),
    ),
    fault(
        "half_width_colon_scored",
        "Chinese",
        "full-width punctuation",
        "The prompt shows 答案：with a full-width colon; the pattern has a half-width one.",
        "kind: full-width punctuation in Chinese data (no single report)",
        lambda folder: make.chinese(),
        CHINESE,
        batch(
            r"""
            def score(response, truth):
                found = re.findall(r"答案:\s*(-?\d+)", response)
                accuracy = 1.0 if found and found[-1] == truth else 0.0
                return {"overall": accuracy, "format": 1.0 if found else 0.0, "accuracy": accuracy}
            """
        ),
    ),
    sound(
        "either_colon",
        "Chinese",
        "Chinese prompt",
        "Both colons, full-width digits and a measure word after the number are accepted.",
        "kind: full-width punctuation in Chinese data, handled",
        lambda folder: make.chinese(18, seed=64),
        CHINESE,
        batch(
            r"""
            import unicodedata


            def score(response, truth):
                found = re.findall(r"答案\s*:\s*(-?\d+)", unicodedata.normalize("NFKC", response))
                accuracy = 1.0 if found and found[-1] == truth else 0.0
                return {"overall": accuracy, "format": 1.0 if found else 0.0, "accuracy": accuracy}
            """
        ),
    ),
    sound(
        "edit_distance",
        "signs",
        "partial credit",
        "One minus the edit distance, 0 below 0.5: words much alike get a good part of the score.",
        "the kind of ANLS, as OCR data are scored",
        signs,
        ANSWER_ONLY,
        sequential(
            r"""
            def distance(a, b):
                row = list(range(len(b) + 1))
                for i, x in enumerate(a, 1):
                    last, row[0] = row[0], i
                    for j, y in enumerate(b, 1):
                        last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
                return row[-1]


            def score(response, truth):
                match = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
                given, truth = (match.group(1) if match else "").strip().lower(), truth.lower()
                near = 1 - distance(given, truth) / max(len(given), len(truth), 1)
                return {"overall": near if near >= 0.5 else 0.0, "accuracy": float(given == truth)}
            """
        ),
    ),
    sound(
        "any_of_several_truths",
        "signs",
        "answer as list, handled",
        "The truth is a list of accepted spellings; one of them is enough.",
        "https://github.com/allenai/open-instruct/pull/596",
        with_spellings,
        R1V,
        batch(
            r"""
            def score(response, truth):
                match = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
                accuracy = 1.0 if match and match.group(1).strip() in truth else 0.0
                formatted = 1.0 if match and response.lstrip().startswith("<think>") else 0.0
                return {"overall": accuracy + 0.2 * formatted, "format": formatted, "accuracy": accuracy}
            """
        ),
    ),
    sound(
        "words_of_a_caption",
        "captions",
        "truth is not an answer",
        "The truth is a JSON list of words; the score is the share of them in a free sentence; no tags are used.",
        "the kind of https://github.com/modelscope/ms-swift/issues/4950 (rewards for free text)",
        lambda folder: make.captions(folder),
        None,
        batch(
            r"""
            def score(response, truth):
                words = json.loads(truth)
                said = re.findall(r"[a-z]+", response.lower())
                share = sum(word in said for word in words) / len(words)
                long = 0.2 if len(said) > 40 else 0.0
                return {"overall": share - long, "coverage": share, "length_penalty": -long}
            """
        ),
    ),
]
