"""Samples on disk: readable by pandas, whole after a crash, without duplicates after a resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from foveal.cli import main
from foveal.track.sample_files import SampleFiles, read_tokens
from foveal.types import Media
from tests.small_run import small_run
from tests.view_support import byte_tokenizer, group, picture, response, write_part


def frame(run: Path) -> pd.DataFrame:
    return pd.read_parquet(run / "samples/answers")


def test_pandas_reads_what_was_written(tmp_path: Path) -> None:
    write_part(tmp_path, "train", 3, [group(5, [response("8 green", 1.0), response("7 red", 0.1)])])
    table = frame(tmp_path)
    assert table[["step", "split", "row", "answer"]].values.tolist() == [[3, "train", 5, 0], [3, "train", 5, 1]]
    first = table.iloc[0]
    assert (first.response, first.ground_truth, first.finish_reason, first.prompt) == (
        "8 green",
        "8 green",
        "stop",
        "how tall?",
    )
    assert dict(first.rewards) == {"overall": 1.0, "accuracy": 1.0}
    assert first.advantage == pytest.approx(0.5)
    assert first.token_ids.tolist() == byte_tokenizer().encode("8 green")
    np.testing.assert_allclose(first.trainer_logprobs - first.logprobs, 0.02, atol=1e-6)
    assert len(first.entropies) == first.length == len(first.token_ids)


def test_numbers_that_nobody_computed_are_null(tmp_path: Path) -> None:
    write_part(tmp_path, "val", 0, [group(0, [response("8", None, trained=False)])])
    first = frame(tmp_path).iloc[0]
    assert np.isnan(first.overall) and np.isnan(first.advantage)
    assert first.trainer_logprobs is None and first.entropies is None


def test_the_engines_own_logprobs_are_not_taken_for_the_trainers(tmp_path: Path) -> None:
    answer = response("8")
    answer.columns["old_logprobs"] = answer.logprobs
    write_part(tmp_path, "train", 1, [group(0, [answer])])
    assert frame(tmp_path).iloc[0].trainer_logprobs is None


def test_parts_with_different_rewards_read_together(tmp_path: Path) -> None:
    write_part(tmp_path, "val", 0, [group(0, [response("8", rewards={"overall": 1.0})])])
    write_part(tmp_path, "val", 1, [group(0, [response("8", rewards={"overall": 0.0, "style": 0.5})])])
    assert [dict(rewards) for rewards in frame(tmp_path).rewards] == [{"overall": 1.0}, {"overall": 0.0, "style": 0.5}]


def test_each_picture_is_kept_once(tmp_path: Path) -> None:
    red, green = picture(), picture((0, 255, 0))
    write_part(tmp_path, "val", 0, [group(0, [response("8")], data=red), group(1, [response("8")], data=green)])
    write_part(tmp_path, "val", 1, [group(0, [response("8")], data=red), group(1, [response("8")], data=green)])
    kept = {path.name: path.read_bytes() for path in (tmp_path / "samples/images").iterdir()}
    assert sorted(kept.values()) == sorted([red, green])
    assert {name for images in frame(tmp_path).images for name in images} == set(kept)


def test_videos_and_unknown_formats_are_named_but_not_kept(tmp_path: Path) -> None:
    one = group(0, [response("8")])
    one.prompt.media += [Media("video", b"\x00" * 99, "clip.mp4"), Media("image", b"<svg/>", "drawing.svg")]
    write_part(tmp_path, "val", 0, [one])
    first = frame(tmp_path).iloc[0]
    assert first.images[1:].tolist() == ["", ""]
    assert first.media[1:].tolist() == ["clip.mp4", "drawing.svg"]


def test_a_step_that_is_done_again_replaces_its_answers_and_those_after_it(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_part(tmp_path, "train", step, [group(0, [response("7 red")])])
    write_part(tmp_path, "train", 2, [group(0, [response("8 green")])], after=1)
    table = frame(tmp_path)
    assert list(zip(table.step, table.response, strict=True)) == [(1, "7 red"), (2, "8 green")]


def test_nothing_is_removed_before_something_is_written(tmp_path: Path) -> None:
    write_part(tmp_path, "train", 3, [group(0, [response("8")])])
    SampleFiles(tmp_path, byte_tokenizer(), after=1).part("train", 2)
    assert len(frame(tmp_path)) == 1


def test_a_crash_while_writing_leaves_the_other_parts_readable(tmp_path: Path) -> None:
    write_part(tmp_path, "val", 0, [group(0, [response("8")])])
    folder = tmp_path / "samples/answers"
    (folder / ".val-00000001.parquet").write_bytes((folder / "val-00000000.parquet").read_bytes()[:200])
    assert len(frame(tmp_path)) == 1


def test_tokens_are_written_once_and_after_half_a_line(tmp_path: Path) -> None:
    write_part(tmp_path, "val", 0, [group(0, [response("8 green")])])
    tokens = tmp_path / "samples/tokens.jsonl"
    with open(tokens, "a") as file:
        file.write('{"id": 9, "te')
    write_part(tmp_path, "val", 1, [group(0, [response("8 green 7")])])
    found = [token for token, _ in read_tokens(tokens)]
    assert sorted(found) == sorted(set(byte_tokenizer().encode("8 green 7")))


def test_a_token_that_is_part_of_a_letter_is_kept_as_bytes(tmp_path: Path) -> None:
    write_part(tmp_path, "val", 0, [group(0, [response("高")])])
    meanings = dict(read_tokens(tmp_path / "samples/tokens.jsonl"))
    pieces = [meanings[token] for token in byte_tokenizer().encode("高")]
    assert b"".join(piece if isinstance(piece, bytes) else piece.encode() for piece in pieces) == "高".encode()
    assert all(isinstance(piece, bytes) for piece in pieces)


def test_a_lone_surrogate_stops_nothing(tmp_path: Path) -> None:
    write_part(tmp_path, "val", 0, [group(0, [replace(response("8"), text="a\ud800b")])])
    assert frame(tmp_path).iloc[0].response == r"a\ud800b"


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "samples").write_text("in the way")
    files = SampleFiles(tmp_path, byte_tokenizer())
    for step in (1, 2):
        part = files.part("val", step)
        part.add([group(0, [response("8")])])
        part.write()
    assert capsys.readouterr().err.count("the run goes on without keeping samples") == 1


@pytest.mark.parametrize(("free", "said"), [(10**9, False), (10**6, True)])
def test_samples_that_may_fill_the_disk_are_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, free: int, said: bool
) -> None:
    """No test can have a disk of a size; what is free is the one thing that is made up."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    files = SampleFiles(tmp_path, byte_tokenizer())
    for step in (1, 2):
        before = files.written
        part = files.part("train", step)
        part.add([group(0, [response("8")], data=picture(size=50 + step))])
        part.write()
        files.foresee(files.written - before, 100)
    there = [path for path in tmp_path.rglob("*") if path.suffix in (".png", ".parquet")]
    assert files.written == sum(path.stat().st_size for path in there)
    assert capsys.readouterr().err.count("trainer.log_training_samples=8 keeps") == said


