"""Forms of reward functions: modules, classes, async ones, several with weights, and routing by a column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foveal.config.schema_reward import RewardConfig
from foveal.errors import RewardError
from foveal.reward.runner import RewardRunner
from tests.reward_support import make_group, make_runner, overall, score, write

LENGTH = """
REWARD_TYPE = "sequential"
def compute_score(one, factor=1.0): return {"overall": factor * len(one["response"]), "accuracy": 0.5}
"""
TRUTH = "def compute_score(inputs): return [{'overall': one['ground_truth'], 'accuracy': 1.0} for one in inputs]"
COUNTER = """
class Counter:
    REWARD_TYPE = "sequential"
    def __init__(self, start=0): self.calls = start
    def {method}(self, one):
        self.calls += 1
        return self.calls
"""
ASYNC = """
import asyncio
REWARD_TYPE = "sequential"
running = most = 0
async def compute_score(one):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(60 if one["response"] == "stuck" else 0.05)
    running -= 1
    if one["response"] == "bad": raise ValueError("deliberate failure")
    return {"overall": float(one["ground_truth"]), "most": most}
"""


def two(folder: Path, **keys: Any) -> RewardRunner:
    length, truth = write(folder / "length.py", LENGTH), write(folder / "truth.py", TRUTH)
    functions = {
        "length": {"function": f"{length}:compute_score", "kwargs": {"factor": 2.0}, "weight": 0.5},
        "truth": {"function": f"{truth}:compute_score", "weight": 10},
    }
    for name, extra in keys.pop("extra", {}).items():
        functions[name] |= extra
    return RewardRunner(RewardConfig.model_validate({"functions": functions, **keys}), "train")


def test_several_functions_are_summed_by_weight_and_named(tmp_path: Path) -> None:
    score(two(tmp_path), group := make_group(3, "ab"))
    assert group.responses[0].rewards == {
        "overall": 0.5 * 4 + 10 * 3,
        "length": 4.0,
        "truth": 3.0,
        "length_accuracy": 0.5,
        "truth_accuracy": 1.0,
    }


def test_rows_are_routed_by_a_column(tmp_path: Path) -> None:
    groups = [make_group(3, "ab"), make_group(3, "ab")]
    groups[0].prompt.row, groups[1].prompt.row = {"source": "geo"}, {"source": 7}
    extra = {"length": {"only_for": ["geo"]}, "truth": {"only_for": ["7", "8"]}}
    score(two(tmp_path, extra=extra, route_by="source"), *groups)
    assert groups[0].responses[0].rewards == {"overall": 2.0, "accuracy": 0.5}
    assert groups[1].responses[0].rewards == {"overall": 30.0, "accuracy": 1.0}


@pytest.mark.parametrize(
    ("row", "said"),
    [({"source": "ocr"}, "none scores row 0, whose 'source' is 'ocr'.*hold geo"), ({"kind": "ocr"}, "no column 'sou")],
)
def test_a_row_that_no_function_scores_is_named(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    group = make_group(3, "ab")
    group.prompt.row = row
    extra = {"length": {"only_for": ["geo"]}, "truth": {"only_for": ["geo"]}}
    with pytest.raises(RewardError, match=said):
        score(two(tmp_path, extra=extra, route_by="source"), group)


def test_arguments_of_one_of_several_are_looked_for_in_its_own_entry(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"length\.py.*keyword arguments {'size': 1}.*kwargs of its entry"):
        two(tmp_path, extra={"length": {"kwargs": {"size": 1}}}).start()


def test_one_of_several_that_fails_takes_only_its_own_part(tmp_path: Path) -> None:
    score(two(tmp_path, on_error="score", timeout_score=-1.0), group := make_group("no number", "ab"))
    assert overall(group) == [0.5 * 4 + 10 * -1.0]


def test_one_of_several_that_is_not_finite_leaves_the_answer_out_and_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    score(two(tmp_path), group := make_group(float("nan"), "ab"))
    assert group.responses[0].role == "left_out"
    assert "truth.py:compute_score returned the overall score nan" in capfd.readouterr().out


def test_a_missing_file_of_several_names_its_entry(tmp_path: Path) -> None:
    extra = {"truth": {"function": "nowhere.py:f"}}
    with pytest.raises(RewardError, match=r"worker\.reward\.functions\.truth\.function: there is no file"):
        two(tmp_path, extra=extra).start()


@pytest.mark.parametrize("method", ["__call__", "compute_score"])
def test_a_class_is_built_once_and_keeps_its_state(tmp_path: Path, method: str) -> None:
    source = COUNTER.replace("{method}", method)
    with make_runner(tmp_path, source, name="Counter", reward_function_kwargs={"start": 10}) as runner:
        for expected in ([11.0, 12.0], [13.0, 14.0]):
            runner.submit(group := make_group("x", "a", "b"))
            runner.finish()
            assert overall(group) == expected


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class R: pass", "R is a class without __call__ and without compute_score"),
        ("class R:\n    def __init__(self): raise OSError('no weights')\n    def __call__(self, x): ...",
         r"(?s)building .*R failed.*line 2, in __init__.*no weights"),
        ("class R:\n    def __init__(self, path): ...\n    def __call__(self, x): ...", "missing a required argument"),
    ],
)  # fmt: skip
def test_a_class_that_cannot_be_built_says_why(tmp_path: Path, source: str, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        make_runner(tmp_path, source, name="R").start()


def test_a_module_is_named_with_dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "own_scores"  # a name that no other test leaves on the path
    folder.mkdir()
    write(folder / "scores.py", "from . import base\ndef main(inputs): return [base.VALUE] * len(inputs)")
    write(folder / "base.py", "VALUE = 0.25")
    monkeypatch.chdir(tmp_path)
    for name in ("own_scores.scores", "own_scores.scores:main"):
        score(RewardRunner(RewardConfig(reward_function=name), "train"), group := make_group("x", "a"))
        assert overall(group) == [0.25]


@pytest.mark.parametrize(
    ("name", "said"),
    [("foveal.absent:main", "neither a file foveal.absent nor a module foveal.absent"),
     ("own_broken.broken:main", r"(?s)importing own_broken\.broken failed.*broken\.py.*line 1.*absent_library"),
     ("foveal.reward.overlong:absent", "has no function 'absent'; it has overlong_penalty")],
)  # fmt: skip
def test_a_module_that_cannot_be_used_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    (tmp_path / "own_broken").mkdir()
    write(tmp_path / "own_broken" / "broken.py", "import absent_library")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RewardError, match=said):
        RewardRunner(RewardConfig(reward_function=name), "train").start()


def test_async_answers_are_scored_together_up_to_the_bound(tmp_path: Path) -> None:
    group = make_group(2, *["a"] * 12)
    with make_runner(tmp_path, ASYNC, concurrency=4) as runner:
        runner.submit(group)
        runner.finish()
    assert overall(group) == [2.0] * 12
    assert max(response.rewards["most"] for response in group.responses) == 4.0


def test_async_answers_fail_one_by_one(tmp_path: Path) -> None:
    group = make_group(1, "a", "bad", "stuck", "b")
    metrics = score(make_runner(tmp_path, ASYNC, time_limit=0.3, on_error="score", timeout_score=-1.0), group)
    assert overall(group) == [1.0, -1.0, -1.0, 1.0]
    assert (metrics["reward/errors"], metrics["reward/timeouts"]) == (1.0, 1.0)


def test_an_async_function_that_blocks_is_ended(tmp_path: Path) -> None:
    source = "REWARD_TYPE = 'sequential'\nasync def compute_score(one):\n    while True: pass"
    group = make_group(1, "a")
    assert score(make_runner(tmp_path, source, time_limit=0.2), group)["reward/timeouts"] == 1.0


def test_an_async_batch_function_keeps_its_event_loop(tmp_path: Path) -> None:
    source = """
    import asyncio
    loops = set()
    async def compute_score(inputs):
        loops.add(asyncio.get_running_loop())
        return [len(loops)] * len(inputs)
    """
    with make_runner(tmp_path, source) as runner:
        for _ in range(2):
            runner.submit(group := make_group("x", "a", "b"))
            runner.finish()
            assert overall(group) == [1.0, 1.0]
