"""What a vision tower derives from the sizes of its pictures: positions, windows, where attention begins and ends.

transformers makes these tables in every forward, picture by picture, from a grid that lies on the device, and waits
for the device several times. All of them depend on the grid alone, so they are made on the host once per distinct grid,
stay on the device, and are handed to the tower, which takes precomputed ones (transformers 5.16 and later).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from foveal.models.transfer import to_device

Grid: TypeAlias = tuple[int, int, int]
"""Patches of a picture or video along time, height and width."""


@dataclass(frozen=True)
class Geometry:
    """The sizes of a vision tower that its tables depend on.

    Attributes:
        merge: patches along each side of the square that becomes one visual token.
        patch: pixels along each side of a patch.
        window: pixels along each side of an attention window; None where every layer sees the whole picture.
        positions: (side, mode, align_corners) of the learned position table and its interpolation; None where there is
            no such table.
    """

    merge: int
    patch: int
    window: int | None
    positions: tuple[int, str, bool] | None


def geometry_of(tower: Any) -> Geometry:
    learned = hasattr(tower, "num_grid_per_side")
    return Geometry(
        merge=tower.spatial_merge_size,
        patch=tower.config.patch_size,
        window=getattr(tower, "window_size", None),
        positions=(tower.num_grid_per_side, tower.interpolation_mode, tower.interpolation_align_corners)
        if learned
        else None,
    )


@dataclass(frozen=True)
class GridTables:
    """The tables of one grid of N patches that make M visual tokens, on a device.

    Attributes:
        position_ids: (N, 2) int64, row and column of each patch.
        window_index: (M,) int64, the visual token in each place of the windows' order; None without windows.
        windows: patches of each window.
        taps: (N, 4) int64 and (N, 4) float32, entries of the learned position table and their weights; None where there
            is no such table.
    """

    position_ids: torch.Tensor
    window_index: torch.Tensor | None
    windows: tuple[int, ...]
    taps: tuple[torch.Tensor, torch.Tensor] | None


@lru_cache(maxsize=256)  # a grid of 4,096 patches takes about 0.3 MB
def grid_tables(grid: Grid, geometry: Geometry, device: torch.device) -> GridTables:
    from transformers import vision_utils

    rows = torch.tensor([grid])
    window_index, windows, taps = None, (), None
    if geometry.window is not None:
        window_index, ends = vision_utils.get_vision_window_index(
            rows, spatial_merge_size=geometry.merge, window_size=geometry.window, patch_size=geometry.patch
        )
        window_index, windows = to_device(window_index, device), tuple(ends.diff().tolist())
    if geometry.positions is not None:
        side, mode, align = geometry.positions
        found = vision_utils.get_vision_interpolation_indices_and_weights(
            rows, num_grid_per_side=side, mode=mode, align_corners=align, spatial_merge_size=geometry.merge
        )
        taps = to_device(found[0], device), to_device(found[1], device)
    positions = vision_utils.get_vision_position_ids(rows, geometry.merge)
    return GridTables(to_device(positions, device), window_index, windows, taps)


def tower_tables(tower: Any, grids: Sequence[Grid], device: torch.device) -> dict[str, Any]:
    """Keyword arguments of the tower's forward over pictures of these grids, one after the other."""
    geometry = geometry_of(tower)
    tables = [grid_tables(grid, geometry, device) for grid in grids]
    frames = [height * width for time, height, width in grids for _ in range(time)]
    found: dict[str, Any] = {
        "position_ids": torch.cat([t.position_ids for t in tables]),
        "cu_seqlens": _ends(frames, device),
        "max_seqlen": max(frames),
    }
    if geometry.window is not None:
        windows = [length for t in tables for length in t.windows]
        found["window_index"] = window_order(tower, grids, device)
        found["cu_window_seqlens"] = _ends(windows, device)
        found["max_window_seqlen"] = max(windows)
    if geometry.positions is not None:
        found["interp_indices"] = torch.cat([t.taps[0] for t in tables if t.taps])
        found["interp_weights"] = torch.cat([t.taps[1] for t in tables if t.taps])
    return found


def window_order(tower: Any, grids: Sequence[Grid], device: torch.device) -> torch.Tensor | None:
    """(M,) int64: the visual token in each place of the order in which the windows lie; None without windows."""
    geometry = geometry_of(tower)
    if geometry.window is None:
        return None
    starts = accumulate((visual_tokens(grid, geometry.merge) for grid in grids), initial=0)
    indices = (grid_tables(grid, geometry, device).window_index for grid in grids)
    return torch.cat([index + start for index, start in zip(indices, starts, strict=False) if index is not None])


def visual_tokens(grid: Grid, merge: int) -> int:
    """Visual tokens that a picture of this grid becomes."""
    return grid[0] * grid[1] * grid[2] // merge**2


def _ends(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """(len(lengths) + 1,) int32: where each stretch begins and ends."""
    return to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)
