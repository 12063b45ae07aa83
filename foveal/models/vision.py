"""Features of pictures: the vision tower runs once per distinct picture, and once per step where it isn't trained."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from foveal.models.feature_store import FeatureStore
from foveal.models.grids import Grid, tower_tables, visual_tokens, window_order
from foveal.models.positions import backbone
from foveal.models.transfer import to_device

Columns: TypeAlias = tuple[torch.Tensor, ...]
"""What a tower makes of its pictures: the visual tokens (V, H), then what is added to each deep-stack layer, alike."""


@dataclass(frozen=True)
class Picture:
    """One picture or video of a prompt, as the processor made it.

    Attributes:
        grid: its size in patches.
        pixels: gives the (patches, values) pixel values; called only where they are needed.
        key: equal for equal content; None for one that is to be computed by itself.
    """

    grid: Grid
    pixels: Callable[[], torch.Tensor]
    key: Hashable | None


class _Fixed(Enum):
    """How much of what the tower computes stays the same for a whole step."""

    NOTHING = 0
    TRUNK = 1  # all up to the projector, which is trained
    TOWER = 2


def encode(
    tower: Any, pictures: Sequence[Picture], store: FeatureStore | None = None, *, device: torch.device
) -> Columns:
    """The features of all pictures, one after the other.

    Pictures of the same content are computed together, once; their gradients add up.

    Args:
        tower: the vision tower of a Qwen-VL model with the packed attention installed.
        store: keeps what the untrained part of the tower computes, to be found again; None for no reuse.
        device: where it computes. Its weights may lie in host memory until then, if they are spread over processes.
    """
    distinct: dict[Hashable, Picture] = {}
    places = [number if picture.key is None else picture.key for number, picture in enumerate(pictures)]
    for place, picture in zip(places, pictures, strict=True):
        distinct.setdefault(place, picture)
    fixed = _fixed_part(tower) if store is not None else _Fixed.NOTHING
    if fixed is _Fixed.NOTHING:
        computed = _run(tower, list(distinct.values()), device)
    else:
        assert store is not None
        compute = _run if fixed is _Fixed.TOWER else _run_trunk
        computed = _recall(tower, list(distinct.values()), store, compute, device)
        if fixed is _Fixed.TRUNK:
            computed = _project(tower, list(distinct.values()), computed)
    of_place = dict(zip(distinct, computed, strict=True))
    return tuple(torch.cat(column) for column in zip(*(of_place[place] for place in places), strict=True))


def vision_tower(model: nn.Module) -> nn.Module | None:
    """The model's vision tower, with the projector that feeds the decoder; None for a text model."""
    return getattr(backbone(model), "visual", None)


def same_features(tower: nn.Module | None, other: nn.Module | None) -> bool:
    """Whether two towers, neither of them trained, make the same of every picture: equal weights of equal types."""
    if (
        tower is None
        or other is None
        or _fixed_part(tower) is not _Fixed.TOWER
        or _fixed_part(other) is not _Fixed.TOWER
    ):
        return False
    ours, theirs = tower.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name].to(ours[name].device))
        for name in ours
    )


def projectors(tower: Any) -> list[nn.Module]:
    """The modules that turn patches into what the decoder takes: of the last layer, then of the deep-stack layers."""
    return [tower.merger, *getattr(tower, "deepstack_merger_list", [])]


def _fixed_part(tower: nn.Module) -> _Fixed:
    if any(isinstance(p, DTensor) for p in tower.parameters()):
        return _Fixed.NOTHING  # a process that finds features would leave the others waiting for its shards
    trained = {p for p in tower.parameters() if p.requires_grad}
    if not trained:
        return _Fixed.TOWER
    in_projectors = {p for module in projectors(tower) for p in module.parameters()}
    return _Fixed.TRUNK if trained <= in_projectors else _Fixed.NOTHING


@torch.no_grad()
def _recall(
    tower: Any,
    pictures: list[Picture],
    store: FeatureStore,
    compute: Callable[[Any, list[Picture], torch.device], list[Columns]],
    device: torch.device,
) -> list[Columns]:
    """What the store holds of the pictures; the others are computed and put there."""
    found = [store.get(picture.key, device) for picture in pictures]
    missing = [picture for picture, columns in zip(pictures, found, strict=True) if columns is None]
    made = iter(compute(tower, missing, device) if missing else [])
    result = []
    for picture, columns in zip(pictures, found, strict=True):
        if columns is None:
            columns = next(made)
            store.put(picture.key, columns)
        result.append(columns)
    return result


def _run(tower: Any, pictures: list[Picture], device: torch.device) -> list[Columns]:
    """One forward of the tower over all pictures."""
    output = _forward(tower, pictures, device)
    columns = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
    return _split(columns, [visual_tokens(p.grid, tower.spatial_merge_size) for p in pictures])


def _run_trunk(tower: Any, pictures: list[Picture], device: torch.device) -> list[Columns]:
    """What the projectors get in a forward over all pictures: (patches, width) each."""
    columns: list[torch.Tensor] = []
    with ExitStack() as hooks:
        # In the order of `projectors`, which is not that of the forward.
        for number, projector in enumerate(projectors(tower)):
            columns.append(torch.empty(0))

            def keep(module: nn.Module, inputs: tuple[torch.Tensor], number: int = number) -> None:
                columns[number] = inputs[0]

            hooks.callback(projector.register_forward_pre_hook(keep).remove)
        _forward(tower, pictures, device)
    return _split(columns, [visual_tokens(p.grid, 1) for p in pictures])


def _project(tower: Any, pictures: list[Picture], inputs: list[Columns]) -> list[Columns]:
    """The rest of the forward after `_run_trunk`, with gradient."""
    columns = [
        projector(torch.cat(column))
        for projector, column in zip(projectors(tower), zip(*inputs, strict=True), strict=True)
    ]
    order = window_order(tower, [p.grid for p in pictures], columns[0].device)
    if order is not None:
        columns = [column[order.argsort()] for column in columns]
    return _split(columns, [visual_tokens(p.grid, tower.spatial_merge_size) for p in pictures])


def _forward(tower: Any, pictures: list[Picture], device: torch.device) -> Any:
    grids = [picture.grid for picture in pictures]
    pixels = torch.cat([to_device(picture.pixels(), device) for picture in pictures])
    tables = tower_tables(tower, grids, device)
    # With all tables given the tower doesn't look at the grid, so that it may stay on the host.
    return tower(pixels.to(tower.dtype), grid_thw=torch.tensor(grids), return_dict=True, **tables)


def _split(columns: Sequence[torch.Tensor], sizes: list[int]) -> list[Columns]:
    """One entry per picture, from rows of all pictures."""
    return list(zip(*(column.split(sizes) for column in columns), strict=True))
