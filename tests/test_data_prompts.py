from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foveal.data.processing import Processing, load_processing
from foveal.data.prompts import check_prompt
from foveal.errors import DataError, ModelError
from foveal.quickstart.tiny import build_tiny
from foveal.types import Prompt
from tests.data_support import builder_of, noise, write_lines


@pytest.fixture(scope="module")
def processing(tmp_path_factory: pytest.TempPathFactory) -> Processing:
    folder = build_tiny(tmp_path_factory.mktemp("model"), "qwen2_5_vl")
    return load_processing(str(folder), min_pixels=3136, max_pixels=200_000)


def build(processing: Processing, folder: Path, row: dict[str, Any], **options: Any) -> Prompt:
    for index in range(3):
        noise(56, 56 + 28 * index, index).save(folder / f"{index}.png")
    spec = write_lines(folder / "rows.jsonl", [{"answer": "a", **row}])
    return builder_of(processing, spec, image_dir=str(folder), **options).build(0, "train-0-0")


def text_of(processing: Processing, prompt: Prompt) -> str:
    return processing.tokenizer.decode(prompt.token_ids)


IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def test_pictures_stand_where_the_marks_are(processing: Processing, tmp_path: Path) -> None:
    row = {"prompt": "a <image> b<image>", "images": ["0.png", "1.png"]}
    prompt = build(processing, tmp_path, row)
    assert f"user\na {IMAGE} b{IMAGE}<|im_end|>" in text_of(processing, prompt)
    assert [medium.data for medium in prompt.media] == [(tmp_path / f"{i}.png").read_bytes() for i in (0, 1)]
    assert prompt.features["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 6]]


def test_prompt_carries_answer_and_other_columns(processing: Processing, tmp_path: Path) -> None:
    row = {"prompt": "<image>q", "images": ["0.png"], "answer": [1, "x"], "level": 3}
    prompt = build(processing, tmp_path, row)
    assert prompt.answer == [1, "x"]
    assert prompt.row == {"prompt": "<image>q", "answer": [1, "x"], "level": 3}
    assert (prompt.uid, prompt.row_index) == ("train-0-0", 0)


def test_chat_messages_keep_their_roles_and_the_last_question_is_formatted(
    processing: Processing, tmp_path: Path
) -> None:
    (tmp_path / "f.jinja").write_text("[{{ content }}]\n")
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "two"}]},
    ]
    row = {"prompt": messages, "images": ["0.png"]}
    text = text_of(processing, build(processing, tmp_path, row, format_prompt=str(tmp_path / "f.jinja")))
    assert "system\nbe brief<|im_end|>" in text
    assert "user\none<|im_end|>" in text
    assert f"user\n[{IMAGE}two]<|im_end|>" in text


