"""Mathematics in text: 14 misconfigurations, 6 sound set-ups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.misconfigurations import rows as make
from tests.misconfigurations.base import ANSWER_ONLY, BOXED, R1V, Case, Row, batch, example, sequential, whole

LINES = """{{ content | trim }}

Write your reasoning between <think> and </think>, each step on a line of its own. Then write the final answer between
<answer> and </answer>."""
LONG = """{{ content | trim }}

First explain in at least 120 words how you proceed, between <think> and </think>. Then give the final answer between
<answer> and </answer>."""
LAST_LINE = """Solve the problem step by step. The last line must be "Answer: X", where X is the final number.

{{ content | trim }}"""
DECIMAL = """{{ content | trim }}

Give the result as a decimal number, for example <answer>0.25</answer>. Reason before that if you like."""
RULES = (
    "You are a terse calculator. Reply with the bare result only: no explanation, no reasoning, no tags of any kind."
)

TAGGED = r"""
FORMAT = re.compile(r"\s*<think>.*?</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)


def score(response, truth):
    match = FORMAT.fullmatch(response)
    if match is None:
        return {"overall": 0.0, "format": 0.0, "accuracy": 0.0}
    accuracy = 1.0 if match.group(1).strip() == str(truth).strip() else 0.0
    return {"overall": 0.1 + 0.9 * accuracy, "format": 1.0, "accuracy": accuracy}
"""
SIMPLE_BOXED = r"""
def score(response, truth):
    found = re.findall(r"\\boxed\{([^{}]*)\}", response)
    accuracy = 1.0 if found and found[-1].strip() == truth.strip() else 0.0
    formatted = 1.0 if found else 0.0
    return {"overall": 0.9 * accuracy + 0.1 * formatted, "format": formatted, "accuracy": accuracy}
"""
NUMBER = r"""
def score(response, truth):
    try:
        given = float(re.search(r"<answer>(.*?)</answer>", response, re.DOTALL).group(1))
        accuracy = float(abs(given - float(truth)) < 1e-6)
    except Exception:
        accuracy = 0.0
    return {"overall": accuracy, "accuracy": accuracy}
"""


def arithmetic(folder: Path) -> list[Row]:
    return make.arithmetic()


def boxed_truths(folder: Path) -> list[Row]:
    return [{**row, "answer": f"\\boxed{{{row['answer']}}}"} for row in make.arithmetic(18, seed=21)]


def listed_truths(folder: Path) -> list[Row]:
    return [{**row, "answer": [row["answer"]]} for row in make.arithmetic(16, seed=22)]


def with_rules(folder: Path) -> list[Row]:
    rows = make.arithmetic(14, seed=23)
    for row in rows:
        row["problem"] = [{"role": "system", "content": RULES}, {"role": "user", "content": row["problem"]}]
    return rows


def with_instruction(folder: Path) -> list[Row]:
    text = " Please reason step by step, and put your final answer within \\boxed{}."
    return [{**row, "problem": row["problem"] + text} for row in make.arithmetic(24, seed=24)]


def thousands(folder: Path) -> list[Row]:
    return [{**row, "answer": f"{int(row['answer']):,}"} for row in make.amounts()]


def with_tolerance(folder: Path) -> list[Row]:
    rows = make.amounts(15, seed=25)
    for i, row in enumerate(rows):
        row["problem"] = row["problem"].replace("How many", "About how many")
        row["tolerance"] = [0.0, 0.01, 0.05][i % 3]
    return rows


def fault(
    name: str, kind: str, note: str, report: str, *, rows: Any, prompt: str | None, reward: str, **more: Any
) -> Case:
    return Case(name, "text maths", kind, False, note, report, rows, prompt, reward, **more)


def sound(
    name: str, kind: str, note: str, report: str, *, rows: Any, prompt: str | None, reward: str, **more: Any
) -> Case:
    return Case(name, "text maths", kind, True, note, report, rows, prompt, reward, **more)


CASES = [
    fault(
        "answer_tag_asked_boxed_scored",
        "wrong tag",
        "The prompt asks for <answer>; EasyR1's maths reward looks for \\boxed{} only.",
        "https://github.com/hiyouga/EasyR1/issues/232",
        rows=arithmetic,
        prompt=R1V,
        reward=example("math.py"),
    ),
    fault(
        "no_prompt_for_tags",
        "no format prompt",
        "No format prompt is set, the questions name no tags, and without tags the score is 0.",
        "https://github.com/modelscope/ms-swift/issues/3130 (without the system prompt)",
        rows=arithmetic,
        prompt=None,
        reward=batch(TAGGED),
    ),
    fault(
        "pattern_without_dotall",
        "regular expression without DOTALL",
        "The prompt asks for steps on lines of their own; `.` does not match line ends, so the format never fits.",
        "https://github.com/huggingface/open-r1/issues/237",
        rows=arithmetic,
        prompt=LINES,
        reward=sequential(TAGGED.replace(", re.DOTALL", "")),
    ),
    fault(
        "match_instead_of_search",
        "re.match instead of re.search",
        "re.match wants the answer tag at the very start, but the reasoning comes first.",
        "https://github.com/StarsfieldAI/R1-V/issues/19",
        rows=arithmetic,
        prompt=R1V,
        reward=batch(
            r"""
            def score(response, truth):
                match = re.match(r"<answer>(.*?)</answer>", response, re.DOTALL)
                accuracy = 1.0 if match and match.group(1).strip() == truth else 0.0
                form = 1.0 if "<think>" in response and "</think>" in response else 0.0
                return {"overall": 0.9 * accuracy + 0.1 * form, "format": form, "accuracy": accuracy}
            """
        ),
    ),
    fault(
        "worked_solution_as_truth",
        "wrong answer column",
        "answer_key names the worked solution, which no boxed final answer equals.",
        "https://github.com/hiyouga/EasyR1/issues/51 (own data), the kind of GSM8K's `answer` column",
        rows=arithmetic,
        prompt=BOXED,
        reward=batch(SIMPLE_BOXED),
        keys={"data.answer_key": "solution"},
    ),
    fault(
        "truth_is_boxed",
        "ground truth carries its own tag",
        "The column holds \\boxed{42}; what stands inside the answer's box is compared with that.",
        "the kind of https://github.com/verl-project/verl-omni/issues/643",
        rows=boxed_truths,
        prompt=BOXED,
        reward=batch(SIMPLE_BOXED),
    ),
    fault(
        "truth_is_list",
        "answer as list",
        "The column holds a list of one text; text == list is never true.",
        "https://github.com/allenai/open-instruct/pull/596",
        rows=listed_truths,
        prompt=ANSWER_ONLY,
        reward=batch(
            r"""
            def score(response, truth):
                match = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
                given = match.group(1).strip() if match else ""
                accuracy = 1.0 if given == truth else 0.0
                return {"overall": accuracy, "format": float(match is not None), "accuracy": accuracy}
            """
        ),
    ),
    fault(
        "latex_truth_decimal_asked",
        "LaTeX against plain numbers",
        "The truth is \\frac{3}{4}; float() of it raises, which counts as wrong.",
        "https://github.com/huggingface/Math-Verify/issues/2",
        rows=lambda folder: make.fractions(),
        prompt=DECIMAL,
        reward=batch(NUMBER),
    ),
    fault(
        "truth_with_thousands_commas",
        "number format",
        "Truths from 1,000 on have a comma, which is removed from the answer only; smaller ones can be reached.",
        "the kind of GSM8K's answers with commas",
        rows=thousands,
        prompt=LAST_LINE,
        reward=batch(
            r"""
            def score(response, truth):
                found = re.findall(r"Answer:\s*\$?([\d,.]+)", response)
                given = found[-1].replace(",", "").rstrip(".") if found else None
                accuracy = float(given == truth)
                return {"overall": accuracy, "format": float(bool(found)), "accuracy": accuracy}
            """
        ),
    ),
    fault(
        "missing_key_swallowed",
        "absent key, exception swallowed",
        "Ported from verl: reads reward_model.ground_truth, which is not there; the KeyError becomes 0.",
        "https://github.com/hiyouga/EasyR1/issues/448",
        rows=arithmetic,
        prompt=BOXED,
        reward=whole(
            r"""
            def score(one):
                try:
                    truth = one["reward_model"]["ground_truth"]
                    found = re.findall(r"\\boxed\{(.*?)\}", one["response"])
                    return float(found[-1].strip() == str(truth))
                except Exception:
                    return 0.0


            def compute_score(reward_inputs, **kwargs):
                accuracies = [score(one) for one in reward_inputs]
                return [{"overall": a, "format": 0.0, "accuracy": a} for a in accuracies]
            """
        ),
    ),
    fault(
        "unparsed_truth_counts_as_right",
        "constant reward",
        "The truth has no dollar signs, so it's never parsed, and an unparsed truth gives 1 for any answer.",
        "https://github.com/huggingface/cookbook/issues/335",
        rows=arithmetic,
        prompt=BOXED,
        reward=batch(
            r"""
            def parse(text):
                return re.findall(r"\$([^$]+)\$", text)


            def score(response, truth):
                gold = parse(truth)
                if len(gold) != 0:
                    reward = float(gold[0] in parse(response))
                else:
                    reward = 1.0
                return {"overall": reward, "accuracy": reward}
            """
        ),
    ),
    fault(
        "response_limit_below_format",
        "response limit too short",
        "Prompt and reward want 100 words of reasoning before the answer; 64 tokens are allowed.",
        "https://github.com/huggingface/trl/issues/5697",
        rows=arithmetic,
        prompt=LONG,
        reward=batch(
            r"""
            FORMAT = re.compile(r"<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)


            def score(response, truth):
                match = FORMAT.fullmatch(response)
                if not match or len(match.group(1).split()) < 100:
                    return {"overall": 0.0, "format": 0.0, "accuracy": 0.0}
                accuracy = float(match.group(2).strip() == truth)
                return {"overall": 0.2 + 0.8 * accuracy, "format": 1.0, "accuracy": accuracy}
            """
        ),
        keys={"data.max_response_length": 64},
    ),
    fault(
        "system_message_forbids_tags",
        "system message contradicts the format",
        "Each row's system message forbids reasoning and tags, which the format prompt asks for and the reward needs.",
        "the kind of https://github.com/modelscope/ms-swift/issues/3130 (effect of the system prompt on the format)",
        rows=with_rules,
        prompt=R1V,
        reward=batch(TAGGED),
    ),
    fault(
        "slow_reward",
        "slow",
        "Right, but each answer waits 0.4 s: 17 minutes for a step of 512 × 5.",
        "https://github.com/hiyouga/EasyR1/issues/575",
        rows=arithmetic,
        prompt=R1V,
        reward=batch(TAGGED.replace("    match =", "    time.sleep(0.4)  # stay below the rate limit\n    match =")),
    ),
    sound(
        "easyr1_math",
        "EasyR1's own",
        "EasyR1's maths prompt and reward with a numeric column.",
        "https://github.com/hiyouga/EasyR1",
        rows=arithmetic,
        prompt=example("math.jinja", "format_prompt"),
        reward=example("math.py"),
    ),
    sound(
        "instruction_in_question",
        "no format prompt",
        "No format prompt, as each question itself asks for \\boxed{}.",
        "the kind of https://github.com/dhcode-cpp/X-R1/issues/24",
        rows=with_instruction,
        prompt=None,
        reward=batch(SIMPLE_BOXED),
    ),
    sound(
        "signed_rewards_last_line",
        "negative rewards",
        "DAPO's style: +1 right, -1 wrong, from the last `Answer:` line; the mean may stay below 0 for long.",
        "https://github.com/Unakar/Logic-RL/issues/71",
        rows=lambda folder: make.amounts(),
        prompt=LAST_LINE,
        reward=batch(
            r"""
            def score(response, truth):
                found = re.findall(r"(?i)answer\s*:\s*([^\n]+)", response[-300:])
                given = found[-1].strip().rstrip(".").replace(",", "").lstrip("$") if found else "[INVALID]"
                return {"overall": 1.0 if given == truth else -1.0, "accuracy": float(given == truth)}
            """
        ),
    ),
    sound(
        "fractions_read_from_latex",
        "LaTeX against plain numbers, handled",
        "The truth is LaTeX, the answers decimals, and the reward turns both into numbers.",
        "https://github.com/huggingface/Math-Verify/issues/2",
        rows=lambda folder: make.fractions(20, seed=26),
        prompt=DECIMAL,
        reward=batch(
            r"""
            def number(text):
                text = re.sub(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}", r"\1/\2", text.strip().strip("$"))
                above, _, below = text.partition("/")
                try:
                    return float(above) / float(below or 1)
                except (ValueError, ZeroDivisionError):
                    return None


            def score(response, truth):
                found = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
                given = number(found[-1]) if found else None
                accuracy = float(given is not None and abs(given - number(truth)) < 1e-3)
                formatted = float(bool(found))
                return {"overall": 0.95 * accuracy + 0.05 * formatted, "format": formatted, "accuracy": accuracy}
            """
        ),
    ),
    sound(
        "tolerance_column",
        "reward reads another column",
        "Each row has its own tolerance, 0 in some; near answers count in the others.",
        "https://github.com/hiyouga/EasyR1/issues/448",
        rows=with_tolerance,
        prompt=ANSWER_ONLY,
        reward=whole(
            r"""
            def score(one):
                row = one.get("row", one)
                match = re.search(r"<answer>(.*?)</answer>", one["response"], re.DOTALL)
                try:
                    given = float(match.group(1).replace(",", "")) if match else None
                except ValueError:
                    given = None
                truth = float(one["ground_truth"])
                right = given is not None and abs(given - truth) <= row.get("tolerance", 0.0) * truth
                return {"overall": float(right), "format": float(match is not None), "accuracy": float(right)}


            def compute_score(reward_inputs):
                return [score(one) for one in reward_inputs]
            """
        ),
    ),
    sound(
        "soft_length_penalty",
        "penalty for length",
        "Up to 0.3 are taken off between 1,024 and 2,048 tokens; a right long answer stays above a wrong short one.",
        "DAPO's soft overlong punishment, https://github.com/huggingface/trl/pull/3248",
        rows=arithmetic,
        prompt=R1V,
        reward=batch(
            r"""
            def score(response, truth, length, limit=2048, buffer=1024):
                match = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
                accuracy = float(match is not None and match.group(1).strip() == truth)
                over = min(max(length - (limit - buffer), 0) / buffer, 1.0)
                return {"overall": accuracy - 0.3 * over, "accuracy": accuracy, "overlong": -over}
            """,
            "one['response'], one['ground_truth'], one['response_length']",
        ),
    ),
]
