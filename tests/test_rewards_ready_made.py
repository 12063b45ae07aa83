"""The ready-made rewards score what their document says, through the run's own way of loading them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from foveal.reward.contract import FunctionSpec
from foveal.reward.loading import load
from foveal.rewards.choice import letters
from foveal.rewards.shape import language

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "ready_made_rewards.md"
COLUMNS = {"response": "response", "ground truth": "ground_truth", "tokens": "response_length", "prompt": "prompt"}


def lines() -> list[tuple[str, dict[str, Any], dict[str, Any], float]]:
    """(function, input, arguments, `overall`) of every line of every table."""
    found = []
    for section in re.split(r"\n#{2,3} ", DOCUMENT.read_text(encoding="utf-8"))[1:]:
        named = re.search(r"`(foveal\.[\w.]+:\w+)`", section.splitlines()[0])
        rows = [row.strip("|").split("|") for row in section.splitlines() if row.startswith("|")]
        cells = [[cell.strip() for cell in row] for row in rows]
        for row in cells[2:]:
            given = dict(zip(cells[0], row, strict=True))
            values = {name: json.loads(text.strip("`")) for name, text in given.items() if text}
            one = {"response": "", "response_length": 10, "ground_truth": None, "prompt": ""}
            one |= {COLUMNS[name]: value for name, value in values.items() if name in COLUMNS}
            assert named is not None
            found.append((named[1], one, values.get("arguments", {}), values["`overall`"]))
    return found


@pytest.mark.parametrize(("function", "given", "arguments", "overall"), lines())
def test_score_is_that_of_the_document(
    function: str, given: dict[str, Any], arguments: dict[str, Any], overall: float
) -> None:
    module, name = function.split(":")
    loaded = load(FunctionSpec(module, name, arguments))
    assert loaded.info.kind == "sequential"
    assert loaded.function(given)["overall"] == pytest.approx(overall, abs=5e-4)


def test_every_function_has_a_table() -> None:
    names = {function for function, *_ in lines()}
    assert len(names) == 11


def test_math_scores_are_those_of_easyr1() -> None:
    example = Path(__file__).resolve().parents[1] / "examples" / "reward_function" / "math.py"
    theirs = load(FunctionSpec(str(example), "compute_score", {})).function
    ours = load(FunctionSpec("foveal.rewards.math", "compute_score", {})).function
    for response in ("<think>x</think> \\boxed{7}", "< think >x</ think >\\boxed{7.0}", "\\boxed{8}", "7", ""):
        one = {"response": response, "ground_truth": "7"}
        assert ours(one) == theirs([one])[0]


def test_a_word_is_not_taken_for_letters() -> None:
    assert letters("BAD idea") == frozenset()
    assert letters("(b), D and a") == {"A", "B", "D"}


def test_an_unknown_script_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed: LATIN"):
        language({"response": "x", "prompt": ""}, script="ELVISH")


def test_digits_without_end_are_a_wrong_count() -> None:
    score = load(FunctionSpec("foveal.rewards.counting", "compute_score", {"near": 0.5})).function
    assert score({"response": f"Answer: {'9' * 400}", "ground_truth": 3})["overall"] == 0.0
