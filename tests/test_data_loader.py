from __future__ import annotations

import gc
import json
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from foveal.config import Config
from foveal.data.feature_cache import FeatureCache
from foveal.data.images import PictureError
from foveal.data.loader import PromptLoader, open_loader
from foveal.data.processing import Processing, load_processing
from foveal.errors import DataError
from foveal.quickstart.tiny import build_tiny
from foveal.types import Prompt
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


class Unprepared(PromptLoader):
    """Builds every batch when it is asked for."""

    def _prepare(self, rows: list[int], epoch: int) -> None:
        pass


def finish_background() -> None:
    """Waits until what is being prepared is ready, which also shows that the threads end."""
    for thread in threading.enumerate():
        if thread.name == "foveal-ahead":
            thread.join(timeout=60)
            assert not thread.is_alive()


def built_ahead(loader: PromptLoader, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The uids of what gets built in the background from now on."""
    uids: list[str] = []
    build = loader.builder.build

    def watched(index: int, uid: str) -> Prompt:
        if threading.current_thread().name == "foveal-ahead":
            uids.append(uid)
        return build(index, uid)

    monkeypatch.setattr(loader.builder, "build", watched)
    return uids


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


def test_resume_with_as_many_other_rows_is_refused(processing: Processing, tmp_path: Path) -> None:
    spec = write_lines(tmp_path / "rows.jsonl", picture_rows(tmp_path, 8))
    (tmp_path / "2.jpg").rename(tmp_path / "away.jpg")
    state = loader_of(processing, spec, image_dir=str(tmp_path)).state_dict()
    (tmp_path / "away.jpg").rename(tmp_path / "2.jpg")
    (tmp_path / "5.jpg").unlink()
    with pytest.raises(DataError, match="usable was"):
        loader_of(processing, spec, image_dir=str(tmp_path)).load_state_dict(state)


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


def test_every_row_that_is_left_out_is_written_down(processing: Processing, tmp_path: Path) -> None:
    rows = long_rows(tmp_path)
    (tmp_path / "1.jpg").write_bytes(b"no picture")
    cut(tmp_path / "2.jpg")
    loader = open_loader(config_of(tmp_path, rows, max_prompt_length=256), processing, "train")
    account = tmp_path / "left_out_rows.jsonl"
    loader.keep_account(account)
    loader.take(4)
    lines = [json.loads(line) for line in account.read_text().splitlines()]
    found = [line["reason"].partition(":")[0].partition(",")[0] for line in lines]
    assert found == ["row 7", "row 1", "row 2"]  # too long, unreadable at the start, damaged when it was decoded
    assert "tokens with 3 images" in lines[0]["reason"] and {line["split"] for line in lines} == {"train"}


def test_a_file_name_that_is_no_utf8_is_written_down(processing: Processing, tmp_path: Path) -> None:
    rows = picture_rows(tmp_path, 5)
    rows[1]["images"] = ["图\udce9.jpg"]
    loader = open_loader(config_of(tmp_path, rows), processing, "train")
    loader.keep_account(tmp_path / "left_out_rows.jsonl")
    line = (tmp_path / "left_out_rows.jsonl").read_text(encoding="utf-8")
    assert "图\\udce9.jpg" in line and "图\udce9.jpg" in json.loads(line)["reason"]


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


def test_the_following_batch_is_built_meanwhile(
    processing: Processing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = open_loader(config_of(tmp_path, picture_rows(tmp_path, 10)), processing, "train")
    ahead = built_ahead(loader, monkeypatch)
    for following in ("train-0-4", "train-1-0", "train-1-4"):
        loader.take(4)
        finish_background()
        assert following in ahead[-4:]
    taken = [prompt.uid for prompt in loader.take(4)]
    finish_background()
    assert sorted(ahead[8:12]) == taken and len(ahead) == 16


@pytest.mark.parametrize("hurried", [True, False])
@pytest.mark.parametrize("counts", [[4], [3, 5, 1]])
def test_preparing_changes_nothing_but_the_time(
    processing: Processing, tmp_path: Path, counts: list[int], hurried: bool
) -> None:
    spec = write_lines(tmp_path / "rows.jsonl", picture_rows(tmp_path, 14))
    for damaged in (2, 3, 11):
        cut(tmp_path / f"{damaged}.jpg")
    prepared = loader_of(processing, spec, image_dir=str(tmp_path), seed=5)
    plain = Unprepared(prepared.builder, range(14), "train")
    for step in range(12):  # of 11 good rows: four epochs
        count = counts[step % len(counts)]
        for ours, expected in zip(prepared.take(count), plain.take(count), strict=True):
            assert (ours.uid, ours.expanded_ids, ours.media) == (expected.uid, expected.expanded_ids, expected.media)
            assert ours.features is not None and expected.features is not None
            assert ours.features["pixel_values"].equal(expected.features["pixel_values"])
        if not hurried:
            finish_background()
        assert prepared.state_dict() == plain.state_dict()
        assert prepared.skipped == plain.skipped
    assert prepared.state_dict()["epoch"] >= 2


def test_a_damaged_picture_is_told_when_its_batch_is_taken(
    processing: Processing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = open_loader(config_of(tmp_path, picture_rows(tmp_path, 9)), processing, "train")
    cut(tmp_path / "5.jpg")
    loader.take(4)
    finish_background()
    assert "skipped" not in capsys.readouterr().out and not loader.skipped
    assert rows_of(loader.take(4)) == [4, 6, 7, 8]
    assert capsys.readouterr().out.count("skipped row 5") == 1


def test_an_error_met_while_preparing_is_raised_by_the_take_it_belongs_to(
    processing: Processing, tmp_path: Path
) -> None:
    loader = open_loader(config_of(tmp_path, picture_rows(tmp_path, 9), on_bad_row="stop"), processing, "train")
    cut(tmp_path / "5.jpg")
    assert rows_of(loader.take(4)) == [0, 1, 2, 3]
    finish_background()
    before = loader.state_dict()
    for _ in range(2):
        with pytest.raises(DataError, match=r"row 5, image 0 \(.*5\.jpg\): .*truncated.*data\.on_bad_row=skip"):
            loader.take(4)
        assert loader.state_dict() == before


def test_a_loader_that_is_set_back_forgets_what_it_prepared(processing: Processing, text_rows: str) -> None:
    loader = loader_of(processing, text_rows, shuffle=False)
    start = loader.state_dict()
    assert rows_of(loader.take(4)) == [0, 1, 2, 3]
    loader.load_state_dict(start)
    assert [rows_of(loader.take(4)) for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_validation_prepares_its_next_batch(
    processing: Processing, text_rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_of(processing, text_rows, "val", val_batch_size=4)
    ahead = built_ahead(loader, monkeypatch)
    counts = []
    for _ in loader.batches():
        finish_background()
        counts.append(len(ahead))
    assert counts == [4, 6, 6]
    assert sorted(ahead) == [f"val-0-{row}" for row in range(4, 10)]


def test_a_prepared_batch_takes_no_room_from_the_one_in_use(
    processing: Processing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = open_loader(config_of(tmp_path, picture_rows(tmp_path, 8)), processing, "train")
    features = processing.features(loader.builder.build(0, "x"))
    cache = FeatureCache(5 * sum(value.nbytes for value in features.values()))
    monkeypatch.setattr(processing, "_feature_cache", cache)
    in_use = loader.take(4)
    finish_background()
    assert all(prompt.features for prompt in in_use)
    assert cache.limit * 0.99 < cache.used <= cache.limit  # one of the prepared ones found room
    in_use = loader.take(4)
    assert rows_of(in_use) == [4, 5, 6, 7] and all(prompt.features for prompt in in_use)


def test_the_most_images_of_a_prompt_are_known(processing: Processing, tmp_path: Path) -> None:
    rows = long_rows(tmp_path)  # three pictures in a row that is too long
    rows.append({"prompt": "<image><image>q", "answer": "", "images": ["0.jpg", "1.jpg"]})
    config = config_of(tmp_path, rows, max_prompt_length=256)
    assert open_loader(config, processing, "train").most_images == 2
    config.data.max_prompt_length = 4096
    assert open_loader(config, processing, "train").most_images == 3
    config.data.val_files = write_lines(tmp_path / "val.jsonl", [{"prompt": "q", "answer": "a"}])
    assert open_loader(config, processing, "val").most_images == 0


def test_nothing_but_the_batch_in_use_and_the_next_is_held(
    processing: Processing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processing, "_feature_cache", FeatureCache())
    loader = open_loader(config_of(tmp_path, picture_rows(tmp_path, 10), shuffle=True), processing, "train")
    refs: list[weakref.ref[Prompt]] = []
    for _ in range(30):
        prompts = loader.take(4)
        for prompt in prompts:
            processing.features(prompt)
        finish_background()
        refs += [weakref.ref(prompt) for prompt in prompts]
    assert [ref() for ref in refs if ref() is not None] == prompts
    assert len(loader._ahead) == 4
    size = sum(value.nbytes for value in processing.features(prompts[0]).values())
    gc.collect()
    assert processing._feature_cache.used == 8 * size
