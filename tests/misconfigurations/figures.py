"""Geometry, charts and counting: 10 misconfigurations, 4 sound set-ups."""

from __future__ import annotations

from pathlib import Path

from tests.misconfigurations import rows as make
from tests.misconfigurations.base import ANSWER_ONLY, BOXED, R1V, Case, Row, batch, example, sequential, whole

COUNT = "{{ content | trim }}\n\nThink step by step, then give the number as <answer>N</answer>."
TWO_DECIMALS = "{{ content | trim }}\n\nRound to two decimals and write the result as \\boxed{1.23}."
BARE_PERCENTAGE = "{{ content | trim }}\n\nEnd with <answer>NUMBER</answer>, without the percent sign."

EQUAL = r"""
def score(response, truth):
    match = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
    given = match.group(1).strip() if match else ""
    accuracy = 1.0 if given == truth else 0.0
    formatted = 1.0 if match else 0.0
    return {"overall": 0.9 * accuracy + 0.1 * formatted, "format": formatted, "accuracy": accuracy}
"""


def geometry(folder: Path) -> list[Row]:
    return make.geometry(folder)


def counting(folder: Path) -> list[Row]:
    return make.counting(folder)


def tagged_counts(folder: Path) -> list[Row]:
    return [{**row, "answer": f"<answer> {row['answer']} </answer>"} for row in make.counting(folder, 16, seed=31)]


def whole_counts(folder: Path) -> list[Row]:
    return [{**row, "answer": int(row["answer"])} for row in make.counting(folder, 24, seed=32)]


def percentages(folder: Path) -> list[Row]:
    return [{**row, "answer": row["answer"] + "\\%"} for row in make.charts(folder)]


def other_image_column(folder: Path) -> list[Row]:
    rows = make.charts(folder, 14, seed=33)
    for row in rows:
        row["image"] = row.pop("images")[0]
    return rows


def fault(name: str, task: str, kind: str, note: str, report: str, rows, prompt, reward, **more) -> Case:
    return Case(name, task, kind, False, note, report, rows, prompt, reward, **more)


def sound(name: str, task: str, kind: str, note: str, report: str, rows, prompt, reward, **more) -> Case:
    return Case(name, task, kind, True, note, report, rows, prompt, reward, **more)


