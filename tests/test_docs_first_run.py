"""The page "First run on your own data", done as it says, with a tiny model of random weights."""

from __future__ import annotations

import json
import os
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from foveal.cli import main
from foveal.quickstart.tiny import build_tiny
from tests.docs_support import blocks, commands

PAGE = "docs/first_run.md"
STEPS = 2
RUN = Path("checkpoints/bars/first")
CHECKPOINT = RUN / f"global_step_{STEPS}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The reader's folder after all commands of the page; those that need a GPU or another program are left out."""
    pytest.importorskip("starlette", reason="pip install -e '.[view]'")
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("bars"))
    try:
        for block in blocks(PAGE):
            if block.title:
                Path(block.title).write_text(block.text.replace("global_step_100", CHECKPOINT.name), encoding="utf-8")
        build_tiny("sft/model", size="quickstart", seed=1)
        for words in commands(PAGE):
            _run([word.replace("global_step_100", CHECKPOINT.name) for word in words])
        yield Path.cwd()
    finally:
        os.chdir(before)


def _run(words: list[str]) -> None:
    match words:
        case ["python", script]:
            runpy.run_path(script)
        case ["foveal", "quickstart", *_]:
            pass  # `test_quickstart_run.py` does that
        case ["foveal", *arguments]:
            if "config=run.yaml" in arguments:
                arguments += [*_tiny(), f"trainer.max_steps={STEPS}", f"trainer.val_freq={STEPS}"]
            assert main(arguments) == 0, words
        case _:
            assert words[0] in ("mkdir", "cd", "cp", "llamafactory-cli", "vllm", "curl"), words


def _tiny() -> list[str]:
    """What the page adds without a GPU: its variable TINY."""
    (text,) = [block.text for block in blocks(PAGE) if block.text.startswith("TINY=(")]
    return text.replace("\\\n", " ").strip().removeprefix("TINY=(").removesuffix(")").split()


def test_pictures_and_rows_are_written(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 80 and all((folder / "pictures" / row["images"][0]).is_file() for row in rows)


def test_check_writes_its_page(folder: Path) -> None:
    assert "What colour is the bar?" in (folder / "prompts.html").read_text(encoding="utf-8")


def test_training_leaves_what_the_page_names(folder: Path) -> None:
    for name in ("experiment_log.jsonl", "curve.png", "generations.log"):
        assert (folder / RUN / name).stat().st_size > 0
    assert {"reward/overall", "reward/accuracy", "reward/brief"} <= _flat(folder / RUN / "experiment_log.jsonl").keys()


def _flat(log: Path) -> dict[str, float]:
    from foveal.track.file import read_log

    return {name: value for record in read_log(log).values() for name, value in record.items()}


def test_merged_model_answers_in_transformers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    runpy.run_path(str(folder / "ask.py"))
    assert capsys.readouterr().out.endswith("\n")


def test_runs_are_seen_and_sent(folder: Path) -> None:
    assert main(["view", str(folder / RUN), "--export", str(folder / "page.html")]) == 0
    assert "What colour is the bar?" in (folder / "page.html").read_text(encoding="utf-8")


def test_snippet_of_the_page_on_looking_at_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (snippet,) = [block.text for block in blocks("docs/view.md") if block.language == "python"]
    shutil.copytree(folder / RUN / "samples", folder / "checkpoints/easy_r1/my_run/samples")
    space: dict[str, object] = {}
    exec(snippet, space)
    answers = space["answers"]
    assert isinstance(answers, pd.DataFrame) and set(answers.split) == {"train", "val"}
