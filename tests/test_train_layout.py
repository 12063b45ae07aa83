"""Positions and pictures of prompts in whole passes: what is computed how often, and that the numbers don't change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from foveal.cluster.worker import Worker
from foveal.config import load_config
from foveal.config.schema_model import ModelConfig
from foveal.models.feature_store import FeatureStore
from foveal.models.loading import load_model
from foveal.models.parts import freeze_parts
from foveal.preflight import open_processing
from foveal.quickstart.tiny import build_tiny
from foveal.train.layout import PromptLayouts
from foveal.train.scorer import TokenScorer
from foveal.train.scoring import Packer, write_logprobs
from foveal.types import Group, Media
from tests.double_precision import DoublePrecision
from tests.random_groups import naive_logprobs, random_groups
from tests.small_run import small_run

CPU = torch.device("cpu")
FORBIDDEN = [201, 202]
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: build_tiny(root / family, family) for family in FAMILIES}  # type: ignore[arg-type]


def load(folder: Path) -> Any:
    return load_model(str(folder), dtype=torch.float64, device=CPU)


def groups_with_repeats(model: Any) -> list[Group]:
    """Groups of 1, 0, 2, 2 and 1 pictures: the last three share theirs, and the fourth shows one picture twice."""
    groups = random_groups(model, [1, 0, 2])
    first, second = pictures = _pictures(groups[2])
    twice, again = random_groups(model, [2], seed=3)[0], random_groups(model, [1], seed=4)[0]
    _show(model, groups[2], pictures)
    _show(model, twice, [second, second])
    _show(model, again, [first])
    _show(model, groups[0], _pictures(groups[0]))
    for number, group in enumerate((*groups, twice, again)):
        group.prompt.uid = f"train-0-{number}"
    return [*groups, twice, again]


def _pictures(group: Group) -> list[tuple[list[int], torch.Tensor]]:
    features = group.prompt.features or {}
    grids = features["image_grid_thw"]
    return list(zip(grids.tolist(), features["pixel_values"].split(grids.prod(1).tolist()), strict=True))


def _show(model: Any, group: Group, pictures: list[tuple[list[int], torch.Tensor]]) -> None:
    """Makes the prompt one of these pictures, with their content as their files."""
    config, prompt = model.config, group.prompt
    ids = [token for token in prompt.expanded_ids if token >= 10]
    for grid, _ in pictures:
        ids += [config.vision_start_token_id, *[config.image_token_id] * (int(np.prod(grid)) // 4)]
        ids += [config.vision_end_token_id, 10 + len(ids)]
    prompt.token_ids = prompt.expanded_ids = ids
    prompt.features = {
        "pixel_values": torch.cat([pixels for _, pixels in pictures]),
        "image_grid_thw": torch.tensor([grid for grid, _ in pictures]),
    }
    prompt.media = [Media("image", pixels.numpy().tobytes()) for _, pixels in pictures]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def patches_seen(model: Any) -> Iterator[list[int]]:
    """How many patches each forward of the vision tower gets."""
    seen: list[int] = []
    hook = model.model.visual.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    yield seen
    hook.remove()


def scorer_of(model: Any, store: FeatureStore | None = None) -> TokenScorer:
    return TokenScorer(model, forbidden_ids=FORBIDDEN, temperature=1.0, autocast=None, store=store)


def packer_of(model: Any, budget: int = 10**6, shared: bool = True) -> Packer:
    return Packer(budget, shared, PromptLayouts(model, lambda p: p.features or {}), CPU)


def patches(*prompts: Group) -> int:
    """Of all pictures of these groups' prompts."""
    return sum(len((group.prompt.features or {})["pixel_values"]) for group in prompts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [10**6, 60])
def test_repeated_pictures_change_no_number(folders: dict[str, Path], family: str, budget: int) -> None:
    plain = AutoModelForImageTextToText.from_pretrained(
        folders[family], dtype=torch.float64, attn_implementation="sdpa"
    )
    model = load(folders[family])
    groups = groups_with_repeats(model)
    with DoublePrecision():
        expected = [naive_logprobs(plain, g, r, FORBIDDEN, 1.0) for g in groups for r in g.responses]
        torch.cat(expected).square().sum().backward()
        scorer = scorer_of(model)
        found = []
        with patches_seen(model) as seen:
            for pack in packer_of(model, budget).packs(groups):
                found.append(scorer(pack).logprobs)
                found[-1].square().sum().backward()

    assert (torch.cat(found) - torch.cat(expected)).abs().max() < 1e-9
    ours, theirs = gradients(model), gradients(plain)
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert (ours[name] - grad).norm() <= 1e-9 * grad.norm(), name
    if budget > 1000:
        assert seen == [patches(groups[0], groups[2])]


