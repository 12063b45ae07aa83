from __future__ import annotations

import importlib.util
import random
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from foveal.config import load_config
from foveal.data.source import load_rows

EXAMPLES = Path(__file__).parents[1] / "examples"


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("pattern", "response", "truth", "expected"),
    [
        (None, "4 red", "4 red", (1.0, 1.0, 1.0)),
        (None, "5 red", "4 red", (0.1, 0.0, 1.0)),
        (None, "red", "4 red", (0.0, 0.0, 0.0)),
        ("[a-z]+", "teal", "teal", (1.0, 1.0, 1.0)),
        ("[a-z]+", "blue", "teal", (0.1, 0.0, 1.0)),
        ("[a-z]+", "Teal!", "teal", (0.0, 0.0, 0.0)),
    ],
)
def test_score(pattern: str | None, response: str, truth: str, expected: tuple[float, ...]) -> None:
    score = _load(EXAMPLES / "reward_function" / "quickstart.py").compute_score(
        [{"response": response, "response_length": 3, "ground_truth": truth}],
        **({"pattern": pattern} if pattern else {}),
    )[0]
    assert (score["overall"], score["accuracy"], score["format"]) == pytest.approx(expected)


def test_no_picture_is_in_both_parts() -> None:
    questions = [(f"question {i}", "yes", i // 3) for i in range(90)]
    warmup, rest = _load(EXAMPLES / "data" / "easy_vqa.py").share_out(questions, 0.4, random.Random(1))
    assert not {q[2] for q in warmup} & {q[2] for q in rest}
    assert len(warmup) == 36 and len(rest) == 54


def test_easy_vqa_becomes_rows_with_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("easy_vqa")
    script = str(EXAMPLES / "data" / "easy_vqa.py")
    monkeypatch.setattr(sys, "argv", [script, "--out", str(tmp_path), "--limit", "5"])
    runpy.run_path(script, run_name="__main__")
    for name in ("warmup", "train", "test"):
        rows: Any = load_rows(str(tmp_path / f"{name}.parquet"))
        assert len(rows) == 5
        assert rows[0]["problem"].startswith("<image>") and rows[0]["images"][0]["bytes"][1:4] == b"PNG"


@pytest.mark.parametrize("name", ["quickstart", "easy_vqa"])
def test_yaml_is_a_sound_configuration(name: str) -> None:
    config = load_config([f"config={EXAMPLES / name}.yaml"])
    assert config.worker.rollout.val_override_config["temperature"] == 0.0
