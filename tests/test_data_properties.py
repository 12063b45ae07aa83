"""Any row gives either an error that names it, or what transformers by itself makes of its text and media."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from foveal.config.schema_data import DataConfig
from foveal.data.processing import Processing, load_processing
from foveal.data.prompts import PromptBuilder
from foveal.data.source import load_rows
from foveal.errors import DataError, ModelError
from foveal.models.loading import load_model
from foveal.models.positions import prompt_positions
from foveal.quickstart.tiny import Family, build_tiny
from foveal.train.layout import PromptLayouts
from foveal.types import Prompt
from tests.data_support import noise

FAMILIES: tuple[Family, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3")
PIECES = [
    "What is it? ",
    "",
    " ",
    "\n",
    "é 漢字 🙂",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|><|image_pad|><|vision_end|>",
    "<|im_end|>\n<|im_start|>user\n",
    "<|image",
    "_pad|>",
    "<0.5 seconds>",
    "<image",
    ">",
    "{{ content }}",
]
sides = st.one_of(st.integers(1, 40), st.integers(41, 400))
pictures = st.tuples(st.sampled_from(["RGB", "RGBA", "L", "P", "1", "I;16", "CMYK"]), sides, sides)
videos = st.tuples(st.integers(1, 9), st.integers(8, 120), st.integers(8, 120), st.sampled_from([None, 1.0, 7.5, 30.0]))
pieces = st.one_of(st.sampled_from(PIECES), st.text(max_size=8), pictures, videos)
stray = st.sampled_from(["", "", "", "<image>", "<video>"])


@st.composite
def rows(draw: Any) -> dict[str, Any]:
    """A prompt of text, marks and media; most have a mark for each medium, some have one too many or too few."""
    parts = [*draw(st.lists(pieces, max_size=6)), draw(stray)]
    images = [part for part in parts if isinstance(part, tuple) and isinstance(part[0], str)]
    films = [part for part in parts if isinstance(part, tuple) and not isinstance(part[0], str)]
    text = [part if isinstance(part, str) else "<image>" if isinstance(part[0], str) else "<video>" for part in parts]
    if draw(st.booleans()):  # chat messages instead of text
        cut = draw(st.integers(0, len(text)))
        prompt: Any = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "".join(text[:cut])},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "".join(text[cut:])},
        ]
    else:
        prompt = "".join(text)
    return {"prompt": prompt, "images": images, "videos": films, "answer": draw(st.sampled_from(["a", 1, None, ["x"]]))}


def is_sound(row: dict[str, Any], family: Family) -> bool:
    """Whether the row has a mark for each medium, and nothing that the model refuses."""
    contents = [row["prompt"]] if isinstance(row["prompt"], str) else [m["content"] for m in row["prompt"]]
    marks = [sum(content.count(mark) for content in contents) for mark in ("<image>", "<video>")]
    media = [len(row["images"]), len(row["videos"])]
    sizes = [max(height, width) / min(height, width) for _, height, width in row["images"]]
    return marks == media and max(sizes, default=1) <= 200 and not (family == "qwen3" and any(media))


class Model:
    """One family: our side, and the plain one."""

    def __init__(self, folder: Path, family: Family) -> None:
        build_tiny(folder, family)
        self.family = family
        self.processing: Processing = load_processing(str(folder), min_pixels=3136, max_pixels=30_000, video_fps=2.0)
        automatic: Any = AutoModelForCausalLM if family == "qwen3" else AutoModelForImageTextToText
        self.plain = automatic.from_pretrained(folder, dtype=torch.float32).eval()
        self.model = load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"))
        self.folder = folder


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model") / request.param, request.param)


def write(folder: Path, row: dict[str, Any]) -> tuple[str, list[Image.Image], list[np.ndarray]]:
    """Saves the row with its media, and gives what they decode to."""
    seen, frames = [], []
    stored: dict[str, Any] = {**row, "images": [], "videos": []}
    for number, (mode, height, width) in enumerate(row["images"]):
        picture = noise(height, width, number)
        if mode == "I;16":
            picture = Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257)
        elif mode != "RGB":
            picture = picture.convert(mode)
        path = folder / f"{number}.{'tif' if mode in ('CMYK', 'I;16') else 'png'}"
        picture.save(path)
        stored["images"].append(path.name)
        grey = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8)) if mode == "I;16" else picture
        seen.append(grey.convert("RGB"))
    for number, (count, height, width, fps) in enumerate(row["videos"]):
        clip = [noise(height, width, 100 * number + frame) for frame in range(count)]
        names = [f"{number}_{frame}.png" for frame in range(count)]
        for picture, name in zip(clip, names, strict=True):
            picture.save(folder / name)
        stored["videos"].append({"frames": names, "fps": fps})
        frames.append(np.stack([np.asarray(picture) for picture in clip]))
    spec = folder / "rows.jsonl"
    spec.write_text(json.dumps(stored) + "\n")
    return str(spec), seen, frames


def plain_output(
    model: Model, text: str, seen: list[Image.Image], frames: list[np.ndarray], row: dict[str, Any]
) -> Any:
    """What the model's own processor makes of it."""
    if model.processing.processor is None:
        return model.processing.tokenizer([text], add_special_tokens=False, return_tensors="pt")
    options: dict[str, Any] = {"images": seen} if seen else {}
    if frames:
        indices = [sampled(model, len(clip), fps) for clip, (*_, fps) in zip(frames, row["videos"], strict=True)]
        options["videos"] = [
            torch.from_numpy(clip[index]).permute(0, 3, 1, 2) for clip, index in zip(frames, indices, strict=True)
        ]
        options["videos_kwargs"] = {
            "do_sample_frames": False,
            "video_metadata": [
                {"total_num_frames": len(clip), "fps": fps or 2.0, "frames_indices": index}
                for clip, index, (*_, fps) in zip(frames, indices, row["videos"], strict=True)
            ],
        }
    return model.processing.processor(text=[text], return_tensors="pt", **options)


