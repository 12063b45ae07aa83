"""`foveal check` as a command: what it prints, and its exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from foveal.check.findings import Finding, exit_code, in_order, name_rows
from foveal.cli import main
from tests.small_run import small_run

SOUND = """
REWARD_NAME = "color"
REWARD_TYPE = "sequential"


def score(row):
    return {"overall": float(row["response"].strip().lower() == row["ground_truth"])}
"""


def arguments(root: Path, *overrides: str) -> list[str]:
    """A sound run of eight rows, each with a question of its own."""
    found = small_run(root, "qwen2_5_vl", *overrides)
    rows = (root / "data" / "rows.jsonl").read_text().splitlines()
    different = [line.replace("Which color?", f"Which color has picture {n}?") for n, line in enumerate(rows)]
    (root / "data" / "rows.jsonl").write_text("\n".join(different) + "\n")
    (root / "reward.py").write_text(SOUND)
    return [argument for argument in found if not argument.startswith("data.val_files")]


def test_a_broken_set_is_exit_status_1_and_its_rows_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = arguments(tmp_path)
    rows = tmp_path / "data" / "rows.jsonl"
    rows.write_text(rows.read_text() + '{"problem": "<image>Which color?", "answer": "red"}\n')
    assert main(["check", "--html", str(tmp_path / "page.html"), *overrides]) == 1
    out = capsys.readouterr().out
    assert "error: data.train_files: row 8 of" in out and "1 <image> mark, 0 images" in out
    assert "\n    row 8\n    → Put one <image>" in out
    assert "foveal check: 1 error, " in out
    assert "train: 9 rows of" in out and "tokens of a prompt: median" in out
    assert "row 8 of" in (tmp_path / "page.html").read_text()


def test_a_source_that_cannot_be_read_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = arguments(tmp_path)
    (tmp_path / "data" / "rows.jsonl").write_text("no json\n")
    assert main(["check", *overrides]) == 1
    out = capsys.readouterr().out
    assert out.count("is not valid JSON") == 1
    assert "foveal check: 1 error, 0 warnings" in out


def test_a_sound_set_is_exit_status_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *arguments(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "error" not in out.replace("0 errors", "")


def test_the_model_answers_where_it_is_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--generate", "2", *arguments(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("the first answer:") == 2
    assert "all 8 answers score 0" in out


def test_what_is_needed_and_missing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [one for one in arguments(tmp_path) if not one.startswith("worker.reward")]
    assert main(["check", *given]) == 1
    assert "error: configuration: worker.reward.reward_function is not set" in capsys.readouterr().out
    assert main(["check", "data.seed=1", "worker.rollout.n=2"]) == 1
    assert "worker.actor.model.model_path is not set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--rows", "0"], "--rows: 0 given"),
        (["--generate", "-1"], "--generate: -1 given"),
        (["--page", "x.html"], "no option --page"),
    ],
)
def test_wrong_usage_is_exit_status_2(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", *given])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_findings_are_in_order_of_gravity_and_rows_are_named_up_to_a_number() -> None:
    note, error = Finding("note", "a", "b", "c", (1,)), Finding("error", "a", "b", "c", (5,))
    assert in_order([note, error]) == [error, note]
    assert (exit_code([note]), exit_code([note, error])) == (0, 1)
    assert [name_rows(rows) for rows in ([], [3], [3, 7, 9])] == ["", "row 3", "rows 3, 7 and 9"]
    assert name_rows(range(500)).endswith("18, 19, … (500 rows)")
