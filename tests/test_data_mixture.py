from __future__ import annotations

from pathlib import Path

import pytest

from foveal.config.load import load_config
from foveal.config.schema_data import DataConfig
from foveal.data.processing import Processing, load_processing
from foveal.data.source import open_rows, split_weight
from foveal.errors import DataError
from foveal.quickstart.tiny import build_tiny
from tests.data_support import loader_of, write_lines


def source(path: Path, name: str, count: int) -> str:
    return write_lines(path / f"{name}.jsonl", [{"prompt": f"{name}{i}", "answer": i} for i in range(count)])


@pytest.fixture(scope="module")
def processing(tmp_path_factory: pytest.TempPathFactory) -> Processing:
    return load_processing(str(build_tiny(tmp_path_factory.mktemp("model"), "qwen3")))


@pytest.mark.parametrize(
    ("weight", "expected"),
    [("", "b0 b1 b2 b3"), ("*2", "b0 b1 b2 b3 b0 b1 b2 b3"), ("*0.5", "b0 b2"), ("*1.5", "b0 b1 b2 b3 b0 b2")],
)
def test_sources_follow_each_other_as_often_as_their_weight(tmp_path: Path, weight: str, expected: str) -> None:
    rows = open_rows(DataConfig(), [source(tmp_path, "a", 1), source(tmp_path, "b", 4) + weight])
    assert [row["prompt"] for row in rows] == ["a0", *expected.split()]


def test_a_part_of_a_split_with_a_weight(tmp_path: Path) -> None:
    rows = open_rows(DataConfig(), source(tmp_path, "a", 5) + "@train[3:]*2")
    assert [row["prompt"] for row in rows] == ["a3", "a4", "a3", "a4"]


def test_a_file_whose_name_ends_like_a_weight(tmp_path: Path) -> None:
    path = source(tmp_path, "a", 1)
    Path(path).rename(f"{path}*2")
    assert split_weight(f"{path}*2") == (f"{path}*2", 1.0)


def test_a_weight_that_leaves_no_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl: none of its 2 rows is left with the weight 0\.1"):
        open_rows(DataConfig(), source(tmp_path, "a", 2) + "*0.1")


def test_a_row_is_named_by_its_own_source(tmp_path: Path) -> None:
    a, b = source(tmp_path, "a", 2), source(tmp_path, "b", 2)
    rows = open_rows(DataConfig(), [a, f"{b}*2"])
    assert rows.place(5) == f"row 1 of {b}"
    assert rows.source == f"{a} + {b}*2"


def test_a_source_without_the_answer_column_is_named(tmp_path: Path) -> None:
    lacking = write_lines(tmp_path / "b.jsonl", [{"prompt": "q", "anser": 1}])
    with pytest.raises(DataError, match=r"b\.jsonl has no column 'answer'.*Did you mean 'anser'"):
        open_rows(DataConfig(), [source(tmp_path, "a", 2), lacking])


def test_identity_tells_weights_and_files_apart(tmp_path: Path) -> None:
    a, b = source(tmp_path, "a", 2), source(tmp_path, "b", 2)
    found = {open_rows(DataConfig(), sources).identity for sources in ([a, b], [b, a], [a, f"{b}*2"], [a])}
    assert len(found) == 4 and "" not in found


def test_a_mixture_resumes_where_it_stopped(processing: Processing, tmp_path: Path) -> None:
    sources = [source(tmp_path, "a", 3), source(tmp_path, "b", 4) + "*2"]
    whole = loader_of(processing, sources, seed=3)
    expected = [[prompt.uid for prompt in whole.take(4)] for _ in range(5)]
    first = loader_of(processing, sources, seed=3)
    taken = [[prompt.uid for prompt in first.take(4)] for _ in range(2)]
    second = loader_of(processing, sources, seed=3)
    second.load_state_dict(first.state_dict())
    taken += [[prompt.uid for prompt in second.take(4)] for _ in range(3)]
    assert taken == expected
    assert len({uid for batch in expected for uid in batch}) == 20


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.jsonl@train[:5]*2", "a.jsonl@train[:5]*2"),
        ("[a.jsonl, b.jsonl*2]", ["a.jsonl", "b.jsonl*2"]),
        ('["a/b@train[:5]*0.5", 7]', ["a/b@train[:5]*0.5", "7"]),
        ("0123", "0123"),
    ],
)
def test_sources_on_the_command_line(text: str, value: object) -> None:
    assert load_config(["worker.rollout.n=2", f"data.train_files={text}"]).data.train_files == value


def test_sources_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("data:\n  train_files:\n    - a.jsonl*2\n    - owner/name:main@train[:10%]\n")
    config = load_config(["worker.rollout.n=2", f"config={tmp_path / 'c.yaml'}"])
    assert config.data.train_files == ["a.jsonl*2", "owner/name:main@train[:10%]"]
