"""What the contract finds: every way in which ids, media, grids, features, positions and visual tokens can disagree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foveal.data.contract import check_layout, check_prompt
from foveal.data.processing import Processing, load_processing
from foveal.data.video import Stills, pack_stills
from foveal.errors import DataError
from foveal.quickstart.tiny import build_tiny
from foveal.types import Media, Prompt
from tests.data_support import encoded, noise

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module", params=FAMILIES)
def processing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Processing:
    folder = build_tiny(tmp_path_factory.mktemp(request.param), request.param)
    return load_processing(str(folder), min_pixels=3136, max_pixels=20_000)


def prompt_of(processing: Processing) -> Prompt:
    """A picture, a video of four frames, and another picture, with text between."""
    frames = Stills(tuple(encoded(noise(40, 60, number)) for number in range(4)))
    media = [
        Media("image", encoded(noise(60, 80)), "image 0"),
        Media("video", pack_stills(frames, "x"), "video 0"),
        Media("image", encoded(noise(60, 60)), "image 1"),
    ]
    parts: list[dict[str, str]] = []
    for medium in media:
        parts += [{"type": medium.kind}, {"type": "text", "text": "and"}]
    token_ids, expanded, features = processing.encode(processing.render([{"role": "user", "content": parts}]), media)
    return Prompt("train-0-5", token_ids, expanded, media, {}, 5, "", features)


def test_a_right_prompt_passes(processing: Processing) -> None:
    check_prompt(prompt_of(processing), processing)


def first(ids: list[int], token: int) -> int:
    return ids.index(token)


def last(ids: list[int], token: int) -> int:
    return len(ids) - 1 - ids[::-1].index(token)


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize(
    "fault",
    [
        "placeholder",
        "medium",
        "grid",
        "visual token",
        "visual token moved",
        "patch",
        "text before",
        "text after",
        "cut",
    ],
)
def test_every_disagreement_is_found(processing: Processing, kind: str, fault: str) -> None:
    prompt = prompt_of(processing)
    token = processing.placeholders[kind]
    features: dict[str, Any] = dict(prompt.features or {})
    pixels = "pixel_values" if kind == "image" else "pixel_values_videos"
    ids = prompt.expanded_ids
    if fault == "placeholder":
        prompt.token_ids.remove(token)
    elif fault == "medium":
        prompt.media = [medium for medium in prompt.media if medium.kind != kind]
    elif fault == "grid":
        features[f"{kind}_grid_thw"] = features[f"{kind}_grid_thw"][:-1]
    elif fault == "visual token":
        ids.remove(token)
    elif fault == "visual token moved":
        ids.insert(0, ids.pop(first(ids, token)))
    elif fault == "patch":
        features[pixels] = features[pixels][1:]
    elif fault == "text before":
        ids[0] += 1
    elif fault == "text after":
        ids[-1] += 1
    else:
        prompt.expanded_ids = ids[: last(ids, token)]
    prompt.features = features
    with pytest.raises(DataError, match=r"row 5 \(train-0-5\)"):
        check_prompt(prompt, processing)


def test_ids_beyond_the_model_are_found(processing: Processing) -> None:
    prompt = prompt_of(processing)
    assert processing.vocabulary is not None
    for ids in (prompt.token_ids, prompt.expanded_ids):
        ids[0] = processing.vocabulary
    with pytest.raises(DataError, match=rf"row 5 .* token id {processing.vocabulary}; the model has ids 0 to"):
        check_prompt(prompt, processing)


def test_media_that_the_model_has_no_placeholder_for_are_found(tmp_path: Path) -> None:
    processing = load_processing(str(build_tiny(tmp_path, "qwen3")))
    ids = processing.encode("q", [])[0]
    with pytest.raises(DataError, match="no placeholder for photo"):
        check_prompt(Prompt("a", ids, ids, [Media("image", b"", "photo")], {}, 5, "", {}), processing)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("short", "positions for 4 tokens instead of 5"),
        ("mask", "2 visual tokens, 1 features"),
        ("negative", "a negative position"),
        ("axes", "text whose positions differ between the axes"),
        ("order", "text whose positions do not grow"),
    ],
)
def test_wrong_positions_are_found(fault: str, message: str) -> None:
    prompt = Prompt("train-0-5", [1, 2, 3, 4], [1, 2, 3, 4], [], {}, 5, "")
    positions = torch.arange(5).expand(3, -1).clone()
    visual = np.array([1, 2])
    check_layout(prompt, positions, visual, 2)
    if fault == "short":
        positions = positions[:, :-1]
    elif fault == "negative":
        positions[0, 1] = -1
    elif fault == "axes":
        positions[2, 3] += 1
    elif fault == "order":
        positions[:, 3] = 0
    with pytest.raises(DataError, match=rf"row 5 .*{message}"):
        check_layout(prompt, positions, visual, 1 if fault == "mask" else 2)