def test_without_the_shared_prefix_each_copy_brings_its_pictures(folders: dict[str, Path]) -> None:
    model = load(folders["qwen3_vl"])
    groups = groups_with_repeats(model)[:1]
    with patches_seen(model) as seen:
        write_logprobs(scorer_of(model, FeatureStore()), packer_of(model, shared=False), groups, "logprobs")
    assert seen == [3 * patches(groups[0])]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_tower_runs_once_for_all_passes_of_a_step(folders: dict[str, Path], family: str) -> None:
    model, reference = load(folders[family]), load(folders[family])
    freeze_parts(model, ModelConfig(freeze_vision_tower=True))
    reference.requires_grad_(False)
    groups = groups_with_repeats(model)
    store = FeatureStore()
    scorer, packer = scorer_of(model, store), packer_of(model, budget=60)
    with patches_seen(model) as seen, patches_seen(reference) as seen_by_reference:
        write_logprobs(scorer_of(reference, store), packer, groups, "ref_logprobs")
        write_logprobs(scorer, packer, groups, "old_logprobs")
        for pack in packer.packs(groups):
            scorer(pack).logprobs.square().sum().backward()
    assert sum(seen_by_reference) == patches(groups[0], groups[2])
    assert not seen

    reused = gradients(model)
    model.zero_grad()
    for pack in packer.packs(groups):
        scorer_of(model)(pack).logprobs.square().sum().backward()
    assert not any("visual" in name for name in reused)
    for name, grad in gradients(model).items():
        assert (reused[name] - grad).norm() <= 1e-9 * grad.norm(), name


def test_positions_are_found_once_a_step(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(folders["qwen3_vl"])
    groups = groups_with_repeats(model)
    calls: list[int] = []
    original = model.model.get_rope_index

    def count(**given: Any) -> Any:
        calls.append(1)
        return original(**given)

    monkeypatch.setattr(model.model, "get_rope_index", count)
    packer = packer_of(model, budget=60)
    for _ in range(3):
        list(packer.packs(groups))
    assert len(calls) == 4  # one of the five prompts is text
    packer.layouts.clear()
    list(packer.packs(groups))
    assert len(calls) == 8


def test_pictures_and_videos_come_in_the_order_of_their_tokens(folders: dict[str, Path]) -> None:
    model = load(folders["qwen2_5_vl"])
    (group,) = random_groups(model, [1])
    prompt, config = group.prompt, model.config
    video = [config.vision_start_token_id, *[config.video_token_id] * 4, config.vision_end_token_id]
    image = [config.vision_start_token_id, *[config.image_token_id] * 1, config.vision_end_token_id]
    prompt.expanded_ids = [11, *video, 12, *image, 13]
    width = 3 * config.vision_config.temporal_patch_size * config.vision_config.patch_size**2
    prompt.features = {
        "pixel_values": torch.ones(4, width),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
        "pixel_values_videos": torch.zeros(16, width),
        "video_grid_thw": torch.tensor([[2, 2, 4]]),
        "second_per_grid_ts": torch.tensor([1.0]),
    }
    prompt.media = [Media("video", b"film"), Media("image", b"photo")]
    layout = PromptLayouts(model, lambda p: p.features or {})(prompt)
    assert [picture.key for picture in layout.pictures] == [("video", b"film"), ("image", b"photo")]
    assert [tuple(picture.pixels().shape) for picture in layout.pictures] == [(16, width), (4, width)]
    assert layout.visual.tolist() == [2, 3, 4, 5, 9]

    (pack,) = packer_of(model).packs([group])
    plain = model.model(
        input_ids=torch.tensor([prompt.expanded_ids]),
        position_ids=layout.positions[:, None, :-1],
        **{k: v for k, v in prompt.features.items() if k != "second_per_grid_ts"},
    ).last_hidden_state[0, -1]
    found = scorer_of(model).head(pack).hidden[0]
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_worker_shares_features_between_its_passes_where_nothing_trains_the_tower(
    tmp_path: Path, frozen: bool
) -> None:
    one_update = ("data.rollout_batch_size=5", "worker.actor.global_batch_size=5")
    freezing = f"worker.actor.model.freeze_vision_tower={frozen}"
    config = load_config([*small_run(tmp_path, "qwen3_vl"), *one_update, freezing])
    worker = Worker(config, open_processing(config), train=True)
    assert worker.reference is not None
    groups = groups_with_repeats(worker.model)
    needed = patches(groups[0], groups[2])
    with patches_seen(worker.model) as seen, patches_seen(worker.reference.model) as seen_by_reference:
        worker.ref_logprobs(groups)
        worker.old_logprobs(groups)
        for response in (r for group in groups for r in group.responses):
            response.columns["advantages"] = np.ones(len(response.token_ids), np.float32)
        worker.update(groups, step=1, total_steps=2, kl_coef=0.1)
        first = sum(seen)
        worker.old_logprobs(groups)
    worker.close()
    assert sum(seen_by_reference) == needed
    assert first == (0 if frozen else 2 * needed)  # otherwise in the old-policy pass and in the update
    assert sum(seen) - first == needed  # a new step


def test_a_loaded_tower_that_differs_is_the_policys_alone(tmp_path: Path) -> None:
    config = load_config([*small_run(tmp_path, "qwen3_vl"), "worker.actor.model.freeze_vision_tower=true"])
    worker = Worker(config, open_processing(config), train=True)
    assert worker.reference is not None
    assert worker.reference.store is worker.scorer.store
    with torch.no_grad():
        worker.model.model.visual.merger.linear_fc2.bias.add_(0.1)
    worker.snapshot(model_only=True, copied=False).write(tmp_path / "global_step_1")
    worker.load(tmp_path / "global_step_1", step=1)
    worker.close()
    assert worker.reference.store is not worker.scorer.store
