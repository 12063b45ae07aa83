"""Functions written for EasyR1 give the numbers that they give when called directly."""

from __future__ import annotations

import random
from typing import Any

import pytest

from foveal.config.schema_reward import RewardConfig
from foveal.reward.runner import RewardRunner
from tests.reward_support import make_group, score
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
