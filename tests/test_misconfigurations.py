"""The set-ups for `foveal check`: all can be written, their rewards load and score, and the halves are as recorded.

What `foveal check` says of them is tested elsewhere.
"""

from __future__ import annotations

import importlib.util
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.misconfigurations import ALL, Case, cases
from tests.misconfigurations.make_index import make_index


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("case_reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def score(
    module: Any, rows: list[dict[str, Any]], responses: list[str], truth_key: str, kwargs: dict[str, Any]
) -> list:
    inputs = [
        {"response": response, "response_length": len(response) // 4 + 1, "ground_truth": row[truth_key]}
        for row, response in zip(rows, responses, strict=True)
    ]
    if module.REWARD_TYPE == "sequential":
        return [module.compute_score(one, **kwargs) for one in inputs]
    return module.compute_score(inputs, **kwargs)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a reward file opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_writes_and_scores(case: Case, tmp_path: Path) -> None:
    overrides = dict(line.split("=", 1) for line in case.write(tmp_path, "some/model"))
    assert overrides["worker.actor.model.model_path"] == "some/model"
    rows = [json.loads(line) for line in Path(overrides["data.train_files"]).read_text().splitlines()]
    assert 12 <= len(rows) <= 30
    assert ("data.format_prompt" in overrides) == (case.prompt is not None)
    for row in rows:
        assert row["problem"]
        for name in row.get("images", []):
            Image.open(tmp_path / name).verify()

    path, function = overrides["worker.reward.reward_function"].rsplit(":", 1)
    assert function == "compute_score"
    kwargs = json.loads(overrides.get("worker.reward.reward_function_kwargs", "{}"))
    key = overrides["data.answer_key"]
    responses = ["", "I think so.", r"<think>7 of 9</think> <answer>7</answer> \boxed{7} Answer: 7 答案：7"]
    for response in responses:
        scores = score(load(Path(path)), rows[:2], [response] * 2, key, kwargs)
        assert len(scores) == 2
        for one in scores:
            assert isinstance(one["overall"] if isinstance(one, dict) else one, float)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_is_the_same_each_time(case: Case, tmp_path: Path) -> None:
    for name in ("a", "b"):
        case.write(tmp_path / name)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert files
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_halves() -> None:
    assert len({case.id for case in ALL}) == 60
    index = json.loads((Path(__file__).parent / "misconfigurations" / "index.json").read_text())
    assert index == make_index()
    for split in ("open", "held_out"):
        assert [case.sound for case in cases(split)] == [False] * 20 + [True] * 10
    assert not {case.id for case in cases("open")} & {case.id for case in cases("held_out")}
