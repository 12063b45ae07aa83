"""Seconds of a step that scoring takes beyond generation: 2,560 mathematical answers, graded by math-verify.

Usage: python -m benchmarks.reward_speed [GENERATION_SECONDS] [PROCESSES] [FUNCTION]

512 groups of 5 answers finish evenly over GENERATION_SECONDS (20), as an engine hands them over, and are scored by
FUNCTION (benchmarks/reward_speed.py:grade) in PROCESSES (2) reward processes. Printed: the work itself, in one process
and without pauses, then what is left of it when the last answer is there.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import numpy as np

from foveal.config.schema_reward import RewardConfig
from foveal.reward.runner import RewardRunner
from foveal.types import Group, Prompt, Response

REWARD_TYPE = "sequential"
GROUPS, ANSWERS = 512, 5
THOUGHT = "We look at the triangle: the angle at $B$ is $90^\\circ$, so $AC^2 = AB^2 + BC^2$. "


def grade(one: dict[str, Any]) -> dict[str, float]:
    """Accuracy by math-verify; what is measured here."""
    from math_verify import parse, verify

    right = float(verify(parse(f"\\boxed{{{one['ground_truth']}}}"), parse(one["response"])))
    return {"overall": right, "accuracy": right}


def make_groups(seed: int = 0) -> list[Group]:
    """Groups with answers of about 300 words; numbers, fractions, roots, sets, intervals and equations."""
    chance = random.Random(seed)
    groups = []
    for number in range(GROUPS):
        truth, others = _truth(chance)
        prompt = Prompt(f"train-0-{number}", [1] * 400, [], [], {"problem": "Find x. " * 20}, number, truth)
        responses = []
        for _ in range(ANSWERS):
            answer = chance.choice([truth, *others])
            text = f"<think>{THOUGHT * 15}</think> The answer is \\boxed{{{answer}}}."
            responses.append(Response(np.zeros(500, np.int64), np.zeros(500, np.float32), "stop", text=text))
        groups.append(Group(prompt, responses))
    return groups


def _truth(chance: random.Random) -> tuple[str, list[str]]:
    """A ground truth and other ways to write it, or wrong answers."""
    a, b = chance.randint(2, 99), chance.randint(2, 99)
    return chance.choice(
        [
            (f"{a}", [f"{a}.0", f"{b}", f"x = {a}"]),
            (f"\\frac{{{a}}}{{{b}}}", [f"\\frac{{{2 * a}}}{{{2 * b}}}", f"{a}/{b}", f"{a / b:.2f}"]),
            (f"{a}\\sqrt{{{b}}}", [f"\\sqrt{{{a * a * b}}}", f"\\sqrt{{{b}}}"]),
            (f"\\{{{a}, {b}\\}}", [f"\\{{{b}, {a}\\}}", f"{a}, {b}"]),
            (f"[{a}, {a + b})", [f"[{a}, {a + b}]", f"{a} \\le x < {a + b}"]),
            (f"x^2 + {a}x + {b}", [f"{b} + {a}x + x^2", f"x(x + {a}) + {b}"]),
        ]
    )


def score(groups: list[Group], config: RewardConfig, seconds: float) -> tuple[float, float]:
    """Scores `groups` as they finish over `seconds`: (seconds from first to last answer, seconds after that)."""
    with RewardRunner(config, "train") as runner:
        runner.submit(make_groups()[0])  # imports of the function's libraries are no part of a step
        runner.finish()
        begin = time.perf_counter()
        for number, group in enumerate(groups):
            time.sleep(max(0.0, begin + seconds * number / len(groups) - time.perf_counter()))
            runner.submit(group)
        generated = time.perf_counter()
        metrics = runner.finish(groups)
        finished = time.perf_counter()
    mean = sum(response.rewards["overall"] for group in groups for response in group.responses) / (GROUPS * ANSWERS)
    print(f"  mean {mean:.3f}, {metrics['reward/errors']:g} errors, {metrics['reward/timeouts']:g} time-outs")
    return generated - begin, finished - generated


def main() -> None:
    seconds, processes, function = [*sys.argv[1:], *["20", "2", f"{__file__}:grade"][len(sys.argv) - 1 :]]
    groups = make_groups()
    print(f"{GROUPS * ANSWERS} answers, {function}")
    alone = sum(score(groups, RewardConfig(reward_function=function, num_cpus=1), 0.0))
    print(f"all at once, 1 process: {alone:.2f} s")
    config = RewardConfig(reward_function=function, num_cpus=int(processes))
    generation, rest = score(groups, config, float(seconds))
    print(f"over {generation:.1f} s of generation, {processes} processes: {rest:.2f} s of the step")


if __name__ == "__main__":
    main()
