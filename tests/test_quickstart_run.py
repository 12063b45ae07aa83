from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from foveal.cli import main
from foveal.config import load_config
from foveal.quickstart import run
from foveal.quickstart.run import Folders, accuracies, train_arguments


def test_folder_of_somebody_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").touch()
    assert main(["quickstart", "--dir", str(tmp_path)]) == 1
    assert "not empty, and not made by an earlier quick start" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


def test_yaml_and_command_name_the_same_files() -> None:
    plain = load_config([f"config={run.EXAMPLES / 'quickstart.yaml'}"])
    made = load_config(train_arguments(Folders(Path("runs/quickstart")), seed=1))
    for key in ("data.train_files", "data.val_files", "worker.actor.model.model_path", "trainer.save_checkpoint_path"):
        assert plain.value(key) == made.value(key)


def test_yaml_scores_with_the_example_reward() -> None:
    text = (run.EXAMPLES / "quickstart.yaml").read_text()
    assert yaml.safe_load(text)["worker"]["reward"]["reward_function"].startswith("./examples/reward_function/")


@pytest.mark.slow
def test_quick_start_from_nothing_to_a_merged_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("foveal.quickstart.task.SPLIT_ROWS", {"warmup": 400, "train": 64, "val": 16, "test": 16})
    monkeypatch.setattr("foveal.quickstart.warmup.Recipe.max_steps", 5)
    folder = tmp_path / "quick"
    assert main(["quickstart", "--dir", str(folder), "data.rollout_batch_size=8", "worker.actor.global_batch_size=8",
                 "trainer.max_steps=2"]) == 0  # fmt: skip
    from transformers import AutoModelForImageTextToText

    AutoModelForImageTextToText.from_pretrained(folder / "trained")
    assert (folder / "grpo" / "curve.png").stat().st_size > 0
    assert sorted(accuracies(folder / "grpo")) == [0, 2]
    assert str(folder / "trained") in capsys.readouterr().out
