"""The matrix products of a pass through a model, for model FLOPs utilisation (MFU).

Counted are the products that the mathematics asks for, two operations a multiply-add: linear layers, the experts that a
token is sent to, both products of attention over the pairs that are visible, the patch embedding. Not counted: what is
computed a second time (activation checkpointing, flash attention's backward), what a kernel computes and masks out,
and everything elementwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from foveal.models.attention import Segments
from foveal.models.grids import Grid, visual_tokens
from foveal.models.lora import LoraLinear
from foveal.models.positions import decoder_of
from foveal.models.vision import projectors, vision_tower

_PEAK_BF16 = {  # dense tensor-core peaks in FLOP/s, from the vendors' data sheets
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40": 181e12,
    "L20": 119e12,
    "4090": 165e12,
    "3090": 71e12,
}


def peak_flops(device: torch.device) -> float | None:
    """The device's peak rate for bf16 matrix products, or None where it isn't known (every CPU, for one)."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """The same of a device by its name."""
    return next((peak for key, peak in _PEAK_BF16.items() if key in name), None)


@dataclass(frozen=True)
class Work:
    """What is fed to a model. Adds up over micro-batches.

    Attributes:
        tokens: through the decoder.
        pairs: of a query and a key that it sees, in one layer of the decoder.
        scored: tokens whose logits are computed.
        grids: (time, height, width) in patches of every picture or video through the vision tower.
    """

    tokens: int = 0
    pairs: int = 0
    scored: int = 0
    grids: tuple[Grid, ...] = ()

    def __add__(self, other: Work) -> Work:
        return Work(
            self.tokens + other.tokens,
            self.pairs + other.pairs,
            self.scored + other.scored,
            self.grids + other.grids,
        )


def visible_pairs(segments: Segments) -> int:
    """Pairs of query and key that a packed sequence computes: each run causally, and all of its prompt's run."""
    return sum(
        n * (n + 1) // 2 + (n * segments.lengths[p] if p >= 0 else 0)
        for n, p in zip(segments.lengths, segments.prefix, strict=True)
    )


@dataclass
class _Cost:
    """Operations for one row (a token, patch or pair): forward, and those that the backward pass adds."""

    forward: float = 0.0
    backward: float = 0.0

    def add(self, weights: float, *, weight_gradient: bool, input_gradient: bool) -> None:
        """A product of a row with this many weights."""
        self.forward += 2.0 * weights
        self.backward += 2.0 * weights * (weight_gradient + input_gradient)

    def add_pairs(self, width: int, *, input_gradient: bool) -> None:
        """Scores and weighted values of one query-key pair over all heads together: two products each way and input."""
        self.forward += 4.0 * width
        self.backward += 8.0 * width * input_gradient


class FlopCounter:
    """Counts the operations of passes through one model, whose layers are read once.

    Which weights are trained is looked at here too, so freeze before: a frozen weight takes no gradient, and a product
    before the first trained weight passes none back.

    Args:
        model: a transformers model with a language-model head, or without (a critic's).
    """

    def __init__(self, model: Any) -> None:
        tower = vision_tower(model)
        self._tower = None if tower is None else _Tower(tower)
        decoder = decoder_of(model)
        head = model.get_output_embeddings()
        below = [*decoder.embed_tokens.parameters(), *(tower.parameters() if tower is not None else ())]
        flows = _is_trained([*below, *decoder.layers.parameters()])
        self._token, self._pair, self._scored = _Cost(), _Cost(), _Cost()
        for layer in decoder.layers:
            for weights, trained in _products(layer):
                self._token.add(weights, weight_gradient=trained, input_gradient=flows)
            attention = layer.self_attn
            width = attention.config.num_attention_heads * attention.head_dim
            self._pair.add_pairs(width, input_gradient=flows)
        for weights, trained in _products(head) if head is not None else ():
            self._scored.add(weights, weight_gradient=trained, input_gradient=flows)

    def forward(self, work: Work) -> float:
        """Operations of a forward pass."""
        tower = self._tower.forward(work.grids) if self._tower else 0.0
        text = (self._token, work.tokens), (self._pair, work.pairs), (self._scored, work.scored)
        return tower + sum(cost.forward * count for cost, count in text)

    def training(self, work: Work) -> float:
        """Operations of a forward and a backward pass."""
        tower = self._tower.backward(work.grids) if self._tower else 0.0
        text = (self._token, work.tokens), (self._pair, work.pairs), (self._scored, work.scored)
        return self.forward(work) + tower + sum(cost.backward * count for cost, count in text)


