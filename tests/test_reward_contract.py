"""What a reward function may return."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from foveal.reward.contract import Failure, to_outcome, to_outcomes


@pytest.mark.parametrize(
    "value", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), torch.tensor(1), torch.ones(1)]
)
def test_any_librarys_number_becomes_a_float(value: Any) -> None:
    plain, named = to_outcome(value), to_outcome({"overall": value, "part": value})
    assert plain == {"overall": 1.0}
    assert named == {"overall": 1.0, "part": 1.0}
    assert type(named["part"]) is float


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "returned None where a number"),
        ("1.0", "returned str '1.0'"),
        ([1.0], r"returned list [1.0]"),
        (np.ones(2), "returned ndarray"),
        (1j, "returned complex 1j"),
        ({"accuracy": 1.0}, "without `overall`, with the keys ['accuracy']"),
        ({"overall": None}, "returned None under the key 'overall'"),
        ({"overall": 1.0, "note": "fine"}, "returned str 'fine' under the key 'note'"),
        ({"overall": 1.0, 3: 1.0}, "under the key 3"),
    ],
)
def test_other_results_are_named(value: Any, said: str) -> None:
    outcome = to_outcome(value)
    assert isinstance(outcome, Failure)
    assert outcome.kind == "broken"
    assert said in outcome.text


def test_integer_too_large_for_a_float_is_not_finite() -> None:
    assert to_outcome(10**400) == {"overall": math.inf}


@pytest.mark.parametrize("result", [np.array([1.0, 0.5]), torch.tensor([1.0, 0.5])])
def test_an_array_is_as_good_as_a_list(result: Any) -> None:
    assert to_outcomes(result, 2) == [{"overall": 1.0}, {"overall": 0.5}]


def test_batch_of_wrong_length_names_both_lengths() -> None:
    outcomes = to_outcomes([1.0], 3)
    assert len(outcomes) == 3
    assert isinstance(outcomes[0], Failure)
    assert "a list of 1 results where 3 are expected" in outcomes[0].text


@pytest.mark.parametrize("value", [None, {"overall": [1.0, 1.0]}, 1.0, "ab", np.float32(1)])
def test_batch_that_is_no_list_is_named(value: Any) -> None:
    outcome = to_outcomes(value, 2)[0]
    assert isinstance(outcome, Failure)
    assert "where a list of 2 results" in outcome.text


def test_one_bad_result_spoils_only_its_own_answer() -> None:
    outcomes = to_outcomes([1.0, None], 2)
    assert outcomes[0] == {"overall": 1.0}
    assert isinstance(outcomes[1], Failure)


def test_keys_of_a_class_of_the_users_own_become_plain_text() -> None:
    class Key(str):
        pass

    outcome = to_outcome({"overall": 1.0, Key("part"): 0.5})
    assert isinstance(outcome, dict) and [type(key) for key in outcome] == [str, str]
