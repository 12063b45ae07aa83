from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foveal.config.schema_data import DataConfig
from foveal.data.source import open_rows
from foveal.errors import DataError
from tests.data_support import write_lines

CHAT = [
    {"from": "human", "value": "<image>What?"},
    {"from": "gpt", "value": "A cat."},
    {"from": "human", "value": "Which colour?"},
    {"from": "gpt", "value": "Red."},
]
ASKED = [
    {"role": "user", "content": "<image>What?"},
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": "Which colour?"},
]


def first(folder: Path, row: dict[str, Any], **options: Any) -> dict[str, Any]:
    (folder / "rows.json").write_text(json.dumps([row]))
    return open_rows(DataConfig(**options), str(folder / "rows.json"))[0]


@pytest.mark.parametrize("column", ["conversations", "messages"])
@pytest.mark.parametrize("keys", [("from", "value"), ("role", "content")])
def test_sharegpt_is_asked_the_last_question_and_its_answer_is_the_truth(
    tmp_path: Path, column: str, keys: tuple[str, str]
) -> None:
    chat = [dict(zip(keys, message.values(), strict=True)) for message in CHAT]
    row = first(tmp_path, {column: chat, "images": ["a.png"]}, prompt_key="problem")
    assert (row["problem"], row["answer"], row["images"]) == (ASKED, "Red.", ["a.png"])


def test_sharegpt_system_column_and_single_image_column(tmp_path: Path) -> None:
    row = first(tmp_path, {"conversations": CHAT, "system": "Be brief.", "image": "a.png"})
    assert row["prompt"] == [{"role": "system", "content": "Be brief."}, *ASKED]
    assert row["images"] == "a.png"


def test_an_answer_column_is_the_truth_rather_than_the_last_turn(tmp_path: Path) -> None:
    assert first(tmp_path, {"messages": CHAT, "answer": 7})["answer"] == 7


def test_alpaca(tmp_path: Path) -> None:
    row = {
        "instruction": "<image>Read it.",
        "input": "Only the number.",
        "output": "12",
        "system": "Be brief.",
        "history": [["Ready?", "Yes."]],
        "images": ["a.png"],
    }
    found = first(tmp_path, row)
    assert found["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Ready?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "<image>Read it.\nOnly the number."},
    ]
    assert (found["answer"], found["images"]) == ("12", ["a.png"])


def test_a_chat_in_the_prompt_column_holds_its_own_answer(tmp_path: Path) -> None:
    row = first(tmp_path, {"messages": CHAT}, prompt_key="messages")
    assert (row["messages"], row["answer"]) == (ASKED, "Red.")


def test_columns_that_are_named_are_taken_as_they_are(tmp_path: Path) -> None:
    row = {"prompt": "q", "answer": "a", "conversations": CHAT, "instruction": "x", "output": "y"}
    assert first(tmp_path, row) == row


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"messages": CHAT[:1]}, "row 0 of .* has no 'answer', and no answer after its last question"),
        ({"messages": CHAT[1:2]}, "row 0 of .*'messages' has no message of the role user"),
        ({"messages": [{"from": "robot", "value": "x"}]}, "row 0 of .*message 0 has the role 'robot'; known are"),
        ({"messages": "text"}, "row 0 of .*'messages' is a str"),
        ({"messages": CHAT, "audios": ["a.wav"]}, "row 0 of .* has audios, which are not supported"),
        ({"instruction": "q", "output": "a", "history": ["x"]}, r"row 0 of .* list of \[question, answer\]"),
        ({"instruction": "q", "output": "a", "history": 3}, r"row 0 of .* list of \[question, answer\]"),
        (
            {"messages": [{"role": ["user"], "content": "x"}]},
            r"row 0 of .*message 0 has the role \['user'\]; known are",
        ),
        ({"question": "q", "reply": "a"}, r"has no column 'prompt' \(data\.prompt_key\)"),
    ],
)
def test_a_row_that_is_no_prompt_with_an_answer_is_named(tmp_path: Path, row: dict[str, Any], fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        first(tmp_path, row)


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    """A LLaMA-Factory data folder with one picture."""
    tags = {"role_tag": "who", "content_tag": "says", "user_tag": "me", "assistant_tag": "it"}
    entries = {
        "chat": {
            "file_name": "chat.json",
            "formatting": "sharegpt",
            "columns": {"messages": "talk", "images": "pics"},
            "tags": tags,
            "num_samples": 1,
        },
        "plain": {"file_name": "plain.jsonl", "columns": {"prompt": "ask", "response": "say", "query": "more"}},
        "pairs": {"file_name": "chat.json", "ranking": True},
        "script": {"script_url": "x"},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(entries))
    talk = [{"who": "me", "says": "<image>Which?"}, {"who": "it", "says": "Red."}]
    (tmp_path / "chat.json").write_text(json.dumps([{"talk": talk, "pics": ["p/a.png"]}] * 3))
    write_lines(tmp_path / "plain.jsonl", [{"ask": "q", "say": i, "more": ""} for i in range(3)])
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.png").write_bytes(b"x")
    return tmp_path / "dataset_info.json"


def test_registry_entry_maps_columns_tags_and_paths(registry: Path) -> None:
    rows = open_rows(DataConfig(), f"{registry}:chat")
    assert len(rows) == 1
    assert rows[0]["prompt"] == [{"role": "user", "content": "<image>Which?"}]
    assert (rows[0]["answer"], rows[0]["images"]) == ("Red.", [str(registry.parent / "p" / "a.png")])


def test_registry_leaves_pictures_in_base64_as_they_are(registry: Path) -> None:
    picture = f"data:image/png;base64,{'A' * 5000}"
    talk = [{"who": "me", "says": "<image>Which?"}, {"who": "it", "says": "Red."}]
    (registry.parent / "chat.json").write_text(json.dumps([{"talk": talk, "pics": [picture]}]))
    assert open_rows(DataConfig(), f"{registry}:chat")[0]["images"] == [picture]


def test_registry_paths_start_in_image_dir_where_it_is_set(registry: Path) -> None:
    assert open_rows(DataConfig(image_dir="elsewhere"), f"{registry}:chat")[0]["images"] == ["p/a.png"]


def test_registry_entries_mix_with_a_part_and_a_weight(registry: Path) -> None:
    rows = open_rows(DataConfig(), [f"{registry}:plain@train[1:]*2", f"{registry}:chat"])
    assert [row["answer"] for row in rows] == [1, 2, 1, 2, "Red."]


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ("", "several data sets, and none is named.*has: chat, plain, pairs, script"),
        (":chats", "no entry 'chats'. Write .*dataset_info.json:chat;"),
        (":pairs", "pairs of better and worse answers"),
        (":script", "neither file_name nor hf_hub_url"),
    ],
)
def test_a_registry_entry_that_cannot_be_read_is_named(registry: Path, entry: str, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        open_rows(DataConfig(), f"{registry}{entry}")


def test_a_registry_that_is_a_list_has_no_entries(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text('[{"file_name": "a.json"}]')
    with pytest.raises(DataError, match="no entry 'a'"):
        open_rows(DataConfig(), f"{tmp_path / 'dataset_info.json'}:a")