class _Tower:
    """The vision tower of the Qwen-VL families: patch embedding, blocks, mergers (deep-stack ones included)."""

    def __init__(self, tower: Any) -> None:
        self._merge = tower.spatial_merge_size
        self._window = _merged_window(tower)
        mergers = projectors(tower)
        blocks_flow = _is_trained([*tower.patch_embed.parameters(), *tower.blocks.parameters()])
        mergers_flow = blocks_flow or any(_is_trained(merger.parameters()) for merger in mergers)
        self._patch, self._merged, self._pair, self._window_pair = _Cost(), _Cost(), _Cost(), _Cost()
        embedding = tower.patch_embed.proj.weight
        # the pixels need no gradient
        self._patch.add(embedding.numel(), weight_gradient=embedding.requires_grad, input_gradient=False)
        full = getattr(tower, "fullatt_block_indexes", None)
        for index, block in enumerate(tower.blocks):
            for weights, trained in _products(block):
                self._patch.add(weights, weight_gradient=trained, input_gradient=blocks_flow)
            pair = self._pair if full is None or index in full else self._window_pair
            pair.add_pairs(block.attn.proj.in_features, input_gradient=blocks_flow)
        for merger in mergers:
            for weights, trained in _products(merger):
                self._merged.add(weights, weight_gradient=trained, input_gradient=mergers_flow)

    def forward(self, grids: Iterable[Grid]) -> float:
        return sum(cost.forward * count for grid in grids for cost, count in self._counts(grid))

    def backward(self, grids: Iterable[Grid]) -> float:
        return sum(cost.backward * count for grid in grids for cost, count in self._counts(grid))

    def _counts(self, grid: Grid) -> Iterator[tuple[_Cost, int]]:
        time, height, width = grid
        patches = time * height * width
        yield self._patch, patches
        yield self._merged, visual_tokens(grid, self._merge)
        yield self._pair, time * (height * width) ** 2  # each frame attends to itself
        if self._window is not None:
            cells = _squares(height // self._merge, self._window) * _squares(width // self._merge, self._window)
            yield self._window_pair, time * self._merge**4 * cells


def _merged_window(tower: Any) -> int | None:
    """Side of an attention window in merged cells (Qwen2.5-VL), or None without windows."""
    size = getattr(tower, "window_size", None)
    return None if size is None else size // tower.spatial_merge_size // tower.patch_size


def _squares(length: int, window: int) -> int:
    """Sum of the squared sides of the windows that a side is cut into; the last may be smaller."""
    whole, rest = divmod(length, window)
    return whole * window**2 + rest**2


def _products(module: nn.Module) -> Iterator[tuple[float, bool]]:
    """(weights that a row meets, whether they are trained) of every linear layer, adapter, router and set of experts
    inside."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            yield part.weight.numel(), part.weight.requires_grad
            for factor in (part.factors or ()) if isinstance(part, LoraLinear) else ():
                yield factor.numel(), factor.requires_grad
        elif hasattr(part, "top_k") and getattr(part, "weight", None) is not None:  # a router
            yield part.weight.numel(), part.weight.requires_grad  # type: ignore[union-attr, operator, misc]
        else:
            experts = [p for p in part.parameters(recurse=False) if p.dim() == 3]
            if experts:
                config: Any = part.config
                share = config.num_experts_per_tok / experts[0].shape[0]
                for weights in experts:
                    yield weights.numel() * share, weights.requires_grad


def _is_trained(parameters: Iterable[nn.Parameter]) -> bool:
    return any(p.requires_grad for p in parameters)
