"""Pictures: computed once per content and, where the tower isn't trained, once per step; tables once per grid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foveal.models.feature_store import FeatureStore
from foveal.models.grids import Grid, grid_tables, tower_tables
from foveal.models.loading import load_model
from foveal.models.vision import Picture, encode, same_features, vision_tower
from foveal.models.widths import align_vision_mlps
from foveal.quickstart.tiny import build_tiny
from tests.double_precision import DoublePrecision

CPU = torch.device("cpu")
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
GRIDS: list[Grid] = [(1, 12, 10), (1, 4, 6), (3, 4, 4), (1, 12, 10)]  # several windows, a video, a size twice


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with DoublePrecision():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: build_tiny(root / family, family) for family in FAMILIES}  # type: ignore[arg-type]


def load(folder: Path) -> Any:
    return load_model(str(folder), dtype=torch.float64, device=CPU)


def pictures_for(tower: Any, *numbers: int) -> list[Picture]:
    """The pictures of these numbers, each with content of its own."""
    config = tower.config
    width = 3 * config.temporal_patch_size * config.patch_size**2
    found = []
    for number in numbers:
        grid = GRIDS[number]
        generator = torch.Generator().manual_seed(number)
        pixels = torch.randn(grid[0] * grid[1] * grid[2], width, generator=generator, dtype=torch.float64)
        found.append(Picture(grid, lambda pixels=pixels: pixels, key=number))  # type: ignore[misc]
    return found


def plain(model: Any, pictures: list[Picture]) -> list[torch.Tensor]:
    """What transformers makes of them: the visual tokens, then those of each deep-stack layer."""
    pixels = torch.cat([picture.pixels() for picture in pictures])
    grids = torch.tensor([picture.grid for picture in pictures])
    output = model.model.get_image_features(pixels, grids, return_dict=True)
    columns = [output.pooler_output, *getattr(output, "deepstack_features", ())]
    # transformers 5.17 gives deep-stack features whole, 5.19 one part per picture
    return [column if isinstance(column, torch.Tensor) else torch.cat(column) for column in columns]


def gradients(tower: torch.nn.Module, columns: Any) -> dict[str, torch.Tensor]:
    """Of a sum in which every number of every column has a weight of its own."""
    tower.zero_grad()
    weights = [torch.linspace(-1, 1, c.numel(), dtype=c.dtype).view_as(c) for c in columns]
    sum((c * w).sum() for c, w in zip(columns, weights, strict=True)).backward()  # type: ignore[union-attr]
    return {name: p.grad.clone() for name, p in tower.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] - grad).norm() <= 1e-9 * grad.norm() + 1e-14, name


@contextmanager
def patches_seen(tower: Any) -> Iterator[list[int]]:
    """How many patches each forward of the tower gets."""
    seen: list[int] = []
    hook = tower.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    yield seen
    hook.remove()


class HostReads(TorchDispatchMode):
    """Counts what makes a host wait for a GPU: numbers read back, and shapes that depend on numbers."""

    WAITING = (
        "aten._local_scalar_dense",
        "aten.nonzero",
        "aten.repeat_interleave.Tensor",
        "aten.unique",
        "aten.is_nonzero",
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(self.WAITING):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_features_and_gradients_are_those_of_transformers(folders: dict[str, Path], family: str) -> None:
    model = load(folders[family])
    tower: Any = vision_tower(model)
    pictures = pictures_for(tower, 0, 1, 2, 3)
    expected = plain(model, pictures)
    expected_gradients = gradients(tower, expected)

    found = encode(tower, pictures, device=CPU)

    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert_close(gradients(tower, found), expected_gradients)


def test_weights_may_come_to_the_device_as_late_as_the_tower_begins(folders: dict[str, Path]) -> None:
    """As sharded ones do from host memory."""
    tower: Any = vision_tower(load(folders["qwen2_5_vl"]))
    pictures = pictures_for(tower, 0, 1)
    expected = encode(tower, pictures, device=CPU)
    there = dict(tower.state_dict())
    elsewhere = {name: weight.to("meta") for name, weight in there.items()}
    tower.load_state_dict(elsewhere, assign=True)
    tower.register_forward_pre_hook(lambda *_: tower.load_state_dict(there, assign=True) and None)
    assert torch.equal(encode(tower, pictures, device=CPU)[0], expected[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_that_comes_several_times_is_computed_once(folders: dict[str, Path], family: str) -> None:
    model = load(folders[family])
    tower: Any = vision_tower(model)
    pictures = pictures_for(tower, 1, 0, 1, 2, 0)
    expected = plain(model, pictures)
    expected_gradients = gradients(tower, expected)

    with patches_seen(tower) as seen:
        found = encode(tower, pictures, device=CPU)

    assert seen == [24 + 120 + 48]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert_close(gradients(tower, found), expected_gradients)


def test_a_picture_without_a_key_is_computed_by_itself(folders: dict[str, Path]) -> None:
    tower: Any = vision_tower(load(folders["qwen3_vl"]))
    (picture,) = pictures_for(tower, 1)
    alone = Picture(picture.grid, picture.pixels, key=None)
    tower.requires_grad_(False)
    store = FeatureStore()
    with patches_seen(tower) as seen:
        encode(tower, [alone, alone], store, device=CPU)
        encode(tower, [alone], store, device=CPU)
    assert seen == [48, 24]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_untrained_tower_runs_once_a_step_for_each_picture(folders: dict[str, Path], family: str) -> None:
    tower: Any = vision_tower(load(folders[family]))
    tower.requires_grad_(False)
    store = FeatureStore()
    first = encode(tower, pictures_for(tower, 0, 1), store, device=CPU)
    with patches_seen(tower) as seen:
        again = encode(tower, pictures_for(tower, 0, 1), store, device=CPU)
        mixed = encode(tower, pictures_for(tower, 1, 2, 0), store, device=CPU)
        store.clear()
        encode(tower, pictures_for(tower, 1), store, device=CPU)
    assert seen == [48, 24]
    assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    expected = encode(tower, pictures_for(tower, 1, 2, 0), device=CPU)
    for ours, theirs in zip(mixed, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_pixels_are_not_asked_for_again(folders: dict[str, Path]) -> None:
    tower: Any = vision_tower(load(folders["qwen3_vl"]))
    tower.requires_grad_(False)
    store = FeatureStore()
    (picture,) = pictures_for(tower, 1)
    encode(tower, [picture], store, device=CPU)

    def refuse() -> torch.Tensor:
        raise AssertionError("the picture was made again")

    encode(tower, [Picture(picture.grid, refuse, picture.key)], store, device=CPU)


def test_a_trained_tower_is_never_remembered(folders: dict[str, Path]) -> None:
    tower: Any = vision_tower(load(folders["qwen3_vl"]))
    store = FeatureStore()
    encode(tower, pictures_for(tower, 1), store, device=CPU)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.mul_(1.1)
    found = encode(tower, pictures_for(tower, 1), store, device=CPU)
    torch.testing.assert_close(found, encode(tower, pictures_for(tower, 1), device=CPU), rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_under_a_trained_projector_the_rest_is_remembered(folders: dict[str, Path], family: str) -> None:
    tower: Any = vision_tower(load(folders[family]))
    for name, parameter in tower.named_parameters():
        parameter.requires_grad_("merger" in name)
    store = FeatureStore()
    encode(tower, pictures_for(tower, 0, 1), store, device=CPU)
    with torch.no_grad():  # an optimizer step
        for parameter in tower.parameters():
            parameter.mul_(1.1 if parameter.requires_grad else 1.0)

    with patches_seen(tower) as seen:
        found = encode(tower, pictures_for(tower, 1, 0, 1), store, device=CPU)
    found_gradients = gradients(tower, found)

    assert not seen
    expected = encode(tower, pictures_for(tower, 1, 0, 1), device=CPU)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert_close(found_gradients, gradients(tower, expected))


def test_a_full_store_keeps_what_it_has(folders: dict[str, Path]) -> None:
    tower: Any = vision_tower(load(folders["qwen2_vl"]))
    tower.requires_grad_(False)
    (columns,) = encode(tower, pictures_for(tower, 1), device=CPU)
    store = FeatureStore(device_bytes=columns.nbytes, host_bytes=0)
    encode(tower, pictures_for(tower, 1, 0), store, device=CPU)
    with patches_seen(tower) as seen:
        encode(tower, pictures_for(tower, 1, 0), store, device=CPU)
    assert seen == [120]


def test_towers_make_the_same_only_with_equal_untrained_weights(folders: dict[str, Path]) -> None:
    ours, theirs = (vision_tower(load(folders["qwen3_vl"])) for _ in range(2))
    assert ours is not None
    assert theirs is not None
    theirs.requires_grad_(False)
    assert not same_features(ours, theirs)
    ours.requires_grad_(False)
    assert same_features(ours, theirs)
    assert not same_features(ours, None)
    with torch.no_grad():
        next(iter(theirs.parameters())).view(-1)[0] += 1e-9
    assert not same_features(ours, theirs)
    assert not same_features(ours, vision_tower(load(folders["qwen3_vl"]).bfloat16().requires_grad_(False)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_host_never_waits_for_the_tower(folders: dict[str, Path], family: str) -> None:
    model = load(folders[family])
    tower: Any = vision_tower(model)
    for module in tower.modules():  # on a GPU attention is one kernel call; its substitute reads lengths
        if hasattr(module, "qkv"):
            module.forward = lambda hidden, **_: hidden
    pictures = pictures_for(tower, 0, 1, 2)
    encode(tower, pictures, device=CPU)  # tables of new grids are made here
    with HostReads() as ours:
        columns = encode(tower, pictures, device=CPU)
        sum(c.sum() for c in columns).backward()  # type: ignore[union-attr]
    with HostReads() as theirs:
        plain(model, pictures)
    assert theirs.found
    assert not ours.found


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_are_made_once_per_grid(folders: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import vision_utils

    made: list[Grid] = []
    original = vision_utils.get_vision_position_ids

    def count(grids: torch.Tensor, merge: int) -> torch.Tensor:
        made.extend((t, h, w) for t, h, w in grids.tolist())
        return original(grids, merge)

    monkeypatch.setattr(vision_utils, "get_vision_position_ids", count)
    tower: Any = vision_tower(load(folders[family]))
    grid_tables.cache_clear()
    for _ in range(2):
        tower_tables(tower, GRIDS, CPU)
    assert made == list(dict.fromkeys(GRIDS))


def test_an_unaligned_mlp_computes_the_same_with_zeros_added(folders: dict[str, Path]) -> None:
    model = load(folders["qwen2_5_vl"])
    tower: Any = vision_tower(model)
    pictures = pictures_for(tower, 0, 1)
    expected = encode(tower, pictures, device=CPU)
    expected_gradients = gradients(tower, expected)

    assert align_vision_mlps(tower) == len(tower.blocks)
    found = encode(tower, pictures, device=CPU)

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert_close(gradients(tower, found), expected_gradients)


def test_aligned_mlps_are_left_alone(folders: dict[str, Path]) -> None:
    assert align_vision_mlps(vision_tower(load(folders["qwen3_vl"]))) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_are_embedded_as_by_the_convolution(folders: dict[str, Path], family: str) -> None:
    tower: Any = vision_tower(load(folders[family]))
    pixels = torch.cat([picture.pixels() for picture in pictures_for(tower, 0, 1)])
    torch.testing.assert_close(
        tower.patch_embed(pixels), type(tower.patch_embed).forward(tower.patch_embed, pixels), rtol=0, atol=1e-12
    )
    assert "forward" in vars(tower.patch_embed)  # it was replaced
