"""Rounds of scoring with real reward processes: calls, results, failures."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from foveal.errors import RewardError
from tests.reward_support import make_group, make_runner, overall

RAISE_ON_BAD = """
REWARD_TYPE = "sequential"
def compute_score(one):
    if one["response"] == "bad":
        raise ValueError("deliberate failure")
    return 1.0
"""
RAISE_ON_THIRD = """
def compute_score(inputs):
    for i, one in enumerate(inputs):
        if i == 2:
            raise ValueError("deliberate failure")
"""


def test_batch_function_gets_all_answers_in_order_with_easyr1s_keys(tmp_path: Path) -> None:
    source = """
    seen = []
    def compute_score(inputs):
        seen.append([{k: one[k] for k in ("response", "response_length", "ground_truth")} for one in inputs])
        assert seen == [[
            {"response": "ab", "response_length": 3, "ground_truth": "x"},
            {"response": "", "response_length": 1, "ground_truth": "x"},
            {"response": "c", "response_length": 2, "ground_truth": [1, 2]},
        ]], seen
        return [0.0, 1.0, 2.0]
    """
    groups = [make_group("x", "ab", ""), make_group([1, 2], "c")]
    with make_runner(tmp_path, source) as runner:
        for group in groups:
            runner.submit(group)
        runner.finish()
    assert [overall(group) for group in groups] == [[0.0, 1.0], [2.0]]


def test_numpy_ground_truth_arrives_as_pythons_own(tmp_path: Path) -> None:
    source = """
    def compute_score(inputs):
        truth = inputs[0]["ground_truth"]
        return [float(type(truth["a"]) is int and truth["b"] == [1.5, 2.5])]
    """
    with make_runner(tmp_path, source) as runner:
        runner.submit(group := make_group({"a": np.int64(3), "b": np.array([1.5, 2.5])}, "a"))
        runner.finish()
    assert overall(group) == [1.0]


def test_module_state_lasts_from_round_to_round(tmp_path: Path) -> None:
    source = """
    calls = 0
    def compute_score(inputs):
        global calls
        calls += 1
        return [calls] * len(inputs)
    """
    groups = [make_group("x", "a", "b") for _ in range(3)]
    with make_runner(tmp_path, source, num_cpus=4) as runner:
        for group in groups:
            runner.submit(group)
            runner.finish()
    assert [overall(group) for group in groups] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_split_batch_is_called_once_a_group(tmp_path: Path) -> None:
    source = """
    REWARD_SPLIT = "group"
    def compute_score(inputs): return [len(inputs)] * len(inputs)
    """
    groups = [make_group("x", "a", "b"), make_group("y", "c")]
    with make_runner(tmp_path, source) as runner:
        for group in groups:
            runner.submit(group)
        runner.finish()
    assert [overall(group) for group in groups] == [[2.0, 2.0], [1.0]]


def test_one_process_keeps_the_order_of_calls(tmp_path: Path) -> None:
    source = """
    REWARD_TYPE = "sequential"
    calls = 0
    def compute_score(one):
        global calls
        calls += 1
        return calls
    """
    groups = [make_group("x", "a", "b"), make_group("y", "c")]
    with make_runner(tmp_path, source) as runner:
        for group in groups:
            runner.submit(group)
        runner.finish()
    assert [overall(group) for group in groups] == [[1.0, 2.0], [3.0]]


def test_sequential_scoring_starts_before_finish(tmp_path: Path) -> None:
    source = f"""
    import pathlib
    REWARD_TYPE = "sequential"
    def compute_score(one):
        pathlib.Path({str(tmp_path / "scored")!r}).touch()
        return 1.0
    """
    with make_runner(tmp_path, source) as runner:
        runner.submit(make_group("x", "a"))
        deadline = time.monotonic() + 10
        while not (tmp_path / "scored").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / "scored").exists()


def test_pool_spreads_over_num_cpus_processes(tmp_path: Path) -> None:
    source = """
    import os, time
    REWARD_TYPE = "sequential"
    def compute_score(one):
        time.sleep(0.3)
        return {"overall": 1.0, "pid": os.getpid()}
    """
    with make_runner(tmp_path, source, num_cpus=2) as runner:
        runner.submit(group := make_group("x", *"abcd"))
        runner.finish()
    assert len({response.rewards["pid"] for response in group.responses}) == 2


def test_arguments_are_bound(tmp_path: Path) -> None:
    source = "def compute_score(inputs, weight): return [weight] * len(inputs)"
    with make_runner(tmp_path, source, reward_function_kwargs={"weight": 0.75}) as runner:
        runner.submit(group := make_group("x", "a"))
        runner.finish()
    assert overall(group) == [0.75]


def test_numbers_and_dicts_may_be_mixed(tmp_path: Path) -> None:
    source = """
    def compute_score(inputs):
        return [1.0 if i % 2 else {"overall": 1.0, "accuracy": 1.0} for i in range(len(inputs))]
    """
    with make_runner(tmp_path, source) as runner:
        runner.submit(group := make_group("x", "a", "b"))
        runner.finish()
    assert [r.rewards for r in group.responses] == [{"overall": 1.0, "accuracy": 1.0}, {"overall": 1.0}]


def test_baseline_responses_are_scored_and_stay_baseline(tmp_path: Path) -> None:
    group = make_group("x", "a", "b")
    group.responses[1].role = "baseline"
    with make_runner(tmp_path, "def compute_score(inputs): return [0.0, 1.0]") as runner:
        runner.submit(group)
        runner.finish()
    assert overall(group) == [0.0, 1.0]
    assert group.responses[1].role == "baseline"


def test_round_without_answers_calls_nothing(tmp_path: Path) -> None:
    with make_runner(tmp_path, "def compute_score(inputs): raise ValueError") as runner:
        metrics = runner.finish()
    assert metrics == dict.fromkeys(metrics, 0.0)


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_overall_that_is_not_finite_leaves_the_answer_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: str
) -> None:
    source = f"def compute_score(inputs): return [1.0, {{'overall': float('{number}'), 'part': 1.0}}]"
    groups = [make_group("the truth", "fine", "peculiar") for _ in range(2)]
    with make_runner(tmp_path, source) as runner:
        for group in groups:
            runner.submit(group)
            metrics = runner.finish()
    assert [response.role for response in groups[0].responses] == ["trained", "left_out"]
    assert groups[0].responses[1].rewards == {"part": 1.0}
    assert metrics["reward/left_out"] == 1.0
    out = capfd.readouterr().out
    assert out.count("'peculiar'") == 1, "the first one is named, the second one only counted"
    assert "sample 1" in out and "'the truth'" in out and "user_reward.py:compute_score" in out


def test_part_that_is_not_finite_is_left_out_alone(tmp_path: Path) -> None:
    source = "def compute_score(inputs): return [{'overall': 1.0, 'part': float('nan')}]"
    with make_runner(tmp_path, source) as runner:
        runner.submit(group := make_group("x", "a"))
        metrics = runner.finish()
    assert group.responses[0].rewards == {"overall": 1.0}
    assert group.responses[0].role == "trained"
    assert (metrics["reward/left_out"], metrics["reward/left_out_parts"]) == (0.0, 1.0)


def test_exception_names_text_line_and_sample(tmp_path: Path) -> None:
    with make_runner(tmp_path, RAISE_ON_BAD) as runner:
        runner.submit(make_group("the truth", "fine", "bad", "fine"))
        with pytest.raises(RewardError) as raised:
            runner.finish()
    message = str(raised.value)
    for part in [
        "user_reward.py:compute_score raised ValueError: deliberate failure",
        "on this answer of 3",
        "sample 1",
        "'bad'",
        "'the truth'",
        "line 5, in compute_score",
        "worker.reward.on_error=score",
    ]:
        assert part in message
    assert "foveal/reward" not in message, "frames of ours help nobody"


def test_exception_in_a_batch_says_that_it_is_one(tmp_path: Path) -> None:
    with make_runner(tmp_path, RAISE_ON_THIRD) as runner:
        runner.submit(make_group("x", "a", "b", "c", "d"))
        with pytest.raises(RewardError, match=r"(?s)deliberate failure, in a batch of 4 answers"):
            runner.finish()


def test_exception_scored_when_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with make_runner(tmp_path, RAISE_ON_BAD, on_error="score", timeout_score=-1.0) as runner:
        runner.submit(group := make_group("x", "fine", "bad", "bad"))
        metrics = runner.finish()
    assert overall(group) == [1.0, -1.0, -1.0]
    assert metrics["reward/errors"] == 2.0
    assert capfd.readouterr().out.count("ValueError: deliberate failure\n") == 1, "one traceback, not one for each"


def test_batch_exception_scored_when_asked_for_covers_the_call(tmp_path: Path) -> None:
    with make_runner(tmp_path, RAISE_ON_THIRD, on_error="score") as runner:
        runner.submit(group := make_group("x", "a", "b", "c"))
        metrics = runner.finish()
    assert overall(group) == [0.0, 0.0, 0.0]
    assert metrics["reward/errors"] == 3.0


def test_broken_contract_names_the_sample(tmp_path: Path) -> None:
    source = "def compute_score(inputs): return [1.0, {'accuracy': 1.0}]"
    with make_runner(tmp_path, source) as runner:
        runner.submit(make_group("the truth", "fine", "odd"))
        with pytest.raises(
            RewardError, match=r"(?s)without `overall`.*keys \['accuracy'\].*sample 1.*'odd'.*'the truth'"
        ):
            runner.finish()


def test_sys_exit_in_a_reward_is_an_exception_like_any_other(tmp_path: Path) -> None:
    with make_runner(tmp_path, "import sys\ndef compute_score(inputs): sys.exit('enough')") as runner:
        runner.submit(make_group("x", "a"))
        with pytest.raises(RewardError, match="raised SystemExit: enough"):
            runner.finish()


def test_round_after_a_failed_one_starts_clean(tmp_path: Path) -> None:
    with make_runner(tmp_path, RAISE_ON_BAD) as runner:
        runner.submit(make_group("x", "bad"))
        with pytest.raises(RewardError):
            runner.finish()
        runner.submit(group := make_group("x", "fine"))
        runner.finish()
    assert overall(group) == [1.0]
