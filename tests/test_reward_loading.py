"""Loading FILE:function: what is found, and what is said when it isn't."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foveal.config.schema_reward import RewardConfig
from foveal.errors import RewardError
from foveal.reward.runner import RewardRunner
from tests.reward_support import make_group, make_runner, overall, write

ONES = "def compute_score(inputs): return [1.0] * len(inputs)"


def test_missing_file_is_named_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = RewardRunner(RewardConfig(reward_function="nowhere/reward.py:compute_score"), "train")
    with pytest.raises(RewardError, match=re.escape(str(tmp_path / "nowhere" / "reward.py"))):
        runner.start()


def test_unset_function_says_which_key_to_set() -> None:
    with pytest.raises(RewardError, match=r"worker\.reward\.reward_function is not set"):
        RewardRunner(RewardConfig(), "train").start()


def test_absent_function_lists_those_that_exist(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, "def first(x): ...\ndef second(x): ...", name="third")
    with pytest.raises(RewardError, match=r"no function 'third'; it has first, second"):
        runner.start()


def test_name_defaults_to_main(tmp_path: Path) -> None:
    path = write(tmp_path / "r.py", "def main(inputs): return [2.0] * len(inputs)")
    with RewardRunner(RewardConfig(reward_function=str(path)), "train") as runner:
        runner.submit(group := make_group("x", "a"))
        runner.finish()
    assert overall(group) == [2.0]


def test_import_error_shows_the_users_line(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"(?s)user_reward\.py.*line 2.*No module named 'absent_library'"):
        make_runner(tmp_path, "import os\nimport absent_library").start()


def test_syntax_error_shows_the_users_line(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"(?s)user_reward\.py.*line 1.*SyntaxError"):
        make_runner(tmp_path, "def compute_score(:").start()


def test_process_that_ends_while_importing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"exit code 3 while the file was imported"):
        make_runner(tmp_path, "import os; os._exit(3)").start()


@pytest.mark.parametrize(
    ("declaration", "message"),
    [("REWARD_TYPE = 'batched'", "batched"), ("REWARD_SPLIT = 'answer'", "answer")],
)
def test_unknown_declaration_is_an_error(tmp_path: Path, declaration: str, message: str) -> None:
    with pytest.raises(RewardError, match=rf"{declaration.split()[0]} is '{message}'"):
        make_runner(tmp_path, f"{declaration}\n{ONES}").start()


def test_unknown_argument_is_an_error_at_start(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, ONES, reward_function_kwargs={"weight": 1})
    with pytest.raises(RewardError, match=r"compute_score\(inputs\).*'weight'"):
        runner.start()


def test_missing_argument_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"missing a required argument: 'weight'"):
        make_runner(tmp_path, "def compute_score(inputs, weight): ...").start()


def test_siblings_can_be_imported(tmp_path: Path) -> None:
    write(tmp_path / "my_scores.py", "VALUE = 0.25")
    source = "from my_scores import VALUE\ndef compute_score(inputs): return [VALUE] * len(inputs)"
    with make_runner(tmp_path, source) as runner:
        runner.submit(group := make_group("x", "a"))
        runner.finish()
    assert overall(group) == [0.25]


@pytest.mark.parametrize("file_name", ["random.py", "json.py", "my.reward.v2.py"])
def test_file_name_may_be_a_librarys_or_have_dots(tmp_path: Path, file_name: str) -> None:
    source = "import json, random\ndef compute_score(inputs): return [random.random() < 2 and json.loads('0.5')]"
    path = write(tmp_path / file_name, source)
    with RewardRunner(RewardConfig(reward_function=f"{path}:compute_score"), "train") as runner:
        runner.submit(group := make_group("x", "a"))
        runner.finish()
    assert overall(group) == [0.5]
