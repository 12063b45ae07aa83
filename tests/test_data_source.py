from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import datasets
import pytest
from PIL import Image

from foveal.data.source import load_rows, parse_spec
from foveal.errors import DataError
from tests.data_support import encoded, noise, write_lines

ROW = {"prompt": "q", "answer": "a"}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a network connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def write_parquet(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(str(path))


def test_jsonl_keeps_each_rows_own_types(tmp_path: Path) -> None:
    answers = [3, "three", [3], None, {"x": 1}]
    rows = load_rows(write_lines(tmp_path / "a.jsonl", [{"prompt": "q", "answer": a} for a in answers]))
    assert [row["answer"] for row in rows] == answers


def test_jsonl_columns_are_those_of_any_row(tmp_path: Path) -> None:
    rows = load_rows(write_lines(tmp_path / "a.jsonl", [ROW, {**ROW, "images": []}]))
    assert rows.columns == ["prompt", "answer", "images"]


def test_broken_json_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "q"}\n\n{"prompt": \n')
    rows = load_rows(str(path))
    assert rows[0] == {"prompt": "q"}
    with pytest.raises(DataError, match=r"a\.jsonl, line 3 is not valid JSON"):
        rows[1]


def test_a_file_without_one_readable_line_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("not\njson\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 1 is not valid JSON"):
        load_rows(str(tmp_path / "a.jsonl"))


def test_json_list_and_json_lines_in_a_json_file(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps([ROW, ROW], indent=2))
    write_lines(tmp_path / "lines.json", [ROW, ROW, ROW])
    assert len(load_rows(str(tmp_path / "list.json"))) == 2
    assert len(load_rows(str(tmp_path / "lines.json"))) == 3


def test_csv_cells_stay_strings(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompt,answer,images\n"<image>a, b?",0123,red.png\n')
    assert load_rows(str(tmp_path / "a.csv"))[0] == {"prompt": "<image>a, b?", "answer": "0123", "images": "red.png"}


def test_csv_row_with_a_missing_cell_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer\nq,a\nq\n")
    with pytest.raises(DataError, match="row 1"):
        load_rows(str(tmp_path / "a.csv"))


def test_parquet_pictures_stay_encoded(tmp_path: Path) -> None:
    picture = encoded(noise(8, 8))
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "one": datasets.Image(), "images": datasets.List(datasets.Image())}
    )
    item = {"bytes": picture, "path": None}
    rows = {"prompt": ["q"], "one": [item], "images": [[item, item]]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "a.parquet"))
    row = load_rows(str(tmp_path / "a.parquet"))[0]
    assert row["one"] == item
    assert row["images"] == [item, item]
    assert not isinstance(row["one"], Image.Image)


@pytest.mark.parametrize("split", ["train", "test"])
def test_folder_split_is_chosen_by_shard_names(tmp_path: Path, split: str) -> None:
    (tmp_path / "README.md").write_text("# data")
    (tmp_path / ".gitattributes").write_text("x")
    (tmp_path / "dataset_infos.json").write_text("{}")
    for name, count in (("train-00000-of-00002", 2), ("train-00001-of-00002", 1), ("test-00000-of-00001", 4)):
        write_parquet(tmp_path / "data" / f"{name}.parquet", [{**ROW, "n": i} for i in range(count)])
    rows = load_rows(f"{tmp_path}@{split}")
    assert [row["n"] for row in rows] == ([0, 1, 0] if split == "train" else [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("name", "split"),
    [("val.jsonl", "validation"), ("dev/part.jsonl", "val"), ("my_eval_set.jsonl", "test"), ("rows.jsonl", "train")],
)
def test_folder_split_words(tmp_path: Path, name: str, split: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    write_lines(tmp_path / name, [ROW])
    assert len(load_rows(f"{tmp_path}@{split}")) == 1


def test_unknown_split_names_folder_and_splits(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [ROW])
    write_lines(tmp_path / "test.jsonl", [ROW])
    with pytest.raises(DataError) as error:
        load_rows(f"{tmp_path}@validation")
    assert str(tmp_path) in str(error.value)
    assert "it has: test, train" in str(error.value)


def test_folder_with_two_file_types_is_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [ROW])
    (tmp_path / "b.csv").write_text("prompt,answer\nq,a\n")
    with pytest.raises(DataError, match="mixes file types"):
        load_rows(str(tmp_path))


@pytest.mark.parametrize(
    ("part", "expected"),
    [("[:3]", [0, 1, 2]), ("[8:]", [8, 9]), ("[-2:]", [8, 9]), ("[20%:50%]", [2, 3, 4]), ("", list(range(10)))],
)
def test_part_of_a_split(tmp_path: Path, part: str, expected: list[int]) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{**ROW, "n": i} for i in range(10)])
    assert [row["n"] for row in load_rows(f"{path}@train{part}")] == expected


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "train.json"])
def test_a_single_file_has_no_other_split(tmp_path: Path, name: str) -> None:
    if name.endswith("parquet"):
        write_parquet(tmp_path / name, [ROW])
    else:
        write_lines(tmp_path / name, [ROW])
    with pytest.raises(DataError, match=rf"{name} is one file, which has no split 'test'\. Write .*\[:90%\]"):
        load_rows(f"{tmp_path / name}@test")
    assert len(load_rows(f"{tmp_path / name}@train")) == 1


