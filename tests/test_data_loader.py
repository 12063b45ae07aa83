from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foveal.config import Config
from foveal.data.images import PictureError
from foveal.data.loader import open_loader
from foveal.data.processing import Processing, load_processing
from foveal.errors import DataError
from foveal.quickstart.tiny import build_tiny
from tests.data_support import loader_of, noise, picture_rows, write_lines


@pytest.fixture(scope="module")
def processing(tmp_path_factory: pytest.TempPathFactory) -> Processing:
    folder = build_tiny(tmp_path_factory.mktemp("model"), "qwen2_5_vl")
    return load_processing(str(folder), min_pixels=3136, max_pixels=200_704)


@pytest.fixture
def text_rows(tmp_path: Path) -> str:
    return write_lines(tmp_path / "text.jsonl", [{"prompt": f"q{i}", "answer": i} for i in range(10)])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def config_of(folder: Path, rows: list[Any], **data: Any) -> Config:
    options = {"rollout_batch_size": 4, "image_dir": str(folder), "shuffle": False, **data}
    config = Config()
    for key, value in {"train_files": write_lines(folder / "rows.jsonl", rows), **options}.items():
        setattr(config.data, key, value)
    return config


def rows_of(prompts: list[Any]) -> list[int]:
    return [prompt.row_index for prompt in prompts]


def test_order_is_a_new_permutation_each_epoch(processing: Processing, text_rows: str) -> None:
    loader = loader_of(processing, text_rows, seed=3)
    first, second = rows_of(loader.take(10)), rows_of(loader.take(10))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first == rows_of(loader_of(processing, text_rows, seed=3).take(10))
    assert first != rows_of(loader_of(processing, text_rows, seed=4).take(10))


def test_last_incomplete_batch_of_an_epoch_is_dropped(processing: Processing, text_rows: str) -> None:
    loader = loader_of(processing, text_rows, shuffle=False)
    taken = [[prompt.uid for prompt in loader.take(4)] for _ in range(3)]
    assert taken[1][0] == "train-0-4"
    assert taken[2] == [f"train-1-{row}" for row in range(4)]
    assert loader.steps_per_epoch(4) == 2


def test_small_takes_continue_in_the_same_order(processing: Processing, text_rows: str) -> None:
    whole = rows_of(loader_of(processing, text_rows).take(6))
    loader = loader_of(processing, text_rows)
    assert [row for _ in range(3) for row in rows_of(loader.take(2))] == whole


@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_resumed_loader_goes_on_exactly(processing: Processing, text_rows: str, taken: int) -> None:
    loader = loader_of(processing, text_rows)
    for _ in range(taken):
        loader.take(4)
    resumed = loader_of(processing, text_rows)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    for _ in range(4):
        assert [p.uid for p in resumed.take(4)] == [p.uid for p in loader.take(4)]


def test_resume_with_other_data_is_refused(processing: Processing, text_rows: str) -> None:
    state = loader_of(processing, text_rows).state_dict()
    with pytest.raises(DataError, match="rows was 10, is 3"):
        loader_of(processing, f"{text_rows}@train[:3]").load_state_dict(state)


def test_validation_is_one_pass_and_keeps_the_last_batch(processing: Processing, text_rows: str) -> None:
    loader = loader_of(processing, text_rows, "val", val_batch_size=4)
    for _ in range(2):
        assert [rows_of(batch) for batch in loader.batches()] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [len(batch) for batch in loader_of(processing, text_rows, "val").batches()] == [10]


def test_damaged_picture_is_named_once_and_the_next_row_taken(
    processing: Processing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, picture_rows(tmp_path, 8))
    cut(tmp_path / "2.jpg")
    loader = open_loader(config, processing, "train")
    assert rows_of(loader.take(4)) == [0, 1, 3, 4]
    assert rows_of(loader.take(4)) == [0, 1, 3, 4]
    assert len(loader) == 7
    lines = [line for line in capsys.readouterr().out.splitlines() if "skipped" in line]
    assert len(lines) == 1
    for part in ("row 2", "2.jpg", "truncated", "skipped so far: 1"):
        assert part in lines[0]


