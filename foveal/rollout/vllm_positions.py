"""The trainer's positions in vLLM, for prompts with videos.

The two differ on them: after a video of Qwen2-VL or Qwen2.5-VL vLLM goes on from the largest of its positions, which in
a long one is that of its time. transformers, whose positions the trainer takes, goes on from its height or width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foveal.models.positions import prompt_positions

GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")


def take_over_positions(worker: Any) -> None:
    """Runs in vLLM's worker: from now on its model has the positions of transformers for prompts with videos."""
    model = worker.get_model()
    if hasattr(model, "get_mrope_input_positions"):
        model.get_mrope_input_positions = _Positions(model.get_mrope_input_positions, worker.vllm_config)


class _Positions:
    """In the place of a model's `get_mrope_input_positions`."""

    def __init__(self, own: Any, vllm_config: Any) -> None:
        from transformers import AutoModelForImageTextToText

        self._own = own
        with torch.device("meta"):  # the rule is a method of the model, which needs no weights for it
            self._model = AutoModelForImageTextToText.from_config(vllm_config.model_config.hf_config)
        self._last: tuple[list[int], dict[str, torch.Tensor]] | None = None
        self._positions: tuple[torch.Tensor, int]

    def __call__(self, input_tokens: Sequence[int], mm_features: list[Any], **others: Any) -> tuple[torch.Tensor, int]:
        """(3, P) int64, and what is added to an index from P on to make the position of a token there."""
        if not any(feature.modality == "video" for feature in mm_features):
            result: tuple[torch.Tensor, int] = self._own(input_tokens, mm_features, **others)
            return result
        tokens, grids = list(input_tokens), _grids(mm_features)
        if not self._same(tokens, grids):  # the answers to a prompt come one after the other
            positions = prompt_positions(self._model, tokens, grids)
            self._last = tokens, grids
            self._positions = positions[:, :-1].contiguous(), int(positions[0, -1]) - len(tokens)
        return self._positions

    def _same(self, tokens: list[int], grids: dict[str, torch.Tensor]) -> bool:
        if self._last is None or self._last[0] != tokens or self._last[1].keys() != grids.keys():
            return False
        return all(torch.equal(self._last[1][name], grid) for name, grid in grids.items())


def _grids(mm_features: list[Any]) -> dict[str, torch.Tensor]:
    """Those of the features that decide positions, of all media in the order of their tokens."""
    media = [feature.data for feature in sorted(mm_features, key=lambda feature: feature.mm_position.offset)]
    found = {name: [medium[name].data for medium in media if name in medium] for name in GRIDS}
    return {name: torch.stack(list(map(torch.as_tensor, grids))) for name, grids in found.items() if grids}
