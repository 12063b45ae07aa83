"""`foveal check`, the data: each planted fault is named with its row and a cure, and no sound row is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foveal.check.data import check_data
from foveal.check.findings import Finding
from foveal.config import Config, load_config
from foveal.quickstart.tiny import build_tiny
from tests.data_support import noise, picture_rows, write_lines
from tests.planted_faults import FAULTS, write_planted


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


def config_of(model: Path, rows: str | Path, *overrides: str) -> Config:
    return load_config(
        [
            f"worker.actor.model.model_path={model}",
            f"data.train_files={rows}",
            "data.max_prompt_length=512",
            "worker.rollout.n=4",
            "data.rollout_batch_size=4",
            "worker.actor.global_batch_size=4",
            "data.min_pixels=784",
            "data.max_pixels=200704",
            *overrides,
        ]
    )


def quiet(line: str) -> None:
    pass


def test_every_planted_fault_is_listed_and_nothing_else(model: Path, tmp_path: Path) -> None:
    expected = write_planted(tmp_path)
    assert len(expected) == len(FAULTS) >= 20
    config = config_of(
        model,
        tmp_path / "rows.jsonl",
        f"data.image_dir={tmp_path / 'pictures'}",
        f"data.format_prompt={tmp_path / 'format.jinja'}",
    )
    page = tmp_path / "page.html"
    found: dict[int, Finding] = {}
    for finding in check_data(config, page=page, say=quiet):
        assert finding.subject == "data.train_files" and len(finding.rows) == 1 and finding.cure
        assert not found.keys() & set(finding.rows), finding
        found[finding.rows[0]] = finding
    for row, (level, words) in expected.items():
        assert row in found, words
        assert found[row].level == level and words in found[row].text, found[row]
    assert found.keys() == expected.keys()
    html = page.read_text()
    for row in expected:
        assert f"row {row} of" in html


def test_sound_rows_give_nothing_but_the_account(model: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    rows = write_lines(tmp_path / "rows.jsonl", picture_rows(tmp_path, 8))
    assert check_data(config_of(model, rows, f"data.image_dir={tmp_path}"), say=lines.append) == []
    account = "\n".join(lines)
    assert f"train: 8 rows of {rows}, 8 of them usable" in account
    assert re.search(r"tokens of a prompt: median \d+, 95 % up to \d+, longest \d+", account)
    assert re.search(r"images: 8 in 8 rows, at most 1 in one; median size 64x64, largest 64x64, \d+ tokens", account)
    assert re.search(r"row 0 of .*:\n(.*\n)*.*\[image row 0, image 0 \(.*0\.jpg\), \d+ tokens\]\S*Which\?", account)


def test_faults_of_a_kind_are_told_together(model: Path, tmp_path: Path) -> None:
    rows = picture_rows(tmp_path, 12)
    for number in (3, 5, 9):
        (tmp_path / f"{number}.jpg").unlink()
        rows[number - 1]["prompt"] = "<image><image>What?"
    config = config_of(model, write_lines(tmp_path / "rows.jsonl", rows), f"data.image_dir={tmp_path}")
    mismatch, missing = check_data(config, say=quiet)
    assert mismatch.rows == (2, 4, 8) and "row 2 of" in mismatch.text and "and 2 more rows" in mismatch.text
    assert missing.rows == (3, 5, 9) and "3.jpg" in missing.text and missing.level == "warning"
    config.data.on_bad_row = "stop"
    assert [finding.level for finding in check_data(config, say=quiet)] == ["error", "error"]


def test_validation_rows_that_are_trained_on_are_named(model: Path, tmp_path: Path) -> None:
    questions = [{"prompt": f"Question {number}?", "answer": "a"} for number in range(8)]
    train = write_lines(tmp_path / "train.jsonl", questions)
    val = write_lines(tmp_path / "val.jsonl", [{"prompt": "New?", "answer": "a"}, questions[6]])
    [finding] = check_data(config_of(model, train, f"data.val_files={val}"), say=quiet)
    assert finding.subject == "data.val_files" and finding.rows == (1,)
    assert "row 6 of" in finding.text and "there to train on" in finding.text


@pytest.mark.parametrize(
    ("rows", "override", "told"),
    [
        ([{"question": "q", "answer": "a"}], "data.seed=1", "no column 'prompt'"),
        ([{"prompt": "q", "answer": ""}], "data.rollout_batch_size=4", "no row has an answer in 'answer'"),
        ([{"prompt": "q", "answer": "a"}], "data.rollout_batch_size=8", "4 usable rows, and a batch takes 8"),
        ([{"prompt": "q", "answer": "a", "picture": "a.png"}], "data.seed=1", "the column 'picture' looks like it"),
        ([{"prompt": "what is it", "answer": "a"}], "data.format_prompt={file}", "the question is not in the prompt"),
        ([{"prompt": "q", "answer": "a"}], "data.format_prompt=missing.jinja", "missing.jinja"),
    ],
)
def test_what_concerns_the_whole_set_is_told(
    model: Path, tmp_path: Path, rows: list[dict[str, str]], override: str, told: str
) -> None:
    (tmp_path / "format.jinja").write_text("{{ number }}: answer in one word.")
    rows = [{**row, "number": number} for number in range(4) for row in rows]  # type: ignore[dict-item]
    for number, row in enumerate(rows):
        if "prompt" in row:
            row["prompt"] += f" {number}"
    overrides = [override.format(file=tmp_path / "format.jinja"), "worker.actor.global_batch_size=4"]
    findings = check_data(config_of(model, write_lines(tmp_path / "rows.jsonl", rows), *overrides), say=quiet)
    assert [told in finding.text for finding in findings] == [True], findings


def test_a_source_that_cannot_be_read_does_not_hide_the_others(model: Path, tmp_path: Path) -> None:
    good = write_lines(tmp_path / "good.jsonl", [{"prompt": "q", "answer": "a"}])
    [finding] = check_data(config_of(model, f"[{tmp_path / 'none.jsonl'},{good}]"), say=quiet)
    assert "none.jsonl" in finding.text and finding.level == "error"


def test_of_several_sources_the_one_with_the_fault_is_named(model: Path, tmp_path: Path) -> None:
    good = write_lines(tmp_path / "good.jsonl", [{"prompt": f"q{n}", "answer": "a"} for n in range(4)])
    long = write_lines(tmp_path / "long.jsonl", [{"prompt": "q" * 600, "answer": "a"}])
    [finding] = check_data(config_of(model, f"[{good},{long}]"), say=quiet)
    assert (finding.subject, finding.rows) == (f"data.train_files ({long})", (0,))


def test_videos_are_counted(model: Path, tmp_path: Path) -> None:
    picture_rows(tmp_path, 2)
    rows = [{"prompt": f"<video>{n}", "answer": "a", "videos": [["0.jpg", "1.jpg"]]} for n in range(4)]
    lines: list[str] = []
    config = config_of(model, write_lines(tmp_path / "rows.jsonl", rows), f"data.image_dir={tmp_path}")
    assert check_data(config, say=lines.append) == []
    assert "  videos: 4 in 4 rows, at most 1 in one" in lines


def test_pictures_inside_chats_are_no_unread_column(model: Path, tmp_path: Path) -> None:
    picture_rows(tmp_path, 4)
    chats: list[dict[str, object]] = [
        {"messages": [
            {"role": "user", "content": [{"type": "image", "image": f"{n}.jpg"}]},
            {"role": "assistant", "content": "a"},
        ]}
        for n in range(4)
    ]  # fmt: skip
    rows = write_lines(tmp_path / "rows.jsonl", chats)
    findings = check_data(config_of(model, rows, f"data.image_dir={tmp_path}"), say=quiet)
    assert [one.text for one in findings if one.level != "warning" or "looks like it" in one.text] == []


def test_only_so_many_rows_are_decoded_as_were_asked_for(model: Path, tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", picture_rows(tmp_path, 8))
    for number in (4, 5):
        (tmp_path / f"{number}.jpg").write_bytes((tmp_path / f"{number}.jpg").read_bytes()[:-200])
    config = config_of(model, rows, f"data.image_dir={tmp_path}")
    lines: list[str] = []
    assert [finding.rows for finding in check_data(config, rows=2, say=lines.append)] == [(4,)]
    assert any("pictures of 2 of 8 rows decoded; --rows 8: of all" in line for line in lines)


def test_the_page_shows_pictures_and_runs_nothing_of_the_data(model: Path, tmp_path: Path) -> None:
    noise(64, 64).save(tmp_path / "a.png")
    script = "<script>alert(1)</script>"
    row = {"prompt": f"{script}<image>What?", "answer": script, "images": ["a.png"]}
    rows = write_lines(tmp_path / "rows.jsonl", [{**row, "prompt": f"{row['prompt']} {n}"} for n in range(4)])
    page = tmp_path / "page.html"
    check_data(config_of(model, rows, f"data.image_dir={tmp_path}"), page=page, say=quiet)
    html = page.read_text()
    assert html.count('src="data:image/jpeg;base64,') == 4
    assert "<script" not in html and html.count("&lt;script&gt;") == 8
    assert not re.search(r'(src|href)="(?!data:)', html)
