"""What goes wrong at the start of a run, through the command line: exit status 1, and a text that says what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from foveal.cli import main
from tests.small_run import small_run, write_rows

Capture = pytest.CaptureFixture[str]


def failure(arguments: list[str], capsys: Capture) -> str:
    """Runs `foveal train` and returns its error, which must not be a bare traceback of ours."""
    assert main(["train", *arguments]) == 1
    error = capsys.readouterr().err
    assert "error: " in error
    return error


def reward_file(folder: Path, body: str) -> str:
    path = folder / "broken.py"
    path.write_text(body)
    return f"worker.reward.reward_function={path}:score"


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if weights are loaded: these errors must come before."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded before the input was checked")

    monkeypatch.setattr("foveal.cluster.worker.load_model", refuse)


@pytest.mark.usefixtures("no_model")
class TestBeforeAModelIsLoaded:
    def test_mistyped_key(self, tmp_path: Path, capsys: Capture) -> None:
        error = failure(small_run(tmp_path, "qwen3_vl", "trainer.n_gpu_per_node=1"), capsys)
        assert "trainer.n_gpu_per_node" in error and "trainer.n_gpus_per_node" in error

    def test_one_answer_with_grpo(self, tmp_path: Path, capsys: Capture) -> None:
        error = failure(small_run(tmp_path, "qwen3_vl", "worker.rollout.n=1"), capsys)
        assert "worker.rollout.n: 1 given" in error and "grpo" in error

    def test_several_mistakes_are_told_at_once(self, tmp_path: Path, capsys: Capture) -> None:
        changes = ("worker.rollout.n=1", "worker.rollout.top_p=1.5", "data.rolout_batch_size=8")
        error = failure(small_run(tmp_path, "qwen3_vl", *changes), capsys)
        assert "worker.rollout.n" in error and "worker.rollout.top_p" in error and "data.rollout_batch_size" in error

    def test_missing_data_file(self, tmp_path: Path, capsys: Capture) -> None:
        error = failure(small_run(tmp_path, "qwen3_vl", f"data.train_files={tmp_path}/nowhere.parquet"), capsys)
        assert "nowhere.parquet" in error

    def test_missing_column(self, tmp_path: Path, capsys: Capture) -> None:
        error = failure(small_run(tmp_path, "qwen3_vl", "data.prompt_key=question"), capsys)
        assert "'question'" in error and "problem" in error and "data.prompt_key" in error

    def test_more_images_than_marks(self, tmp_path: Path, capsys: Capture) -> None:
        arguments = small_run(tmp_path, "qwen3_vl")
        rows = write_rows(tmp_path / "data", name="two.jsonl", images=["red.png", "blue.png"])
        error = failure([*arguments, f"data.train_files={rows}"], capsys)
        assert "row 0" in error and "1 <image> mark" in error and "2 images" in error

    def test_model_folder_without_processor(self, tmp_path: Path, capsys: Capture) -> None:
        arguments = small_run(tmp_path, "qwen3_vl")
        bare = tmp_path / "bare"
        shutil.copytree(tmp_path / "model_qwen3_vl", bare, ignore=shutil.ignore_patterns("*processor*"))
        error = failure([*arguments, f"worker.actor.model.model_path={bare}"], capsys)
        assert str(bare) in error and "processor" in error

    def test_unknown_model_type_names_the_supported_ones(self, tmp_path: Path, capsys: Capture) -> None:
        arguments = small_run(tmp_path, "qwen3_vl")
        odd = tmp_path / "odd"
        odd.mkdir()
        (odd / "config.json").write_text(json.dumps({"model_type": "toy_vlm", "auto_map": {"AutoConfig": "x.Y"}}))
        error = failure([*arguments, f"worker.actor.model.model_path={odd}"], capsys)
        assert "'toy_vlm'" in error and "qwen2_vl, qwen2_5_vl, qwen3_vl" in error

    def test_missing_model_folder(self, tmp_path: Path, capsys: Capture) -> None:
        error = failure(small_run(tmp_path, "qwen3_vl", "worker.actor.model.model_path=./nowhere/at/all"), capsys)
        assert "worker.actor.model.model_path" in error and "nowhere/at/all" in error

    def test_missing_reward_file(self, tmp_path: Path, capsys: Capture) -> None:
        change = f"worker.reward.reward_function={tmp_path}/none.py:score"
        assert f"{tmp_path}/none.py" in failure(small_run(tmp_path, "qwen3_vl", change), capsys)

    def test_reward_function_that_is_absent(self, tmp_path: Path, capsys: Capture) -> None:
        change = reward_file(tmp_path, "def other(rows):\n    return []\n")
        error = failure(small_run(tmp_path, "qwen3_vl", change), capsys)
        assert "'score'" in error and "other" in error

    def test_keys_that_a_run_needs(self, capsys: Capture) -> None:
        error = failure(["worker.rollout.n=4", "trainer.n_gpus_per_node=1"], capsys)
        assert all(
            key in error
            for key in ("worker.actor.model.model_path", "worker.reward.reward_function", "data.train_files")
        )

    def test_devices_that_cannot_be_divided(self, tmp_path: Path, capsys: Capture) -> None:
        changes = ("trainer.n_gpus_per_node=4", "worker.actor.ulysses_size=3")
        error = failure(small_run(tmp_path, "qwen3_vl", *changes), capsys)
        assert "worker.actor.ulysses_size=3" in error and "set it to 1, 2, 4" in error

    def test_a_folder_that_cannot_be_written_to(self, tmp_path: Path, capsys: Capture) -> None:
        (tmp_path / "file").write_text("")
        change = f"trainer.save_checkpoint_path={tmp_path}/file/run"
        error = failure(small_run(tmp_path, "qwen3_vl", change), capsys)
        assert "trainer.save_checkpoint_path" in error and f"{tmp_path}/file/run" in error

    def test_an_unknown_sampling_parameter_of_validation(self, tmp_path: Path, capsys: Capture) -> None:
        change = "worker.rollout.val_override_config={temprature: 0.5}"
        assert "temprature" in failure(small_run(tmp_path, "qwen3_vl", change), capsys)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("def score(rows):\n    raise ValueError('deliberate failure')\n", ["deliberate failure", "ground truth: '"]),
        ("def score(rows):\n    return [{'overall': 1.0}]\n", ["16", "1"]),
        ("def score(rows):\n    return [{'accuracy': 1.0} for _ in rows]\n", ["overall", "accuracy"]),
        ("def score(rows):\n    return None\n", ["None"]),
    ],
    ids=["raises", "wrong length", "lacks overall", "returns nothing"],
)
def test_a_reward_function_that_breaks_its_contract(
    tmp_path: Path, capsys: Capture, body: str, expected: list[str]
) -> None:
    error = failure(small_run(tmp_path, "qwen3_vl", reward_file(tmp_path, body)), capsys)
    assert "broken.py:score" in error
    assert all(text in error for text in expected), error


@pytest.mark.parametrize(("value", "all_one", "all_zero"), [("1.0", 12, 0), ("0.0", 0, 12)])
def test_filtering_that_keeps_nothing_gives_an_account(
    tmp_path: Path, capsys: Capture, value: str, all_one: int, all_zero: int
) -> None:
    body = f"def score(rows):\n    return [{{'overall': {value}, 'accuracy': {value}}} for _ in rows]\n"
    changes = (
        reward_file(tmp_path, body),
        "algorithm.online_filtering=true",
        "algorithm.filter_key=accuracy",
        "trainer.max_try_make_batch=3",
    )
    error = failure(small_run(tmp_path, "qwen3_vl", *changes), capsys)
    for text in ("3 tries", "12 groups", f"{all_one} all-one", f"{all_zero} all-zero", "'accuracy'", "0.01", "0.99"):
        assert text in error, error
    assert "One of the answers" in error


def test_filtering_by_a_key_that_no_answer_has_names_those_there_are(tmp_path: Path, capsys: Capture) -> None:
    changes = ("algorithm.online_filtering=true", "algorithm.filter_key=acuracy", "trainer.max_try_make_batch=1")
    error = failure(small_run(tmp_path, "qwen3_vl", *changes), capsys)
    assert "algorithm.filter_key=acuracy: none of the answers to 4 prompts has it; they have accuracy, overall" in error


def test_a_print_config_opens_nothing_and_exits_by_the_configuration(tmp_path: Path, capsys: Capture) -> None:
    arguments = ["--print-config", "worker.rollout.n=5", "data.train_files=/not/there", "trainer.n_gpus_per_node=6"]
    assert main(["train", *arguments]) == 0
    assert "train_files: /not/there" in capsys.readouterr().out
    assert main(["train", *arguments, "data.rollout_batch_size=512", "worker.actor.global_batch_size=100"]) == 1
    error = capsys.readouterr().err
    assert all(number in error for number in ("512", "100", "500", "600"))
