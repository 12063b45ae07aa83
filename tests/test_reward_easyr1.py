"""Functions written for EasyR1 give the numbers that they give when called directly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from foveal.config.schema_reward import RewardConfig
from foveal.errors import RewardError
from foveal.reward.runner import RewardRunner
from tests.reward_support import make_group, make_runner, overall, score
from tests.test_reward_examples import EXAMPLES, load

DAPO = {"max_response_length": 60, "overlong_buffer_length": 30, "overlong_penalty_factor": 0.5}
FORMS = [
    "<think>so</think> \\boxed{{{}}}",
    "<think>so</think><answer>{}</answer>",
    "Well.\nAnswer: {}",
    "{}",
    "It is {} or so, I would say, having thought about it for quite some time.",
]


@pytest.mark.parametrize(
    ("name", "kwargs", "processes"),
    [
        ("math", {"format_weight": 0.3}, 1),
        ("r1v", {"format_weight": 0.2}, 2),
        ("dapo", DAPO, 1),
        ("android_gui", {}, 1),
    ],
)
def test_examples_give_the_same_numbers_as_when_called(name: str, kwargs: dict[str, Any], processes: int) -> None:
    module, chance = load(name), random.Random(0)
    groups = [
        make_group(truth, *(chance.choice(FORMS).format(chance.choice([truth, "7", "\\frac{1}{2}"])) for _ in range(5)))
        for truth in ("0", "1", "2", "0.5", 7, "\\sqrt{2}")
    ]
    config = RewardConfig(
        reward_function=f"{EXAMPLES}/reward_function/{name}.py:compute_score",
        reward_function_kwargs=kwargs,
        num_cpus=processes,
    )
    score(RewardRunner(config, "train"), *groups)
    inputs = [
        {"response": r.text, "response_length": len(r.token_ids), "ground_truth": group.prompt.answer}
        for group in groups
        for r in group.responses
    ]
    if module.REWARD_TYPE == "batch":
        expected = module.compute_score(inputs, **kwargs)
    else:
        expected = [module.compute_score(one, **kwargs) for one in inputs]
    assert [response.rewards for group in groups for response in group.responses] == expected
    assert len({one["overall"] for one in expected}) > 1


ONE = "def compute_score({}):\n    return {{'overall': float(predict_str == ground_truth) * weight}}"
MANY = (
    "def compute_score({}):\n    return [float(a == b) * weight for a, b in zip(predicts, ground_truths, strict=True)]"
)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (ONE.format("predict_str: str, ground_truth: str, weight=1.0"), "function"),
        (f"async {ONE.format('predict_str, ground_truth, weight=1.0')}", "sequential"),
        (MANY.format("predicts, ground_truths, weight=1.0"), "batch"),
        (f"REWARD_TYPE = 'batch'\n{MANY.format('predicts, ground_truths, weight=1.0')}", None),
    ],
)
def test_functions_of_responses_and_truths_are_called_as_they_were(
    tmp_path: Path, source: str, kind: str | None
) -> None:
    groups = [make_group("a", "a", "b"), make_group("b", "b", "b")]
    score(make_runner(tmp_path, source, reward_type=kind, reward_function_kwargs={"weight": 0.5}), *groups)
    assert [overall(group) for group in groups] == [[0.5, 0.0], [0.5, 0.5]]


def test_a_function_of_response_and_truth_that_says_not_how_names_both_ways(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, "def compute_score(predict_str, ground_truth): ...")
    with pytest.raises(
        RewardError, match=r"reward_type=sequential\), or lists of them \(worker.reward.reward_type=batch"
    ):
        runner.start()


def test_further_arguments_are_an_error_that_says_where_they_are(tmp_path: Path) -> None:
    source = "def compute_score(predicts, ground_truths, questions): ..."
    runner = make_runner(tmp_path, source, reward_type="batch")
    with pytest.raises(RewardError, match=r"missing a required argument: 'questions'.*What it needs of a row is in"):
        runner.start()


@pytest.mark.parametrize(
    ("declared", "kind", "gets"),
    [("", "sequential", "dict"), ("", "function", "dict"), ("", "batch", "list"), ("batch", "sequential", "list")],
)
def test_the_configuration_says_how_a_function_is_called_unless_its_module_does(
    tmp_path: Path, declared: str, kind: str, gets: str
) -> None:
    source = f"""
    {f"REWARD_TYPE = {declared!r}" if declared else ""}
    def compute_score(given):
        assert type(given).__name__ == {gets!r}, given
        return 1.0 if isinstance(given, dict) else [1.0] * len(given)
    """
    group = make_group("x", "a", "b")
    score(make_runner(tmp_path, source, reward_type=kind), group)
    assert overall(group) == [1.0, 1.0]