def test_skipping_does_not_change_what_a_resumed_run_sees(processing: Processing, tmp_path: Path) -> None:
    spec = write_lines(tmp_path / "rows.jsonl", picture_rows(tmp_path, 8))
    cut(tmp_path / "2.jpg")
    loader = loader_of(processing, spec, image_dir=str(tmp_path))
    expected = [[p.uid for p in loader.take(3)] for _ in range(6)]
    for done in range(6):
        first = loader_of(processing, spec, image_dir=str(tmp_path))
        for _ in range(done):
            first.take(3)
        resumed = loader_of(processing, spec, image_dir=str(tmp_path))
        resumed.load_state_dict(first.state_dict())
        assert [[p.uid for p in resumed.take(3)] for _ in range(6 - done)] == expected[done:]


def test_damaged_picture_stops_the_run_if_asked(processing: Processing, tmp_path: Path) -> None:
    config = config_of(tmp_path, picture_rows(tmp_path, 8), on_bad_row="stop")
    cut(tmp_path / "2.jpg")
    loader = open_loader(config, processing, "train")
    with pytest.raises(DataError, match=r"row 2, image 0 \(.*2\.jpg\): .*truncated") as error:
        loader.take(4)
    assert not isinstance(error.value, PictureError)


def test_every_picture_damaged_is_an_error(processing: Processing, tmp_path: Path) -> None:
    config = config_of(tmp_path, picture_rows(tmp_path, 4))
    for index in range(4):
        cut(tmp_path / f"{index}.jpg")
    loader = open_loader(config, processing, "train")
    with pytest.raises(DataError, match=r"0 usable rows.*truncated"):
        loader.take(4)


def test_files_without_a_header_or_missing_are_left_out_at_the_start(
    processing: Processing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, picture_rows(tmp_path, 8))
    (tmp_path / "1.jpg").write_bytes(b"no picture")
    (tmp_path / "5.jpg").unlink()
    assert len(open_loader(config, processing, "train")) == 6
    out = capsys.readouterr().out
    assert "2 of 8 rows have unreadable pictures: row 1, image 0" in out
    assert "5.jpg" in out
    config.data.on_bad_row = "stop"
    with pytest.raises(DataError, match="2 of 8 rows"):
        open_loader(config, processing, "train")


def long_rows(folder: Path) -> list[dict[str, Any]]:
    noise(448, 448).save(folder / "big.png")
    rows = picture_rows(folder, 12)
    rows[7] = {"prompt": "<image><image><image>q", "answer": "", "images": ["big.png"] * 3}
    return rows


def test_overlong_prompt_is_dropped_and_named(
    processing: Processing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = open_loader(config_of(tmp_path, long_rows(tmp_path), max_prompt_length=256), processing, "train")
    assert len(loader) == 11
    tokens = len(loader.builder.build(7, "x").expanded_ids)
    assert tokens > 3 * 256
    expected = f"1 of 12 rows dropped as longer than 256 tokens: row 7 ({tokens} tokens, 3 images)"
    assert expected in capsys.readouterr().out


def test_overlong_prompt_stops_the_run_without_the_filter(processing: Processing, tmp_path: Path) -> None:
    config = config_of(tmp_path, long_rows(tmp_path), max_prompt_length=256, filter_overlong_prompts=False)
    with pytest.raises(DataError, match=r"row 7 \(\d+ tokens, 3 images\)") as error:
        open_loader(config, processing, "train")
    assert "longer than 256 tokens" in str(error.value)


@pytest.mark.parametrize("filtered", [True, False])
def test_missing_mark_stops_the_run_with_and_without_filter(
    processing: Processing, tmp_path: Path, filtered: bool
) -> None:
    rows = picture_rows(tmp_path, 9)
    rows[5]["prompt"] = "no mark"
    config = config_of(tmp_path, rows, filter_overlong_prompts=filtered)
    with pytest.raises(DataError, match=r"row 5 .*: 0 <image> marks, 1 image"):
        open_loader(config, processing, "train")


def test_four_ways_to_have_no_image(processing: Processing, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = {"prompt": "q", "answer": "a"}
    rows = [text, {**text, "images": None}, {**text, "images": []}, {**text, "images": [None]}]
    loader = open_loader(config_of(tmp_path, rows + picture_rows(tmp_path, 4)), processing, "train")
    assert "train: 8 rows from" in (out := capsys.readouterr().out)
    assert "(4 with images, 4 text only)" in out
    assert [len(prompt.media) for prompt in loader.take(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_fewer_rows_than_a_batch_stops_at_the_start(processing: Processing, tmp_path: Path) -> None:
    config = config_of(tmp_path, picture_rows(tmp_path, 3))
    with pytest.raises(DataError, match=r"3 usable rows, and a batch takes 4.*data\.rollout_batch_size"):
        open_loader(config, processing, "train")
