"""Seconds of a step that scoring costs beyond generation: 2,560 mathematical answers, graded by math-verify.

Usage: python -m benchmarks.reward_speed [--seconds 20] [--processes 2] [--function FILE:NAME] [--out FILE]

512 groups of 5 answers come in over so many seconds as an engine hands them over that samples all of them at a time:
each when the longest of its answers is there, the cut ones at the very end. They are scored in so many reward
processes, and everything runs on two processors, however many there are.

Counted is what the step waits for: the calls of `submit`, which hold up the engine, and `finish` after the last answer.
Beside that stand the processor time that the run's own process took for scoring, its threads included, which an engine
in the same process may feel, and the work itself, in one process and without generation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from foveal.config.schema_reward import RewardConfig
from foveal.reward.runner import RewardRunner
from foveal.types import Group, Prompt, Response

REWARD_TYPE = "sequential"
GROUPS, ANSWERS = 512, 5
LIMIT = 1024
"""Tokens of an answer at most; at the end of generation."""
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
            length = min(LIMIT, round(300 * chance.lognormvariate(0, 0.6)))  # 2 % are cut
            responses.append(Response(np.zeros(length, np.int64), np.zeros(length, np.float32), "stop", text=text))
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


@dataclass
class Spent:
    """Seconds of a round.

    Attributes:
        generation: from the first to the last answer. submit: of that, in calls of `submit`.
        finish: after the last answer. own_cpu: processor time of the run's process, reward processes not included.
    """

    generation: float
    submit: float
    finish: float
    own_cpu: float
    mean: float


def score(groups: list[Group], config: RewardConfig, seconds: float) -> Spent:
    """Scores `groups`, of which each comes when its longest answer does, one of `LIMIT` tokens after `seconds`."""
    arrivals = {id(group): seconds * max(len(one.token_ids) for one in group.responses) / LIMIT for group in groups}
    submit = 0.0
    with RewardRunner(config, "train") as runner:
        runner.submit(make_groups()[0])  # imports of the function's libraries are no part of a step
        runner.finish()
        begin, cpu = time.perf_counter(), time.process_time()
        for group in sorted(groups, key=lambda group: arrivals[id(group)]):
            time.sleep(max(0.0, begin + arrivals[id(group)] - time.perf_counter()))
            before = time.perf_counter()
            runner.submit(group)
            submit += time.perf_counter() - before
        generated = time.perf_counter()
        metrics = runner.finish(groups)
        finished, cpu = time.perf_counter(), time.process_time() - cpu
    if metrics["reward/errors"] or metrics["reward/timeouts"]:
        raise SystemExit(f"not all answers were scored: {metrics}")
    mean = sum(response.rewards["overall"] for group in groups for response in group.responses) / (GROUPS * ANSWERS)
    return Spent(generated - begin, submit, finished - generated, cpu, mean)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--function", default=f"{__file__}:grade")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "reward_speed.json")
    options = parser.parse_args()
    processors = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, processors)
    load = os.getloadavg()[0]
    groups = make_groups()
    alone = score(groups, RewardConfig(reward_function=options.function, num_cpus=1), 0.0)
    config = RewardConfig(reward_function=options.function, num_cpus=options.processes)
    spent = score(groups, config, options.seconds)
    result = {
        "answers": GROUPS * ANSWERS,
        "function": options.function.removeprefix(f"{Path(__file__).parents[1]}/"),
        "math_verify": version("math-verify"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processors": len(processors),
        "load_before": load,
        "reward_processes": options.processes,
        "one_process_without_generation_seconds": alone.submit + alone.finish,
        "generation_seconds": spent.generation,
        "submit_seconds": spent.submit,
        "finish_seconds": spent.finish,
        "critical_path_seconds": spent.submit + spent.finish,
        "own_cpu_seconds": spent.own_cpu,
        "mean_reward": spent.mean,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"{GROUPS * ANSWERS} answers cost {spent.submit + spent.finish:.2f} s of a step ({spent.submit:.2f} s while "
        f"others are generated, {spent.finish:.2f} s after the last) on {len(processors)} processors with "
        f"{options.processes} reward processes; the work itself takes {alone.submit + alone.finish:.2f} s in one"
    )


if __name__ == "__main__":
    main()
