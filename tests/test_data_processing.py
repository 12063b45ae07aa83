from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from foveal.data import images
from foveal.data.feature_cache import FeatureCache
from foveal.data.images import PictureError
from foveal.data.processing import Processing, load_processing
from foveal.errors import DataError, ModelError
from foveal.quickstart.tiny import build_tiny
from foveal.types import Media, Prompt
from tests.data_support import encoded, noise

SIZES = [(8, 8), (31, 57), (56, 56), (63, 91), (100, 1000), (640, 480), (1333, 777), (2600, 2700)]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def processing(folder: Path) -> Processing:
    return load_processing(str(folder), min_pixels=4096, max_pixels=200_000)


def chat(processing: Processing, pictures: int) -> str:
    parts = [{"type": "image"}] * pictures + [{"type": "text", "text": "Which colour?"}]
    return processing.render([{"role": "user", "content": parts}])


def media_of(*sizes: tuple[int, int]) -> list[Media]:
    return [Media("image", encoded(noise(*size), "JPEG"), f"image {i}") for i, size in enumerate(sizes)]


def test_both_id_lists_differ_only_in_repeated_placeholders(processing: Processing) -> None:
    token_ids, expanded, features = processing.encode(chat(processing, 2), media_of((60, 80), (200, 100)))
    counts = [int(n) // processing.merge_length for n in features["image_grid_thw"].prod(-1)]
    assert token_ids.count(processing.image_token_id) == 2
    assert expanded.count(processing.image_token_id) == sum(counts)
    assert [t for t in expanded if t != processing.image_token_id] == [
        t for t in token_ids if t != processing.image_token_id
    ]


def test_features_are_what_the_models_own_processor_makes(processing: Processing) -> None:
    media = media_of((60, 80))
    text = chat(processing, 1)
    _, expanded, features = processing.encode(text, media)
    own = processing.processor(text=[text], images=processing.pictures(media), return_tensors="pt")
    assert own["input_ids"][0].tolist() == expanded
    assert torch.equal(own["pixel_values"], features["pixel_values"])
    assert set(features) == {"pixel_values", "image_grid_thw"}


def test_text_alone_has_no_features(processing: Processing) -> None:
    token_ids, expanded, features = processing.encode(chat(processing, 0), [])
    assert token_ids == expanded
    assert features == {}


@pytest.mark.parametrize("max_pixels", [50_000, 400_000, None])
def test_counted_tokens_equal_the_processors(folder: Path, max_pixels: int | None) -> None:
    processing = load_processing(str(folder), min_pixels=4096, max_pixels=max_pixels)
    text = chat(processing, 1)
    for size in SIZES:
        expanded = processing.encode(text, media_of(size))[1]
        assert processing.count_tokens([text], [[size]]) == [len(expanded)], size


def test_counted_tokens_without_the_processors_arithmetic(
    processing: Processing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(type(processing.processor), "_get_num_multimodal_tokens")
    monkeypatch.setattr(processing, "_tokens_of_size", {})
    text = chat(processing, 1)
    assert processing.count_tokens([text], [[(63, 91)]]) == [len(processing.encode(text, media_of((63, 91)))[1])]


def test_pixel_bounds_hold(folder: Path) -> None:
    processing = load_processing(str(folder), min_pixels=40_000, max_pixels=60_000)
    for size in ((32, 32), (1000, 1000)):
        grid = processing.encode(chat(processing, 1), media_of(size))[2]["image_grid_thw"][0]
        patch = processing.processor.image_processor.patch_size
        assert 40_000 <= int(grid.prod()) * patch**2 <= 60_000


def test_shrinking_while_decoding_changes_no_grid(processing: Processing, monkeypatch: pytest.MonkeyPatch) -> None:
    media = media_of((700, 900))
    plain = processing.encode(chat(processing, 1), media)[2]
    monkeypatch.setattr(images, "SHRINK_ABOVE", 1000)
    shrunk = processing.encode(chat(processing, 1), media)[2]
    assert processing.pictures(media)[0].size != (900, 700)
    assert torch.equal(plain["image_grid_thw"], shrunk["image_grid_thw"])
    assert (plain["pixel_values"] - shrunk["pixel_values"]).abs().mean() < 0.1


@pytest.mark.parametrize("limits", [(None, None), (784, 5000), (4096, 4096), (1, 800)])
def test_tiny_and_extreme_pictures_have_the_tokens_of_their_own_size(
    folder: Path, limits: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    processing = load_processing(str(folder), min_pixels=limits[0], max_pixels=limits[1])
    text = chat(processing, 1)
    for shrink in (10**9, 1):
        monkeypatch.setattr(images, "SHRINK_ABOVE", shrink)
        for size in [(1, 1), (1, 2), (3, 1), (3, 3), (1, 200), (199, 1), (7, 1400), (1400, 7), (28, 5000), (40, 4000)]:
            media = [Media("image", encoded(noise(*size)), "x")]
            assert processing.count_tokens([text], [[size]]) == [len(processing.encode(text, media)[1])], size


def test_the_limits_of_a_published_configuration_give_way_to_the_runs(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "processor_config.json").unlink()
    own = load_processing(str(folder)).processor
    published = json.loads(own.image_processor.to_json_string()) | {"min_pixels": 3136, "max_pixels": 12845056}
    published |= {"processor_class": type(own).__name__}
    del published["size"]
    (tmp_path / "m" / "preprocessor_config.json").write_text(json.dumps(published))
    processing = load_processing(str(tmp_path / "m"), min_pixels=4096, max_pixels=20_000)
    patch = processing.processor.image_processor.patch_size
    for size, least, most in (((1000, 1000), 10_000, 20_000), ((10, 10), 4096, 10_000)):
        grid = processing.encode(chat(processing, 1), media_of(size))[2]["image_grid_thw"]
        assert least <= int(grid.prod()) * patch**2 <= most


def test_vision_ids_are_forbidden_and_end_ids_joined(folder: Path) -> None:
    processing = load_processing(str(folder))
    names = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    assert processing.forbidden_ids == sorted(processing.tokenizer.convert_tokens_to_ids(names))
    assert processing.eos_ids == sorted(processing.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))


def test_quoted_vision_token_is_plain_text(processing: Processing) -> None:
    text = processing.neutralise("what is <|image_pad|>?")
    assert processing.image_token_id not in processing.tokenizer(text)["input_ids"]


def test_broken_chat_template_is_named(folder: Path) -> None:
    processing = load_processing(str(folder), chat_template="{{ messages[0]['role'] }}")
    with pytest.raises(DataError, match="0 image placeholders for 1 images"):
        processing.encode(chat(processing, 1), media_of((60, 60)))


def test_extreme_aspect_ratio_is_a_picture_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "SHRINK_ABOVE", 1000)
    with pytest.raises(PictureError, match="aspect ratio"):
        load_processing(str(folder)).pictures(media_of((2, 1000)))


def test_save_copies_every_file_unchanged(folder: Path, tmp_path: Path) -> None:
    load_processing(str(folder), max_pixels=5000).save(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"} <= names
    assert names & {"processor_config.json", "preprocessor_config.json"}
    for name in names:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_save_writes_the_chat_template_that_was_trained_with(folder: Path, tmp_path: Path) -> None:
    template = (folder / "chat_template.jinja").read_text() + "{# other #}"
    load_processing(str(folder), chat_template=template).save(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == template
    shutil.copy(folder / "config.json", tmp_path)
    assert load_processing(str(tmp_path)).processor.chat_template == template


def test_vision_model_without_processor_names_files_and_cure(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    for name in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        (tmp_path / "m" / name).unlink(missing_ok=True)
    with pytest.raises(ModelError) as error:
        load_processing(str(tmp_path / "m"))
    for part in (str(tmp_path / "m"), "preprocessor_config.json", "processor_config.json", "Copy them from the base"):
        assert part in str(error.value)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no folder"):
        load_processing(str(tmp_path / "gone"))


def test_text_model_has_no_processor(tmp_path: Path) -> None:
    processing = load_processing(str(build_tiny(tmp_path, "qwen3")))
    assert processing.processor is None
    assert processing.forbidden_ids == []


def test_other_tokenizer_is_used_and_saved(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "<|im_end|>"}))
    processing = load_processing(str(folder), tokenizer_path=str(other))
    processing.save(tmp_path / "out")
    assert processing.tokenizer.pad_token == processing.processor.tokenizer.pad_token == "<|im_end|>"
    assert "<|im_end|>" in (tmp_path / "out" / "tokenizer_config.json").read_text()


def prompt_of(processing: Processing, name: str) -> Prompt:
    media = media_of((60, 80))
    token_ids, expanded, features = processing.encode(chat(processing, 1), media)
    return Prompt(name, token_ids, expanded, media, {}, 0, None, features)


def test_features_are_made_again_after_pickling(processing: Processing) -> None:
    prompt = prompt_of(processing, "a")
    again = processing.features(pickle.loads(pickle.dumps(prompt)))
    assert {k: v.tolist() for k, v in again.items()} == {k: v.tolist() for k, v in prompt.features.items()}


def test_features_used_longest_ago_are_dropped_at_the_limit(
    processing: Processing, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt_of(processing, name) for name in "abc"]
    size = sum(value.nbytes for value in prompts[0].features.values())
    cache = FeatureCache(2 * size)
    monkeypatch.setattr(processing, "_feature_cache", cache)
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        processing.features(prompt)
    assert [prompt.features is None for prompt in prompts] == [False, True, False]
    assert len(processing.features(prompts[1])["pixel_values"]) > 0


def test_features_of_forgotten_prompts_count_no_longer(processing: Processing) -> None:
    cache = FeatureCache()
    prompt = prompt_of(processing, "a")
    cache.keep(prompt)
    assert cache.used > 0
    del prompt
    assert cache.used == 0
