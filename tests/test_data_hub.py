"""Both hubs' own clients against a hub on this machine. In processes of their own: they read their addresses once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.data_support import write_lines
from tests.hub_support import Hub, hub_of

READ = """
import json, sys
from foveal.data.source import load_rows
from foveal.errors import DataError
for spec in sys.argv[1:]:
    try:
        print(json.dumps(list(load_rows(spec))))
    except DataError as error:
        print(json.dumps(str(error)))
"""


def read(hub: Hub, home: Path, *specs: str, **environment: str) -> list[Any]:
    """The rows of each spec, or the message of its error, as a process finds them whose hubs are `hub`."""
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "MODELSCOPE_ENDPOINT": hub.url}
    own |= {"MODELSCOPE_CACHE": str(home / "ms"), "MODELSCOPE_HOME": str(home / "ms_home"), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", READ, *specs],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), **own, **environment},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Three training rows whose answers differ in type, and one of the split test."""
    folder = tmp_path / "repository"
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("# rows\n")
    answers = [1, "two", [3, "three"]]
    rows = [{"prompt": "q", "answer": answer} for answer in answers]
    write_lines(folder / "data" / "train-00000-of-00001.jsonl", rows)
    write_lines(folder / "data" / "test-00000-of-00001.jsonl", [{"prompt": "t", "answer": "0123"}])
    return folder


def test_hugging_face_mirror(tmp_path: Path, repository: Path) -> None:
    with hub_of(repository) as hub:
        specs = ("owner/name@train", "owner/name@train[1:]", "owner/name@test", "owner/name@val")
        train, part, test, error = read(hub, tmp_path, *specs)
        assert hub.asked
    assert [row["answer"] for row in train] == [1, "two", [3, "three"]]
    assert part == train[1:]
    assert test == [{"prompt": "t", "answer": "0123"}]
    for named in (f"HF_ENDPOINT={hub.url}", "'train', 'test'", "owner/name"):
        assert named in error


def test_hugging_face_shards_whose_types_differ(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    for number, answer in enumerate((1, "two")):
        rows = datasets.Dataset.from_list([{"prompt": "q", "answer": answer}])
        rows.to_parquet(str(folder / f"train-{number:05}-of-00002.parquet"))
    with hub_of(folder) as hub:
        (rows_found,) = read(hub, tmp_path, "owner/name")
    assert [row["answer"] for row in rows_found] == [1, "two"]


def test_modelscope(tmp_path: Path, repository: Path) -> None:
    pytest.importorskip("modelscope")
    with hub_of(repository) as hub:
        test, error = read(hub, tmp_path, "owner/name@test", "owner/name@val", USE_MODELSCOPE_HUB="1")
        assert all(path.startswith("/api/v1/") for path in hub.asked)
    assert test == [{"prompt": "t", "answer": "0123"}]
    assert "no split 'val'; it has: test, train" in error


def test_a_subset_whose_types_differ(tmp_path: Path, repository: Path) -> None:
    configuration = "configs:\n- config_name: hard\n  data_files:\n  - split: train\n    path: data/train-*.jsonl\n"
    (repository / "README.md").write_text(f"---\n{configuration}---\n")
    with hub_of(repository) as hub:
        rows, error = read(hub, tmp_path, "owner/name:hard", "owner/name:easy")
    assert [row["answer"] for row in rows] == [1, "two", [3, "three"]]
    assert "hard" in error and "easy" in error
