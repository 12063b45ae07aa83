"""The files of a run: names, resumes, odd numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from foveal.config.schema import Config
from foveal.errors import ConfigError
from foveal.track import Trackers
from foveal.track.file import RunFiles, flatten, nest, read_log
from foveal.track.samples import Sample


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def files_config(folder: Path) -> Config:
    return Config.model_validate({"trainer": {"logger": ["file"], "save_checkpoint_path": str(folder)}})


def test_names_are_nested_as_easyr1_does() -> None:
    assert nest({"reward/overall": 0.5, "reward/format": 1.0}) == {"reward": {"overall": 0.5, "format": 1.0}}


@pytest.mark.parametrize("order", [1, -1])
def test_a_name_that_is_both_number_and_folder_keeps_both_values(order: int) -> None:
    metrics = dict([("a", 1.0), ("a/b", 2.0), ("a/b/c", 3.0), ("a/d/e", 4.0)][::order])
    assert flatten(nest(metrics)) == metrics


def test_odd_names_survive_the_way_to_the_file_and_back(tmp_path: Path) -> None:
    names = ["mean@1", "mean 1", "acc(strict)", "a,b", "/lead//twice", "准确率", "", "step/x", "\ud800", "a\nb", "."]
    metrics = {f"reward/{name}": float(i) for i, name in enumerate(names)} | {"step/x": 1.0, "/": 2.0}
    files = RunFiles(tmp_path, {})
    files.log(metrics, 1)
    files.close()
    assert "准确率" in files.log_file.read_text(encoding="utf-8")
    assert read_log(files.log_file)[1] == metrics


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, {})
    files.log({"x/nan": float("nan"), "x/inf": float("-inf"), "x/np": np.float32(0.5), "x/count": 3}, 1)
    files.close()
    assert lines_of(files.log_file) == [{"step": 1, "x": {"nan": None, "inf": None, "np": 0.5, "count": 3}}]


def test_every_step_is_on_disk_before_the_next_one(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, {})
    files.log({"x": 1.0}, 1)
    assert lines_of(files.log_file) == [{"step": 1, "x": 1.0}]
    files.close()


def test_a_resumed_run_appends_also_after_half_a_line(tmp_path: Path) -> None:
    (tmp_path / "experiment_log.jsonl").write_text('{"step": 1, "x": 1.0}\n{"step": 2, "x"')
    trackers = Trackers(files_config(tmp_path), tmp_path, resume_step=1)
    trackers.log({"x": 2.0}, 2)
    trackers.close()
    assert read_log(trackers.log_file) == {1: {"x": 1.0}, 2: {"x": 2.0}}


def test_reading_joins_the_lines_of_a_step(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1, "actor": {"lr": 0.1}}\n{"step": 1, "val": {"reward_score": 0.5}}\n')
    assert read_log(log) == {1: {"actor/lr": 0.1, "val/reward_score": 0.5}}


@pytest.mark.parametrize("line", ['{"step": 1e999}', "[" * 100_000, '{"step": null}', "[]", "{"])
def test_reading_passes_over_a_line_that_is_none(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f'{line}\n{{"step": 2, "a": 1}}\n')
    assert read_log(path) == {2: {"a": 1}}


def test_reading_drops_steps_that_were_trained_again(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    rows = [{"step": step, "actor": {"lr": lr}} for step, lr in [(1, 0.1), (2, 0.2), (3, 0.3), (2, 0.9)]]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_log(log) == {1: {"actor/lr": 0.1}, 2: {"actor/lr": 0.9}}


def test_a_later_validation_of_an_old_step_drops_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1, "actor": {"lr": 0.1}}\n{"step": 0, "val": {"reward_score": 0.5}}\n')
    assert list(read_log(log)) == [0, 1]


def test_the_whole_configuration_is_written(tmp_path: Path) -> None:
    config = files_config(tmp_path)
    Trackers(config, tmp_path).close()
    written = json.loads((tmp_path / "experiment_config.json").read_text(encoding="utf-8"))
    assert written == config.model_dump(mode="json")


def test_files_are_written_although_the_logger_does_not_name_them(tmp_path: Path) -> None:
    config = Config.model_validate({"trainer": {"logger": ["console"]}})
    trackers = Trackers(config, tmp_path)
    trackers.log({"x": 1.0}, 1)
    trackers.close()
    assert trackers.log_file.exists()


def test_samples_are_readable_and_appended(tmp_path: Path) -> None:
    for step in (5, 10):
        trackers = Trackers(files_config(tmp_path), tmp_path, resume_step=step - 5)
        sample = Sample(step, "val-0-7", "多少?", "<answer>3</answer>", "3", {"overall": 0.9}, ["a.png"])
        trackers.log_samples([sample], step)
        trackers.close()
    text = (tmp_path / "generations.log").read_text(encoding="utf-8")
    assert text.count("step 5 · val-0-7 · overall 0.900") == text.count("step 10 · val-0-7") == 1
    assert "[prompt]\n多少?\n[images]\na.png\n[response]\n<answer>3</answer>\n[answer]\n3\n" in text


def test_a_folder_that_cannot_be_made_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer\.save_checkpoint_path.*file/run"):
        RunFiles(tmp_path / "file" / "run", {})