@pytest.mark.parametrize("split", ["@test", "@train", ""])
def test_a_single_file_named_by_its_split(tmp_path: Path, split: str) -> None:
    assert len(load_rows(write_lines(tmp_path / "my_test.jsonl", [ROW]) + split)) == 1


def test_glob_reads_shards_in_order(tmp_path: Path) -> None:
    for name, count in (("b", 1), ("a", 2)):
        write_lines(tmp_path / f"part-{name}.jsonl", [{**ROW, "n": f"{name}{i}"} for i in range(count)])
    write_lines(tmp_path / "other.jsonl", [ROW])
    assert [row["n"] for row in load_rows(f"{tmp_path}/part-*.jsonl@train[:2]")] == ["a0", "a1"]
    assert len(load_rows(f"{tmp_path}/part-[b].jsonl")) == 1


def test_glob_takes_the_only_split_and_asks_for_one_of_several(tmp_path: Path) -> None:
    for name, count in (("test-0", 2), ("val-0", 1)):
        write_lines(tmp_path / f"{name}.jsonl", [ROW] * count)
    assert len(load_rows(f"{tmp_path}/te*.jsonl")) == 2
    assert len(load_rows(f"{tmp_path}/*.jsonl@val")) == 1
    with pytest.raises(DataError, match="no split 'train'; it has: test, validation"):
        load_rows(f"{tmp_path}/*.jsonl")


def test_split_in_a_glob_is_read_after_its_first_wildcard(tmp_path: Path) -> None:
    for task in ("a", "b"):
        folder = tmp_path / "train" / task / "shards"
        folder.mkdir(parents=True)
        write_lines(folder / "test.jsonl", [{**ROW, "n": task}])
    assert [row["n"] for row in load_rows(f"{tmp_path}/train/*/shards/*.jsonl@test")] == ["a", "b"]


def test_glob_without_a_match_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"no data file matches .*/\*\.txt"):
        load_rows(f"{tmp_path}/*.txt")


def test_tsv_cells_stay_strings(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('prompt\tanswer\n"a, b?"\t0123\n')
    assert load_rows(str(tmp_path / "a.tsv"))[0] == {"prompt": "a, b?", "answer": "0123"}


def test_parquet_shards_whose_types_differ(tmp_path: Path) -> None:
    for number, answer in enumerate((1, "two", [3])):
        write_parquet(tmp_path / f"train-{number}.parquet", [{"prompt": "q", "answer": answer}] * (number + 1))
    rows = load_rows(str(tmp_path))
    assert [row["answer"] for row in rows] == [1, "two", "two", [3], [3], [3]]
    assert rows.columns == ["prompt", "answer"]


def test_folder_that_datasets_saved(tmp_path: Path) -> None:
    splits = {"train": datasets.Dataset.from_list([ROW]), "test": datasets.Dataset.from_list([ROW, ROW])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "all"))
    splits["test"].save_to_disk(str(tmp_path / "one"))
    assert len(load_rows(f"{tmp_path / 'all'}@test")) == 2
    assert list(load_rows(str(tmp_path / "one"))) == [ROW, ROW]
    with pytest.raises(DataError, match="no split 'val'; it has: test, train"):
        load_rows(f"{tmp_path / 'all'}@val")