def test_format_prompt_sees_every_column(processing: Processing, tmp_path: Path) -> None:
    (tmp_path / "f.jinja").write_text("  {{ content }} (level {{ level }})\n\n")
    prompt = build(processing, tmp_path, {"prompt": "q", "level": 3}, format_prompt=str(tmp_path / "f.jinja"))
    assert "user\nq (level 3)<|im_end|>" in text_of(processing, prompt)


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("{{ contnet }}", ["f.jinja", "'contnet' is undefined", "content, answer, prompt", "row 0"]),
        ("{% if %}", ["f.jinja, line 1"]),
        (None, ["no file", "f.jinja"]),
    ],
)
def test_wrong_format_prompt_is_named(
    processing: Processing, tmp_path: Path, template: str | None, parts: list[str]
) -> None:
    if template is not None:
        (tmp_path / "f.jinja").write_text(template)
    with pytest.raises(DataError) as error:
        build(processing, tmp_path, {"prompt": "q"}, format_prompt=str(tmp_path / "f.jinja"))
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"prompt": "q", "images": ["0.png"]}, ["row 0", "0 <image> marks, 1 image."]),
        ({"prompt": "<image><image>q", "images": ["0.png"]}, ["2 <image> marks, 1 image."]),
        ({"prompt": "<image>q", "images": ["0.png", "1.png"]}, ["1 <image> mark, 2 images."]),
        ({"prompt": "<image>q"}, ["1 <image> mark, 0 images.", "No row has a column 'images'", "answer, prompt"]),
        ({"prompt": "<video>q"}, ["1 <video> mark, 0 videos", "No row has a column 'videos'"]),
        ({"prompt": "<video>q", "videos": ["a.mp4"]}, ["row 0, video 0", "there is no file", "a.mp4"]),
        ({"prompt": 3}, ["row 0", "'prompt' is a int"]),
        ({"prompt": [{"role": "system", "content": "x"}]}, ["no message of the role user"]),
    ],
)
def test_wrong_row_is_named(processing: Processing, tmp_path: Path, row: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(DataError) as error:
        build(processing, tmp_path, row)
    for part in parts:
        assert part in str(error.value)


def test_row_without_the_answer_is_named(processing: Processing, tmp_path: Path) -> None:
    spec = write_lines(tmp_path / "a.jsonl", [{"prompt": "q", "answer": 1}, {"prompt": "q"}])
    with pytest.raises(DataError, match=r"row 1 .* has no 'answer'"):
        builder_of(processing, spec).draft(1)


def test_quoted_placeholder_is_no_picture(processing: Processing, tmp_path: Path) -> None:
    row = {"prompt": "<image>what is <|image_pad|> and <|vision_start|>?", "images": ["0.png"]}
    prompt = build(processing, tmp_path, row)
    assert prompt.token_ids.count(processing.image_token_id) == 1


def test_text_model_refuses_pictures(tmp_path: Path) -> None:
    text_model = load_processing(str(build_tiny(tmp_path / "m", "qwen3")))
    assert build(text_model, tmp_path, {"prompt": "q"}).features == {}
    with pytest.raises(ModelError, match=r"row 0 .* has 1 image, but the model takes text only .*'qwen3'"):
        build(text_model, tmp_path, {"prompt": "<image>q", "images": ["0.png"]})


@pytest.mark.parametrize("fault", ["placeholder", "visual token", "patch", "medium", "text token"])
def test_proof_finds_every_disagreement(processing: Processing, tmp_path: Path, fault: str) -> None:
    prompt = build(processing, tmp_path, {"prompt": "<image>q", "images": ["0.png"]})
    image = processing.image_token_id
    if fault == "placeholder":
        prompt.token_ids.append(image)
    elif fault == "visual token":
        prompt.expanded_ids.remove(image)
    elif fault == "patch":
        prompt.features["pixel_values"] = prompt.features["pixel_values"][1:]
    elif fault == "medium":
        prompt.media.append(prompt.media[0])
    else:
        prompt.expanded_ids[0] += 1
    with pytest.raises(DataError, match=r"row 0 \(train-0-0\)"):
        check_prompt(prompt, processing)


@pytest.mark.parametrize(
    ("prompt", "fault"),
    [
        ([{"role": "user", "content": [{"type": "audio", "audio": "x"}]}], "has the part {'type': 'audio'"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "has the part {'type': 'text', 'text': 5}"),
        ([{"role": "user", "content": ["x"]}], "has the part x"),
        ("half \ud800", "half of a character"),
    ],
)
def test_text_that_cannot_be_tokenised_is_named(
    processing: Processing, tmp_path: Path, prompt: object, fault: str
) -> None:
    with pytest.raises(DataError) as caught:
        build(processing, tmp_path, {"prompt": prompt})
    assert fault in str(caught.value) and "row 0" in str(caught.value)


def test_a_format_prompt_in_another_encoding_is_named(processing: Processing, tmp_path: Path) -> None:
    (tmp_path / "f.jinja").write_bytes("é {{ content }}".encode("latin-1"))
    with pytest.raises(DataError, match=r"cannot read .*f\.jinja as UTF-8 text"):
        build(processing, tmp_path, {"prompt": "q"}, format_prompt=str(tmp_path / "f.jinja"))


def test_turns_after_the_last_question_are_no_part_of_the_prompt(processing: Processing, tmp_path: Path) -> None:
    messages = [
        {"from": "human", "value": "one"},
        {"from": "gpt", "value": "two"},
        {"from": "human", "value": "three"},
        {"from": "gpt", "value": "four"},
    ]
    text = text_of(processing, build(processing, tmp_path, {"prompt": messages}))
    assert "user\none<|im_end|>" in text and "assistant\ntwo<|im_end|>" in text
    assert text.endswith("user\nthree<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("own", [None, "Mine."])
def test_system_prompt_is_for_prompts_without_one(processing: Processing, tmp_path: Path, own: str | None) -> None:
    messages = [{"role": "user", "content": "q"}]
    if own:
        messages.insert(0, {"role": "system", "content": own})
    text = text_of(processing, build(processing, tmp_path, {"prompt": messages}, system_prompt="Ours."))
    assert ("system\nOurs.<|im_end|>" in text) == (own is None)
    assert ("system\nMine.<|im_end|>" in text) == (own is not None)


def test_quoted_vision_tokens_are_harmless_in_every_message(processing: Processing, tmp_path: Path) -> None:
    quote = "<|vision_start|><|image_pad|><|vision_end|><|video_pad|>"
    roles = ("system", "user", "assistant", "user")
    row = {"prompt": [{"role": role, "content": quote} for role in roles]}
    (tmp_path / "f.jinja").write_text("{{ content }} {{ hint }} " + quote)
    prompt = build(processing, tmp_path, {**row, "hint": quote}, format_prompt=str(tmp_path / "f.jinja"))
    assert not set(prompt.token_ids) & set(processing.forbidden_ids)


def test_a_text_in_the_place_of_a_format_prompt_says_where_it_belongs(processing: Processing, tmp_path: Path) -> None:
    text = "You FIRST think. " * 40  # too long for the name of a file
    with pytest.raises(DataError, match=r"no file You FIRST think.*If that is the text itself.*\{\{ content \}\}"):
        build(processing, tmp_path, {"prompt": "q"}, format_prompt=text)


def test_format_prompt_reaches_columns_whose_names_are_no_variables(processing: Processing, tmp_path: Path) -> None:
    (tmp_path / "f.jinja").write_text('{{ content }}{{ row["final answer"] }}{{ missing | default("!") }}')
    prompt = build(processing, tmp_path, {"prompt": "q", "final answer": 3}, format_prompt=str(tmp_path / "f.jinja"))
    assert "user\nq3!<|im_end|>" in text_of(processing, prompt)


def test_a_format_prompt_without_a_variable_is_refused(processing: Processing, tmp_path: Path) -> None:
    (tmp_path / "f.jinja").write_text("Answer: {content}")
    with pytest.raises(DataError, match=r"f\.jinja uses no variable.*\{\{ content \}\}"):
        build(processing, tmp_path, {"prompt": "q"}, format_prompt=str(tmp_path / "f.jinja"))


def with_template(folder: Path, template: str) -> Processing:
    return load_processing(str(build_tiny(folder / "m", "qwen2_5_vl")), chat_template=template)


def test_override_chat_template_replaces_the_models_own(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    template += (
        "{% for p in m.content %}{{ p.text if p.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}"
    )
    template += "{% endfor %}{% endif %}|{% endfor %}"
    own = with_template(tmp_path, template)
    prompt = build(own, tmp_path, {"prompt": "<image>q", "images": ["0.png"]}, override_chat_template="t.jinja")
    assert text_of(own, prompt) == f"user: {IMAGE}q|"


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ raise_exception('no system role') }}", r"row 0 .* chat template t\.jinja fails: no system role"),
        ("{% if %}", r"row 0 .* chat template t\.jinja, line 1 fails"),
        ("{{ messages[0].content }}", "row 0, image 0 .* put 0 image placeholders for 1 image"),
    ],
)
def test_a_chat_template_that_fails_is_named(tmp_path: Path, template: str, fault: str) -> None:
    own = with_template(tmp_path, template)
    with pytest.raises(DataError, match=fault):
        build(own, tmp_path, {"prompt": "<image>q", "images": ["0.png"]}, override_chat_template="t.jinja")


