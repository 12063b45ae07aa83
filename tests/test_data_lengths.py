"""The length filter: kept on disk for as long as nothing that decides it changes, and the same in processes."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foveal.data import measure as measuring
from foveal.data import survey as surveying
from foveal.data.length_cache import KEPT_DAYS, Lengths, cache_path
from foveal.data.measure import measure_all
from foveal.data.processing import Processing, load_processing
from foveal.data.prompts import PromptBuilder
from foveal.data.survey import look_at_rows, survey
from foveal.errors import DataError
from foveal.quickstart.tiny import build_tiny
from tests.data_support import builder_of, noise, picture_rows, write_lines


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def processing(model: Path) -> Processing:
    return load_processing(str(model), min_pixels=3136, max_pixels=200_704)


@pytest.fixture(autouse=True)
def kept(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, in which everything is kept however little time it took."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("HF_HOME", str(folder))
    monkeypatch.setattr(surveying, "KEPT_FROM_SECONDS", -1.0)
    return folder / "foveal" / "prompt_lengths"


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows that are rendered from now on."""
    rows: list[int] = []
    draft = PromptBuilder.draft

    def watched(self: PromptBuilder, index: int) -> Any:
        rows.append(index)
        return draft(self, index)

    monkeypatch.setattr(PromptBuilder, "draft", watched)
    return rows


def rows_in(folder: Path, count: int = 6) -> str:
    return write_lines(folder / "rows.jsonl", picture_rows(folder, count))


def builder_in(processing: Processing, folder: Path, **options: Any) -> PromptBuilder:
    return builder_of(processing, str(folder / "rows.jsonl"), image_dir=str(folder), **options)


def test_a_second_start_looks_at_no_row_and_finds_the_same(
    processing: Processing, tmp_path: Path, looked: list[int]
) -> None:
    rows_in(tmp_path)
    first = survey(builder_in(processing, tmp_path), "train")
    assert sorted(looked) == list(range(6))
    looked.clear()
    assert survey(builder_in(processing, tmp_path), "train") == first
    with pytest.raises(DataError, match="6 of 6 rows dropped as longer than 20 tokens"):
        survey(builder_in(processing, tmp_path, max_prompt_length=20), "train")
    assert not looked


def test_only_rows_whose_pictures_changed_are_looked_at_again(
    processing: Processing, tmp_path: Path, looked: list[int]
) -> None:
    rows_in(tmp_path)
    before, _ = look_at_rows(builder_in(processing, tmp_path), "train")
    noise(448, 448).save(tmp_path / "3.jpg")
    looked.clear()
    after, _ = look_at_rows(builder_in(processing, tmp_path), "train")
    assert looked == [3]
    assert after.tokens[3] == before.tokens[3] - 4 + 256
    assert (np.delete(after.tokens, 3) == np.delete(before.tokens, 3)).all()
    looked.clear()
    look_at_rows(builder_in(processing, tmp_path), "train")
    assert not looked


def test_a_row_that_was_repaired_is_used(processing: Processing, tmp_path: Path) -> None:
    rows_in(tmp_path)
    (tmp_path / "2.jpg").rename(tmp_path / "away.jpg")
    assert survey(builder_in(processing, tmp_path), "train").usable == [0, 1, 3, 4, 5]
    (tmp_path / "away.jpg").rename(tmp_path / "2.jpg")
    assert survey(builder_in(processing, tmp_path), "train").usable == list(range(6))
    (tmp_path / "4.jpg").unlink()
    assert survey(builder_in(processing, tmp_path), "train").usable == [0, 1, 2, 3, 5]


def test_everything_that_decides_lengths_decides_the_file(model: Path, processing: Processing, tmp_path: Path) -> None:
    def path(changed: Processing = processing, **options: Any) -> Path | None:
        return cache_path(builder_in(changed, tmp_path, **options))

    rows_in(tmp_path)
    (tmp_path / "f.jinja").write_text("{{ content }}")
    paths = [path(), path(format_prompt=str(tmp_path / "f.jinja")), path(system_prompt="Be brief.")]
    (tmp_path / "f.jinja").write_text("{{ content }} Go.")
    paths.append(path(format_prompt=str(tmp_path / "f.jinja")))
    paths.append(path(load_processing(str(model), min_pixels=3136, max_pixels=100_352)))
    paths.append(path(load_processing(str(model), min_pixels=3136, max_pixels=200_704, chat_template="{{ messages }}")))
    paths.append(cache_path(builder_of(processing, f"{tmp_path / 'rows.jsonl'}@train[:3]", image_dir=str(tmp_path))))
    rows_in(tmp_path, 7)
    paths.append(path())
    assert None not in paths and len(set(paths)) == len(paths)
    assert path(seed=5, rollout_batch_size=3, max_prompt_length=9) == path()


def test_a_format_prompt_in_the_home_folder(
    processing: Processing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "f.jinja").write_text("{{ content }} Go.")
    rows_in(tmp_path)
    assert len(survey(builder_in(processing, tmp_path, format_prompt="~/f.jinja"), "train").usable) == 6


