"""Scores of the example reward functions, and their prompts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
import pytest

from foveal.config.schema_reward import RewardConfig
from foveal.reward.runner import RewardRunner
from tests.reward_support import make_group

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / "reward_function" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one(response: str, truth: Any, length: int = 10) -> dict[str, Any]:
    return {"response": response, "response_length": length, "ground_truth": truth}


@pytest.mark.parametrize(
    ("response", "truth", "accuracy", "form"),
    [
        (r"<think>so</think> \boxed{42}", "42", 1, 1),
        (r"<think>so</think> \boxed{42}", 42, 1, 1),
        (r"<think>so</think> \boxed{41}", "42", 0, 1),
        (r"\boxed{42}", "42", 1, 0),
        (r"Well: <think>so</think> \boxed{42}", "42", 1, 0),
        (r"\boxed{42} <think>so</think>", "42", 1, 0),
        (r"< think >so< / think > \boxed{42}", "42", 1, 1),
        ("<think>a\nb</think>\nfirst \\boxed{1}, then \\boxed{\\frac{1}{2}}.\n", "0.5", 1, 1),
        (r"<think>so</think> \boxed{\frac{2}{4}}", r"\frac{1}{2}", 0, 1),
        (r"<think>so</think> \boxed{2\sqrt{3}}", r"\sqrt{12}", 1, 1),
        (r"<think>so</think> 42", "42", 0, 0),
        ("", "42", 0, 0),
    ],
)
def test_math(response: str, truth: Any, accuracy: float, form: float) -> None:
    (score,) = load("math").compute_score([one(response, truth)])
    assert score == pytest.approx({"overall": 0.9 * accuracy + 0.1 * form, "accuracy": accuracy, "format": form})


@pytest.mark.parametrize(
    ("response", "truth", "accuracy", "form"),
    [
        ("<think>so</think>\n<answer> 42 </answer>", "42", 1, 1),
        ("<think>so</think><answer>42</answer>", 42, 1, 1),
        ("<think>so</think><answer>41</answer>", "42", 0, 1),
        ("<think>so</think><answer>42</answer> done", "42", 1, 0),
        ("<answer>42</answer>", " 42 ", 1, 0),
        ("<answer>42</answer><answer>41</answer>", "42", 1, 0),
        ("42", "42", 1, 0),
        ("<think>so</think><answer>\n42\n</answer>", "42", 0, 1),
        ("", "42", 0, 0),
    ],
)
def test_r1v(response: str, truth: Any, accuracy: float, form: float) -> None:
    score = load("r1v").compute_score(one(response, truth))
    assert score == pytest.approx({"overall": 0.5 * accuracy + 0.5 * form, "accuracy": accuracy, "format": form})


def test_format_weight_is_an_argument() -> None:
    response = r"<think>so</think> <answer>\boxed{1}</answer>"
    assert load("math").compute_score([one(response, "2")], format_weight=0.3)[0]["overall"] == pytest.approx(0.3)
    assert load("r1v").compute_score(one(response, "2"), format_weight=0.3)["overall"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("response", "truth", "accuracy"),
    [
        ("Answer: 42", "42", 1),
        ("Answer: 42", 42, 1),
        ("so\nANSWER :  42\n", "42", 1),
        ("Answer: 41\nAnswer: 42", "42", 1),
        ("Answer: 42\nAnswer: 41", "42", -1),
        ("42", "42", -1),
        ("", "42", -1),
        ("Answer: 42" + " " * 290, "42", 1),
        ("Answer: 42" + " " * 291, "42", -1),
        ("Answer: x = 1,234 units", "1234", 1),
        (r"Answer: $\boxed{\frac12}$", r"\frac{1}{2}", 1),
        (r"Answer: 30^\circ", "30 degrees", 1),
        (r"Answer: it is $\sqrt3$ cm", r"\sqrt{3}", 1),
        (r"Answer: \text{north}", "north", 1),
    ],
)
def test_dapo_accuracy(response: str, truth: Any, accuracy: float) -> None:
    (score,) = load("dapo").compute_score([one(response, truth)], 100, 20, 1.0)
    assert score == {
        "overall": accuracy,
        "accuracy": accuracy,
        "overlong": 0.0,
        "accuracy_normalized": (accuracy + 1) / 2,
    }


@pytest.mark.parametrize(("length", "overlong"), [(1, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (101, -1)])
def test_dapo_overlong(length: int, overlong: float) -> None:
    (score,) = load("dapo").compute_score([one("Answer: 1", "1", length)], 100, 20, 0.5)
    assert score["overlong"] == pytest.approx(overlong)
    assert score["overall"] == pytest.approx(1 + 0.5 * overlong)


@pytest.mark.parametrize(
    ("response", "truth", "correct"),
    [("1", "1", 1), (" 1\n", 1, 1), ("It is 2, not 1", "2", 1), ("It is 2, not 1", "1", 0), ("93 then 0", "0", 1),
     ("left", "0", 0), ("", "", 0)],
)  # fmt: skip
def test_android_gui(response: str, truth: Any, correct: float) -> None:
    assert load("android_gui").compute_score([one(response, truth)]) == [{"overall": correct, "accuracy": correct}]


@pytest.mark.parametrize(
    ("name", "kwargs", "response", "expected"),
    [
        ("math", {}, r"<think>.</think> \boxed{1}", 1.0),
        ("r1v", {}, "<think>.</think><answer>1</answer>", 1.0),
        (
            "dapo",
            {"max_response_length": 100, "overlong_buffer_length": 10, "overlong_penalty_factor": 1.0},
            "Answer: 1",
            1.0,
        ),
        ("android_gui", {}, "1", 1.0),
    ],
)
def test_examples_run_in_reward_processes(name: str, kwargs: dict[str, Any], response: str, expected: float) -> None:
    path = EXAMPLES / "reward_function" / f"{name}.py"
    config = RewardConfig(reward_function=f"{path}:compute_score", reward_function_kwargs=kwargs)
    with RewardRunner(config, "val") as runner:
        runner.submit(group := make_group("1", response))
        runner.finish()
    assert group.responses[0].rewards["overall"] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["math", "r1v", "dapo", "android_gui"])
def test_prompt_holds_the_content_once(name: str) -> None:
    source = (EXAMPLES / "format_prompt" / f"{name}.jinja").read_text()
    text = jinja2.Template(source, undefined=jinja2.StrictUndefined).render(content=" <image>How many? ")
    assert text.count("<image>How many?") == 1


def test_prompts_name_the_form_that_is_scored() -> None:
    said = {name: (EXAMPLES / "format_prompt" / f"{name}.jinja").read_text() for name in ["math", "r1v", "dapo"]}
    assert r"\boxed{}" in said["math"] and "</think>" in said["math"]
    assert "</answer>" in said["r1v"] and "</think>" in said["r1v"]
    assert "Answer:" in said["dapo"]
