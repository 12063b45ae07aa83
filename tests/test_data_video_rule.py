"""Videos through the processors: what is made of them equals what the model's own processor makes, and is bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foveal.data.images import PictureError
from foveal.data.media import MediaSource
from foveal.data.processing import Processing, load_processing
from foveal.data.video import Stills, VideoHeader, pack_stills
from foveal.quickstart.tiny import build_tiny
from foveal.types import Media, Prompt
from tests.data_support import encoded, noise
from tests.video_support import film

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
MAX_PIXELS = 20_000


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def processing(folder: Path) -> Processing:
    return load_processing(str(folder), min_pixels=4096, max_pixels=MAX_PIXELS, video_fps=2.0)


def chat(processing: Processing, *kinds: str) -> str:
    parts = [{"type": "text", "text": "What?"}, *({"type": kind} for kind in kinds), {"type": "text", "text": "Well?"}]
    return processing.render([{"role": "user", "content": parts}])


def stills(count: int, height: int = 40, width: int = 60, fps: float | None = None) -> Media:
    frames = Stills(tuple(encoded(noise(height, width, number)) for number in range(count)), fps)
    return Media("video", pack_stills(frames, "x"), "row 0, video 0")


def decoded(path: Path) -> torch.Tensor:
    import av

    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).contiguous()


@pytest.mark.parametrize(("frames", "rate", "size"), [(30, 10, (48, 64)), (29, 30, (240, 320)), (7, 2, (64, 48))])
def test_ids_and_features_are_what_the_models_own_processor_makes(
    processing: Processing, tmp_path: Path, frames: int, rate: int, size: tuple[int, int]
) -> None:
    path = film(tmp_path / "a.mp4", frames, rate, height=size[0], width=size[1])
    source = MediaSource.find("video", str(path), None, "x")
    picture = noise(50, 70)
    text = chat(processing, "image", "video")
    token_ids, expanded, features = processing.encode(text, [Media("image", encoded(picture), "y"), source.read()])
    plain = processing.processor(
        text=[text],
        images=[picture],
        videos=[decoded(path)],
        videos_kwargs={
            "do_sample_frames": True,
            "fps": 2.0,
            "video_metadata": [{"total_num_frames": frames, "fps": float(rate)}],
        },
        return_tensors="pt",
    )
    assert plain["input_ids"][0].tolist() == expanded
    assert features.keys() == plain.keys() - {"input_ids", "attention_mask", "mm_token_type_ids"}
    for name, value in features.items():
        assert torch.equal(value, plain[name]), name
    assert processing.count_tokens([text], [[picture.size[::-1], source.size()]]) == [len(expanded)]
    assert token_ids.count(processing.placeholders["video"]) == 1


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_pictures_given_as_a_video_are_all_used(processing: Processing, count: int) -> None:
    text = chat(processing, "video")
    _, expanded, features = processing.encode(text, [stills(count)])
    assert features["video_grid_thw"][0, 0] == (count + 1) // 2
    assert processing.count_tokens([text], [[VideoHeader(count, None, (40, 60))]]) == [len(expanded)]


def test_pictures_with_a_rate_are_sampled(processing: Processing) -> None:
    _, _, features = processing.encode(chat(processing, "video"), [stills(20, fps=5.0)])
    assert features["video_grid_thw"][0, 0] == 4  # four seconds at two a second, in pairs


def test_more_pictures_than_the_processor_takes_are_thinned_out(
    processing: Processing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processing.processor.video_processor, "max_frames", 6)
    _, _, features = processing.encode(chat(processing, "video"), [stills(15)])
    assert features["video_grid_thw"][0, 0] == 3


def test_frames_and_whole_videos_are_bounded(processing: Processing) -> None:
    own = processing.processor.video_processor
    for frames, size in ((60, (1080, 1920)), (20_000, (2160, 3840)), (4, (300, 3000))):
        t, h, w = processing._videos.grid(VideoHeader(frames, 30.0, size))  # type: ignore[union-attr]
        assert h * w * own.patch_size**2 <= MAX_PIXELS
        assert t <= own.max_frames / own.temporal_patch_size


def test_a_long_video_gets_no_more_than_qwens_own_code_gives_it(folder: Path) -> None:
    processing = load_processing(str(folder), max_pixels=None)
    own = processing.processor.video_processor
    own.size = type(own.size)(shortest_edge=own.size["shortest_edge"], longest_edge=10**9)
    header = VideoHeader(30 * 600, 30.0, (1080, 1920))
    frame = np.prod(processing._videos.grid(header)[1:]) // own.merge_size**2  # type: ignore[union-attr]
    assert frame <= 768


def test_features_are_made_again_after_pickling(processing: Processing) -> None:
    media = [Media("image", encoded(noise(50, 70)), "y"), stills(4)]
    token_ids, expanded, features = processing.encode(chat(processing, "image", "video"), media)
    again = processing.features(Prompt("a", token_ids, expanded, media, {}, 0, None, None))
    assert again.keys() == features.keys()
    assert all(torch.equal(again[name], value) for name, value in features.items())


def test_pixels_are_rounded_and_times_are_not(folder: Path) -> None:
    processing = load_processing(str(folder), video_fps=3.0)
    processing.feature_dtype = torch.bfloat16
    _, _, features = processing.encode(chat(processing, "video"), [stills(4)])
    assert features["pixel_values_videos"].dtype == torch.bfloat16
    if "second_per_grid_ts" in features:
        assert features["second_per_grid_ts"].tolist() == pytest.approx([2 / 3], abs=1e-6)


def test_extreme_aspect_ratios_are_named(processing: Processing) -> None:
    with pytest.raises(PictureError, match=r"row 0, video 0: 4000x2: .*aspect ratio"):
        processing.encode(chat(processing, "video"), [stills(2, 2, 4000)])


def test_times_stand_before_the_frames_of_qwen3(processing: Processing) -> None:
    expanded: list[Any] = processing.encode(chat(processing, "video"), [stills(4)])[1]
    text = processing.tokenizer.decode(expanded)
    assert ("<0.2 seconds>" in text and "<1.2 seconds>" in text) == processing.stamps_frames