def sampled(model: Model, count: int, fps: float | None) -> list[int]:
    """Two frames a second of those that have a rate, by the processor's rule; a single frame twice."""
    from transformers.video_utils import VideoMetadata

    if fps is None or count <= 2:
        return [*range(count), *[count - 1] * (2 - count)]
    own = model.processing.processor.video_processor  # type: ignore[union-attr]
    return [int(i) for i in own.sample_frames(VideoMetadata(total_num_frames=count, fps=fps), fps=2.0)]


@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(row=rows())
def test_a_row_is_refused_by_name_or_as_transformers_has_it(model: Model, tmp_path: Path, row: dict[str, Any]) -> None:
    spec, seen, frames = write(tmp_path, row)
    builder = PromptBuilder(DataConfig(image_dir=str(tmp_path)), model.processing, load_rows(spec))
    try:
        draft = builder.draft(0)
        prompt = builder.build(0, "train-0-0")
    except (DataError, ModelError) as error:
        refusal: str | None = str(error)
    else:
        refusal = None
    assert (refusal is None) == is_sound(row, model.family), refusal
    if refusal is not None:
        event("refused")
        assert "row 0" in refusal
        return
    event(f"taken with {len(seen)} images, {len(frames)} videos")
    plain = plain_output(model, draft.text, seen, frames, row)
    assert plain["input_ids"][0].tolist() == prompt.expanded_ids
    assert model.processing.count_tokens([draft.text], [draft.sizes()]) == [len(prompt.expanded_ids)]
    features = prompt.features or {}
    transparent = any(mode == "RGBA" for mode, *_ in row["images"])
    for name, value in features.items():
        assert transparent or torch.equal(value, plain[name]), name
    check_forward(model, prompt, {**plain, **features})


@torch.no_grad()
def check_forward(model: Model, prompt: Prompt, inputs: dict[str, Any]) -> None:
    """Our positions give the logits that the plain model gives by itself."""
    positions = prompt_positions(model.model, prompt.expanded_ids, prompt.features)
    layout = PromptLayouts(model.model, lambda p: p.features or {})(prompt)  # runs the contract's second half
    assert torch.equal(layout.positions, positions)
    ids = inputs["input_ids"]
    kinds = inputs.get("mm_token_type_ids")
    if kinds is not None and kinds.any():
        grids = {name: value for name, value in inputs.items() if name.endswith(("grid_thw", "grid_ts"))}
        own, _ = model.plain.model.get_rope_index(input_ids=ids, mm_token_type_ids=kinds, **grids)
        assert torch.equal(positions[:, :-1], own[:, 0])
    else:
        assert torch.equal(positions[:, :-1], torch.arange(ids.shape[1]).expand(len(positions), -1))
    given = {name: value for name, value in inputs.items() if name != "input_ids"}
    expected = model.plain(input_ids=ids, **given).logits
    pixels = {name: value for name, value in given.items() if name.startswith("pixel") or name.endswith("grid_thw")}
    place = positions[:, None, :-1] if len(positions) > 1 else positions[:, :-1]
    found = model.plain(input_ids=ids, position_ids=place, **pixels).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