def test_image_folder_whose_metadata_names_the_files(processing: Processing, tmp_path: Path) -> None:
    noise(56, 56).save(tmp_path / "a.png")
    write_lines(tmp_path / "metadata.jsonl", [{"file_name": "a.png", "prompt": "<image>q", "answer": "a"}])
    options = {"image_key": "file_name", "image_dir": str(tmp_path)}
    prompt = builder_of(processing, str(tmp_path), **options).build(0, "train-0-0")
    assert prompt.media[0].data == (tmp_path / "a.png").read_bytes()


@pytest.mark.parametrize(
    "part", [{"type": "image", "image": "0.png"}, {"type": "image_url", "image_url": {"url": "0.png"}}]
)
def test_pictures_that_stand_in_the_messages_themselves(
    processing: Processing, tmp_path: Path, part: dict[str, Any]
) -> None:
    chat = [{"role": "user", "content": [part, {"type": "text", "text": "Which?"}]}]
    prompt = build(processing, tmp_path, {"prompt": chat})
    assert f"user\n{IMAGE}Which?<|im_end|>" in text_of(processing, prompt)
    assert [medium.data for medium in prompt.media] == [(tmp_path / "0.png").read_bytes()]
    assert prompt.row["prompt"] == [{"role": "user", "content": "<image>Which?"}]
    chat.append({"role": "assistant", "content": "Red."})  # type: ignore[dict-item]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}))
    draft = builder_of(processing, str(tmp_path / "chats.jsonl"), image_dir=str(tmp_path)).draft(0)
    assert (len(draft.media), draft.row["answer"]) == (1, "Red.")