def test_the_same_model_at_another_place_is_the_same(model: Path, processing: Processing, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    assert load_processing(str(copy), min_pixels=3136, max_pixels=200_704).identity() == processing.identity()


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 no archive", None])
def test_a_damaged_file_is_made_again_without_a_word(
    processing: Processing,
    tmp_path: Path,
    looked: list[int],
    kept: Path,
    damage: bytes | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows_in(tmp_path)
    first = survey(builder_in(processing, tmp_path), "train")
    [file] = kept.iterdir()
    whole = file.read_bytes()
    middle = len(whole) // 2
    file.write_bytes(whole[:middle] + b"\xff" * 40 + whole[middle + 40 :] if damage is None else damage)
    looked.clear()
    assert survey(builder_in(processing, tmp_path), "train") == first
    assert len(looked) == 6 and file.stat().st_size == len(whole)
    assert not "".join(capsys.readouterr())


def test_where_nothing_can_be_written_nothing_is(processing: Processing, tmp_path: Path, kept: Path) -> None:
    rows_in(tmp_path)
    kept.parent.mkdir()
    kept.write_text("a file where the folder should be")
    assert len(survey(builder_in(processing, tmp_path), "train").usable) == 6


def test_files_that_nobody_uses_any_more_go(processing: Processing, tmp_path: Path, kept: Path) -> None:
    kept.mkdir(parents=True)
    for name, days in (("old.npz", KEPT_DAYS + 1), ("cut.tmp", KEPT_DAYS + 1), ("used.npz", KEPT_DAYS - 1)):
        (kept / name).write_bytes(b"")
        then = (kept / name).stat().st_mtime - days * 86400
        os.utime(kept / name, (then, then))
    rows_in(tmp_path)
    survey(builder_in(processing, tmp_path), "train")
    names = {path.name for path in kept.iterdir()}
    assert "used.npz" in names and len(names) == 2


def test_names_of_any_kind_are_kept(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff new\nline.png")
    lengths = Lengths(2)
    lengths.add([measuring.Measured(1, 30, 1, files=(measuring.stamp(tmp_path / name),))])
    lengths.save(tmp_path / "x.npz")
    loaded = Lengths.load(tmp_path / "x.npz", 2)
    loaded.forget_changed()
    assert loaded.unknown() == [0]
    noise(8, 8).save(tmp_path / name)
    loaded.forget_changed()
    assert loaded.unknown() == [0, 1]


@pytest.fixture
def in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything after the first few rows goes to two processes."""
    monkeypatch.setattr(measuring, "TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(measuring, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(measuring, "CHUNK", 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


def here(processing: Processing, folder: Path) -> list[tuple[int, int, int, str]]:
    builder = builder_in(processing, folder)
    found = [one for part in measure_all(builder, range(len(builder.rows)), 1) for one in part]
    return sorted((one.row, one.tokens, one.images, str(one.fault)) for one in found)


@pytest.mark.usefixtures("in_processes")
def test_processes_find_the_same(processing: Processing, tmp_path: Path, looked: list[int]) -> None:
    rows_in(tmp_path, 15)
    (tmp_path / "11.jpg").unlink()
    expected = here(processing, tmp_path)
    looked.clear()
    builder = builder_in(processing, tmp_path)
    found = [one for part in measure_all(builder, range(15), 2) for one in part]
    assert sorted((one.row, one.tokens, one.images, str(one.fault)) for one in found) == expected
    assert sorted(looked) == [0, 1]  # the others elsewhere


@pytest.mark.usefixtures("in_processes")
@pytest.mark.parametrize("how", ["dies", "raises", "hangs"])
def test_what_a_process_leaves_undone_is_done_here(
    processing: Processing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    rows_in(tmp_path, 15)
    expected = here(processing, tmp_path)
    monkeypatch.setattr(measuring, "STALLED_SECONDS", 1.0)
    run, sizes = os.getpid(), PromptBuilder.draft

    def faulty(self: PromptBuilder, index: int) -> Any:
        if os.getpid() != run and index == 8:
            if how == "dies":
                os._exit(1)
            if how == "hangs":
                time.sleep(600)
            raise RuntimeError("a bug")
        return sizes(self, index)

    monkeypatch.setattr(PromptBuilder, "draft", faulty)
    builder = builder_in(processing, tmp_path)
    found = [one for part in measure_all(builder, range(15), 2) for one in part]
    assert sorted((one.row, one.tokens, one.images, str(one.fault)) for one in found) == expected


@pytest.mark.usefixtures("in_processes")
def test_processes_end_when_nobody_wants_their_results(
    processing: Processing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = PromptBuilder.draft
    rows_in(tmp_path, 15)
    parts = measure_all(builder_in(processing, tmp_path), range(15), 2)
    next(parts)
    monkeypatch.setattr(
        PromptBuilder, "draft", lambda self, index: time.sleep(600) if index > 3 else draft(self, index)
    )
    next(parts)
    assert measuring.multiprocessing.active_children()
    parts.close()
    assert not measuring.multiprocessing.active_children()


def test_all_wrong_rows_are_named_at_once(processing: Processing, tmp_path: Path) -> None:
    rows = [{"prompt": "q", "answer": ""}, {"prompt": "<image>q", "answer": ""}, {"prompt": 7, "answer": ""}]
    write_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=r"row 1 of .*1 <image> mark(.|\n)*2 of 3 rows are wrong: rows 1, 2\."):
        survey(builder_in(processing, tmp_path), "train")
