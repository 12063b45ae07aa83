"""All advantage estimators where there is little or nothing to compare."""

from __future__ import annotations

import pytest
import torch

from foveal.algorithm import get_advantage
from foveal.algorithm.registry import ADVANTAGES
from tests.advantage_support import Config, advantages, step

NAMES = sorted(ADVANTAGES)
GROUP_NAMES = [name for name in NAMES if ADVANTAGES[name].needs_group]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GROUP_NAMES)
def test_group_of_equal_scores_gets_exactly_zero(name, dtype):
    # The mean of three times 0.1 is not 0.1 in floating point.
    batch = step([0.1, 0.1, 0.1], [0, 0, 0], [2, 1, 3], dtype=dtype)
    assert advantages(name, batch) == [0.0] * 6


@pytest.mark.parametrize("name", GROUP_NAMES)
def test_group_of_one_gets_zero(name):
    assert advantages(name, step([1.0, 0.0, 1.0], [0, 1, 1], [1, 1, 1]))[0] == 0.0


@pytest.mark.parametrize("name", sorted({*GROUP_NAMES} - {"opo", "reinforce_plus_plus_baseline"}))
def test_empty_response_counts_in_its_group_with_its_score(name):
    with_empty = advantages(name, step([1.0, 0.0, 0.25], [0, 0, 0], [1, 0, 1]))
    full = advantages(name, step([1.0, 0.0, 0.25], [0, 0, 0], [1, 1, 1]))
    assert with_empty == [full[0], full[2]]


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"])
@pytest.mark.parametrize("lengths", [[1], [1, 1]])
def test_whitening_equal_values_gives_zero(name, lengths):
    count = len(lengths)
    batch = step([1.0] * count, [0] * count, lengths, values=[0.5] * count, dtype=torch.float32)
    assert advantages(name, batch) == [0.0] * count


@pytest.mark.parametrize("lengths", [[], [0, 0]])
@pytest.mark.parametrize("name", NAMES)
def test_batch_without_tokens_gives_empty_advantages(name, lengths):
    count = len(lengths)
    batch = step([1.0] * count, [0] * count, lengths, baselines=[0.0] * count, values=[])
    assert advantages(name, batch) == []


@pytest.mark.parametrize("name", NAMES)
def test_all_tokens_masked_out_gives_zeros(name):
    batch = step([1.0, 0.0], [0, 0], [1, 2], mask=[False] * 3, baselines=[0.0] * 2, values=[0.0] * 3)
    assert advantages(name, batch) == [0.0] * 3


@pytest.mark.parametrize("name", NAMES)
def test_result_has_the_dtype_of_the_token_rewards(name):
    batch = step([1.0, 0.0], [0, 0], [1, 2], baselines=[0.0] * 2, values=[0.0] * 3, dtype=torch.float32)
    result = get_advantage(name)(batch, Config())
    assert (result.advantages.dtype, result.returns.dtype) == (torch.float32, torch.float32)


def test_order_of_the_responses_does_not_matter():
    lengths, scores = [3, 1, 2], [1.0, 0.5, 0.0]
    straight = torch.tensor(advantages("grpo", step(scores, [0, 0, 0], lengths))).split(lengths)
    backwards = torch.tensor(advantages("grpo", step(scores[::-1], [0, 0, 0], lengths[::-1]))).split(lengths[::-1])
    assert torch.equal(torch.cat(straight), torch.cat(backwards[::-1]))