def test_a_run_keeps_all_validation_answers_and_some_of_training(tmp_path: Path) -> None:
    changes = ("trainer.val_freq=1", "trainer.log_training_samples=2", "worker.rollout.val_override_config.n=1")
    assert main(["train", *small_run(tmp_path, "qwen2_5_vl", *changes)]) == 0
    table = frame(tmp_path / "run")
    counts = table.groupby("split").size().to_dict()
    assert counts == {"train": 2 * 4, "val": 8}
    train = table[table.split == "train"]
    assert train.entropies.notna().all() and train.advantage.notna().all()
    np.testing.assert_allclose(np.concatenate(train.trainer_logprobs), np.concatenate(train.logprobs), atol=1e-3)
    assert not (tmp_path / "run/samples/tokens.jsonl").read_text().count("base64")
    assert json.loads((tmp_path / "run/experiment_config.json").read_text())["trainer"]["log_training_samples"] == 2


def test_zero_keeps_no_training_answers(tmp_path: Path) -> None:
    part = SampleFiles(tmp_path, byte_tokenizer()).part("train", 1)
    part.add([])
    part.write()
    assert not (tmp_path / "samples").exists()


def test_a_resumed_run_keeps_the_samples_of_the_steps_before(tmp_path: Path) -> None:
    args = small_run(tmp_path, "qwen2_5_vl", "trainer.log_training_samples=1")
    assert main(["train", *args]) == 0
    assert main(["train", *args, "trainer.max_steps=2"]) == 0
    table = frame(tmp_path / "run")
    assert sorted(table[table.split == "train"].step) == [1] * 4 + [2] * 4
