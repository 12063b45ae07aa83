"""What a prompt brings into a pack: its positions and its pictures, found out once a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn

from foveal.data.contract import PIXELS, check_layout
from foveal.models.grids import visual_tokens
from foveal.models.positions import backbone, prompt_positions
from foveal.models.vision import Picture
from foveal.types import IntArray, Prompt

Features = Callable[[Prompt], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class PromptLayout:
    """A prompt of P tokens, V of them visual.

    Attributes:
        positions: (A, P + 1) int64, of the prompt's tokens and of the first token after it.
        pictures: in the order of their tokens.
        visual: (V,) int64, the places of their tokens in the prompt.
    """

    positions: torch.Tensor
    pictures: list[Picture]
    visual: IntArray


class PromptLayouts:
    """Layouts of a step's prompts; every pass over the same `Prompt` gets the same one.

    Args:
        model: decides positions and placeholders.
        features: what the processor made of a prompt's media. Pixels are asked for only when a vision tower needs them.
    """

    def __init__(self, model: nn.Module, features: Features) -> None:
        self._model = model
        self._config = backbone(model).config
        self._features = features
        self._known: dict[int, tuple[Prompt, PromptLayout]] = {}

    def __call__(self, prompt: Prompt) -> PromptLayout:
        if id(prompt) not in self._known:
            features = self._features(prompt)
            pictures, visual = _pictures(prompt, self._features, self._config) if features else ([], _NONE)
            layout = PromptLayout(prompt_positions(self._model, prompt.expanded_ids, features), pictures, visual)
            merge = self._config.vision_config.spatial_merge_size if pictures else 1
            count = sum(visual_tokens(picture.grid, merge) for picture in pictures)
            check_layout(prompt, layout.positions, visual, count)
            self._known[id(prompt)] = prompt, layout  # the prompt too, or another could come to have its id
        return self._known[id(prompt)][1]

    def clear(self) -> None:
        """Lets go of the prompts."""
        self._known.clear()


_NONE: IntArray = np.zeros(0, np.int64)


def _pictures(prompt: Prompt, features: Features, config: Any) -> tuple[list[Picture], IntArray]:
    merge = config.vision_config.spatial_merge_size
    queues = {kind: iter(_of_kind(prompt, features, kind)) for kind in PIXELS}
    kinds = {config.image_token_id: "image", config.video_token_id: "video"}
    ids = np.asarray(prompt.expanded_ids, dtype=np.int64)
    visual = np.flatnonzero(np.isin(ids, list(kinds)))
    pictures: list[Picture] = []
    place = 0
    while place < len(visual):
        picture = next(queues[kinds[int(ids[visual[place]])]])
        pictures.append(picture)
        place += visual_tokens(picture.grid, merge)
    return pictures, visual


def _of_kind(prompt: Prompt, features: Features, kind: str) -> list[Picture]:
    grids = features(prompt).get(f"{kind}_grid_thw")
    if grids is None:
        return []
    sizes = [(t, h, w) for t, h, w in grids.tolist()]
    starts = accumulate((t * h * w for t, h, w in sizes), initial=0)
    # The file's own bytes: comparing them is cheaper than comparing pixels, and the same bytes give the same pixels.
    keys: list[Hashable] = [(kind, medium.data) for medium in prompt.media if medium.kind == kind]
    return [
        Picture(
            grid=grid,
            pixels=partial(_rows, features, prompt, PIXELS[kind], start, start + grid[0] * grid[1] * grid[2]),
            key=key,
        )
        for grid, start, key in zip(sizes, starts, keys or [None] * len(sizes), strict=False)
    ]


def _rows(features: Features, prompt: Prompt, name: str, start: int, end: int) -> torch.Tensor:
    return features(prompt)[name][start:end]
