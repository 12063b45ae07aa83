"""Text, pictures and videos in one data set and one batch: sampled, scored and trained on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from foveal.cli import main
from foveal.quickstart.tiny import Family
from tests.data_support import noise
from tests.small_run import read_log, small_run
from tests.video_support import film


def write_mixed(folder: Path) -> Path:
    """Eight rows: two each of text, a picture, a video, and a video given as pictures beside a picture."""
    folder.mkdir(parents=True)
    film(folder / "a.mp4", 30, 10, height=28, width=56)
    (folder / "clip").mkdir()
    for number in range(4):
        noise(28, 56, number).save(folder / "clip" / f"{number}.png")
    noise(56, 56).save(folder / "a.png")
    kinds = [
        {"problem": "Which color?"},
        {"problem": "<image>Which color?", "images": ["a.png"]},
        {"problem": "<video>Which color?", "videos": ["a.mp4"]},
        {"problem": "<video>Like <image>?", "images": ["a.png"], "videos": ["clip"]},
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"answer": "red", **row}) + "\n" for row in kinds * 2))
    return path


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_all_kinds_of_rows_train_together(tmp_path: Path, family: Family, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_mixed(tmp_path / "mixed")
    arguments = small_run(tmp_path, family, f"data.train_files={rows}", f"data.val_files={rows}")
    arguments += [f"data.image_dir={rows.parent}", "data.max_prompt_length=256", "trainer.max_steps=2"]
    assert main(["train", *arguments]) == 0
    assert "8 rows" in capsys.readouterr().out
    steps = [record for record in read_log(tmp_path / "run") if "actor" in record]
    assert len(steps) == 2
    assert all(math.isfinite(record["actor"]["grad_norm"]) for record in steps)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_engine_and_trainer_agree_on_them(tmp_path: Path, family: Family, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_mixed(tmp_path / "mixed")
    arguments = small_run(tmp_path, family, f"data.train_files={rows}", f"data.image_dir={rows.parent}")
    arguments += ["data.max_prompt_length=256", "data.shuffle=false"]
    assert main(["check", "--parity", *arguments]) == 0
    assert "engine and trainer agree" in capsys.readouterr().out


def test_unreadable_videos_are_skipped_with_their_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_mixed(tmp_path / "mixed")
    whole = (rows.parent / "a.mp4").read_bytes()
    (rows.parent / "a.mp4").write_bytes(whole[: len(whole) // 2])
    files = (f"data.train_files={rows}", f"data.val_files={rows}")
    arguments = small_run(tmp_path, "qwen3_vl", *files, f"data.image_dir={rows.parent}")
    assert main(["train", *arguments, "data.max_prompt_length=256"]) == 0
    output = capsys.readouterr().out
    assert "2 of 8 rows" in output and "row 2, video 0" in output and "a.mp4" in output
    assert main(["train", *arguments, "data.max_prompt_length=256", "data.on_bad_row=stop"]) == 1
    assert "row 2, video 0" in capsys.readouterr().err