CASES = [
    fault(
        "boxed_asked_answer_tag_scored",
        "geometry",
        "wrong tag",
        "The prompt asks for \\boxed{}; the reward reads <answer> only.",
        "https://github.com/huggingface/trl/issues/3903",
        geometry,
        BOXED,
        batch(EQUAL),
    ),
    fault(
        "format_outweighs_accuracy",
        "geometry",
        "weight of the format",
        "format_weight=0.95: a wrong answer in tags gets 0.95, a right one without them 0.05.",
        "https://github.com/Liuziyu77/Visual-RFT/issues/79 (rewards worth hacking)",
        geometry,
        example("r1v.jinja", "format_prompt"),
        example("r1v.py"),
        keys={"worker.reward.reward_function_kwargs": {"format_weight": 0.95}},
    ),
    fault(
        "rounded_against_full_precision",
        "geometry",
        "strict equality of floats",
        "The answer is rounded to two decimals, the truth has fifteen, and they must be equal.",
        "https://github.com/huggingface/Math-Verify/issues/2",
        lambda folder: make.hypotenuses(folder),
        TWO_DECIMALS,
        batch(
            r"""
            def score(response, truth):
                match = re.search(r"\\boxed\{\s*(-?\d+(?:\.\d+)?)\s*\}", response)
                accuracy = float(match is not None and round(float(match.group(1)), 2) == truth)
                formatted = float(match is not None)
                return {"overall": 0.9 * accuracy + 0.1 * formatted, "format": formatted, "accuracy": accuracy}
            """
        ),
    ),
    fault(
        "truth_is_tagged",
        "counting",
        "ground truth carries its own tag",
        "The column holds `<answer> 7 </answer>` as R1-V's does; the reward does not unwrap it.",
        "https://github.com/verl-project/verl-omni/issues/643",
        tagged_counts,
        R1V,
        batch(EQUAL),
    ),
    fault(
        "text_against_number",
        "counting",
        "types",
        "The column holds integers; the text taken from the answer never equals one.",
        "https://github.com/THUDM/slime/pull/336",
        whole_counts,
        COUNT,
        sequential(EQUAL),
    ),
    fault(
        "percent_sign_in_truth",
        "charts",
        "percent sign",
        "The truth is `45\\%`; the reward compares the digits of the answer with it.",
        "https://github.com/huggingface/Math-Verify/issues/67",
        percentages,
        BARE_PERCENTAGE,
        batch(
            r"""
            def score(response, truth):
                match = re.search(r"<answer>\s*(\d+(?:\.\d+)?)\s*\\?%?\s*</answer>", response)
                accuracy = 1.0 if match and match.group(1) == truth else 0.0
                return {"overall": accuracy, "format": 1.0 if match else 0.0, "accuracy": accuracy}
            """
        ),
    ),
    fault(
        "any_number_scores",
        "counting",
        "ground truth ignored",
        "Any whole number in the tags gets full marks; the truth is taken and never used.",
        "https://github.com/modelscope/ms-swift/issues/3130",
        counting,
        COUNT,
        batch(
            r"""
            def score(response, truth):
                match = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
                given = match.group(1).strip() if match else None
                accuracy = 1.0 if given is not None and given.isdigit() else 0.0
                return {"overall": accuracy, "format": 1.0 if match else 0.0, "accuracy": accuracy}
            """
        ),
    ),
    fault(
        "distance_instead_of_closeness",
        "counting",
        "sign",
        "The distance from the truth is given as the reward: the more wrong, the better.",
        "https://github.com/StarsfieldAI/R1-V/issues/7 (soft counting rewards)",
        counting,
        COUNT,
        sequential(
            r"""
            def score(response, truth):
                match = re.search(r"<answer>\s*(-?\d+)\s*</answer>", response)
                if match is None:
                    return {"overall": 0.0, "format": 0.0, "accuracy": 0.0}
                error = abs(int(match.group(1)) - int(truth)) / max(int(truth), 1)
                return {"overall": min(error, 1.0), "format": 1.0, "accuracy": min(error, 1.0)}
            """
        ),
    ),
    fault(
        "nan_without_number",
        "charts",
        "NaN",
        "An answer without a number becomes NaN and stays it through the whole score.",
        "https://github.com/modelscope/ms-swift/issues/8123",
        lambda folder: make.charts(folder, 18, seed=34),
        BARE_PERCENTAGE,
        batch(
            r"""
            def number(text):
                match = re.search(r"<answer>\s*(\d+(?:\.\d+)?)\s*%?\s*</answer>", text)
                return float(match.group(1)) if match else float("nan")


            def score(response, truth):
                accuracy = math.exp(-abs(number(response) - float(truth)) / 5)
                return {"overall": accuracy, "accuracy": accuracy}
            """
        ),
    ),
    fault(
        "image_key_misses_column",
        "charts",
        "image column",
        "The pictures are in the column `image`; image_key says `images`, though each question holds <image>.",
        "https://github.com/StarsfieldAI/R1-V/issues/19 (a comment: the pictures never reached the model)",
        other_image_column,
        ANSWER_ONLY,
        batch(EQUAL),
    ),
    sound(
        "r1v_geometry",
        "geometry",
        "EasyR1's own, sequential",
        "R1-V's prompt and reward, format and accuracy half each.",
        "https://github.com/hiyouga/EasyR1",
        geometry,
        example("r1v.jinja", "format_prompt"),
        example("r1v.py"),
    ),
    sound(
        "partial_credit_plain_numbers",
        "counting",
        "partial credit; plain numbers returned",
        "Near counts get part of the score, and the function returns a float instead of a dict.",
        "https://github.com/StarsfieldAI/R1-V/issues/7",
        whole_counts,
        COUNT,
        whole(
            r"""
            def compute_score(reward_input):
                found = re.findall(r"<answer>\s*(\d+)\s*</answer>", reward_input["response"])
                if not found:
                    return 0.0
                truth = int(reward_input["ground_truth"])
                return max(0.0, 1.0 - abs(int(found[-1]) - truth) / max(truth, 1))
            """,
            "sequential",
        ),
    ),
    sound(
        "accuracy_alone",
        "charts",
        "no format part",
        "Only `overall`, from the answer tag; nothing is paid for the form.",
        "https://github.com/kxfan2002/SophiaVL-R1/issues/8",
        lambda folder: make.charts(folder, 20, seed=35),
        BARE_PERCENTAGE,
        batch(
            r"""
            def score(response, truth):
                match = re.search(r"<answer>\s*(\d+(?:\.\d+)?)\s*%?\s*</answer>", response)
                return {"overall": 1.0 if match and abs(float(match.group(1)) - float(truth)) < 0.5 else 0.0}
            """
        ),
    ),
    sound(
        "rounding_with_tolerance",
        "geometry",
        "full precision, handled",
        "The truths have fifteen digits; two decimals are asked and 0.01 is tolerated; a wrong form costs 0.5.",
        "https://github.com/huggingface/Math-Verify/issues/2",
        lambda folder: make.hypotenuses(folder, 13, seed=36),
        TWO_DECIMALS,
        batch(
            r"""
            def score(response, truth):
                match = re.search(r"\\boxed\{\s*(-?\d+(?:\.\d+)?)\s*\}", response)
                if match is None:
                    return {"overall": -0.5, "format": -0.5, "accuracy": 0.0}
                accuracy = float(math.isclose(float(match.group(1)), truth, abs_tol=0.01))
                return {"overall": accuracy, "format": 0.0, "accuracy": accuracy}
            """
        ),
    ),
]