def test_one_data_set_that_was_saved_has_no_other_split(tmp_path: Path) -> None:
    datasets.Dataset.from_list([ROW, ROW]).save_to_disk(str(tmp_path / "all"))
    datasets.Dataset.from_list([ROW], split="validation").save_to_disk(str(tmp_path / "held"))
    assert len(load_rows(f"{tmp_path / 'all'}@train[1:]")) == 1
    assert len(load_rows(f"{tmp_path / 'held'}@val")) == 1
    with pytest.raises(DataError, match=r"no split 'test'\. Write .*/all for all of its rows, or a part"):
        load_rows(f"{tmp_path / 'all'}@test")


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_format_that_was_saved_changes_nothing(tmp_path: Path, kind: str) -> None:
    row = {"prompt": "q", "answer": 3, "images": ["a.png"]}
    saved = datasets.Dataset.from_list([row]).with_format(kind, columns=["prompt", "images"])
    saved.save_to_disk(str(tmp_path))
    found = load_rows(str(tmp_path))[0]
    assert found == row and type(found["prompt"]) is str and type(found["images"]) is list


def test_folder_with_a_subset_and_with_one_in_its_readme(tmp_path: Path) -> None:
    write_lines(tmp_path / "all.jsonl", [ROW])
    (tmp_path / "hard").mkdir()
    write_lines(tmp_path / "hard" / "train.jsonl", [ROW, ROW])
    configuration = "configs:\n- config_name: easy\n  data_files:\n  - split: dev\n    path: all.jsonl\n"
    (tmp_path / "README.md").write_text(f"---\n{configuration}---\n")
    assert len(load_rows(f"{tmp_path}:hard@train")) == 2
    assert len(load_rows(f"{tmp_path}:easy@dev")) == 1
    with pytest.raises(DataError, match="no folder 'none'"):
        load_rows(f"{tmp_path}:none")


def test_path_with_an_at_sign(tmp_path: Path) -> None:
    assert len(load_rows(write_lines(tmp_path / "data@v1.jsonl", [ROW]))) == 1


def test_missing_file_is_named() -> None:
    with pytest.raises(DataError, match=r"no file or folder nowhere/rows\.jsonl .*hub id"):
        load_rows("nowhere/rows.jsonl@train")


def test_empty_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no rows"):
        load_rows(write_lines(tmp_path / "a.jsonl", []))


def test_missing_column_suggests_the_nearest(tmp_path: Path) -> None:
    rows = load_rows(write_lines(tmp_path / "a.jsonl", [{"problem": "q", "answer": "a"}]))
    with pytest.raises(DataError) as error:
        rows.require("problems", "data.prompt_key")
    for part in ("'problems'", "data.prompt_key", "a.jsonl", "problem, answer", "Did you mean 'problem'"):
        assert part in str(error.value)


def test_hub_id_with_subset_and_part() -> None:
    spec = parse_spec("hiyouga/geometry3k:main@test[:5%]")
    assert (spec.path, spec.local, spec.subset, spec.split, spec.stop) == (
        "hiyouga/geometry3k",
        False,
        "main",
        "test",
        "5%",
    )


def test_modelscope_without_its_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_MODELSCOPE_HUB", "1")
    monkeypatch.setitem(__import__("sys").modules, "modelscope", None)
    with pytest.raises(DataError, match="pip install modelscope"):
        load_rows("owner/name@train")


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("s3://bucket/rows.jsonl@train", "is an address of no known kind"),
        ("a.jsonl, b.jsonl@a,b", "Several sources are a list"),
        ("@train", "no file or folder"),
        ("a/" * 3000 + "x.json", "no file or folder"),
    ],
)
def test_a_source_that_cannot_be_is_named_without_a_network_attempt(spec: str, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        parse_spec(spec)


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        load_rows(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_a_file_that_the_system_does_not_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match=rf"cannot read .*{name}: Input/output error"):
        load_rows(str(tmp_path / name))


def test_a_file_that_goes_away_is_named_when_it_is_missed(tmp_path: Path) -> None:
    rows = load_rows(write_lines(tmp_path / "a.jsonl", [ROW]))
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"cannot read .*a\.jsonl any more: No such file"):
        rows[0]


def test_csv_in_another_encoding_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("prompt,answer\nQué?,1\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.csv is not UTF-8 \(.*\)\. Save it as CSV in UTF-8"):
        load_rows(str(tmp_path / "a.csv"))


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_json_that_is_nested_without_end_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(DataError, match="not valid JSON"):
        load_rows(str(tmp_path / name))


def test_one_json_object_over_many_lines_says_what_is_readable(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps({"data": [{"a": 1}]}, indent=1))
    with pytest.raises(DataError, match="one list of objects"):
        load_rows(str(tmp_path / "rows.json"))
