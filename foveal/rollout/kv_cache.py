"""A key-value cache that is prefilled once per prompt, then written in place for n answers each."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer


class AnswerCacheLayer(DynamicLayer):
    """Keys and values of one decoder layer, (B, H_kv, capacity, head_dim), of which the first `length` are filled.

    `DynamicLayer` concatenates at every token, which copies the whole cache into fresh memory; here a token is written
    in place. Entries are kept in `dtype`: under autocast, keys come out of the rotary embedding in float32 and would
    be cast again at every step.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.kept_dtype = dtype
        self.length = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends (B, H_kv, Q, head_dim) keys and values and returns all that are filled."""
        start, self.length = self.length, self.length + key_states.shape[-2]
        if start == 0:
            self.keys, self.values = key_states.to(self.kept_dtype), value_states.to(self.kept_dtype)
            self.is_initialized = True
            return self.keys, self.values
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int:
        return self.length

    def expand(self, n: int, capacity: int) -> None:
        """Gives each prompt n rows, with room for `capacity` positions."""
        self.keys, self.values = _expanded(self.keys, n, capacity), _expanded(self.values, n, capacity)

    def select(self, rows: torch.Tensor) -> None:
        """Keeps these rows, given in ascending order, in the memory of the first ones."""
        for tensor in (self.keys, self.values):
            tensor[: len(rows), :, : self.length] = tensor[rows, :, : self.length]
        self.keys, self.values = self.keys[: len(rows)], self.values[: len(rows)]


def _expanded(prompts: torch.Tensor, n: int, capacity: int) -> torch.Tensor:
    batch, heads, length, width = prompts.shape
    rows = prompts.new_empty(batch, n, heads, capacity, width)
    rows[:, :, :, :length] = prompts.unsqueeze(1)
    return rows.view(batch * n, heads, capacity, width)


class AnswerCache(Cache):
    """One `AnswerCacheLayer` per decoder layer."""

    def __init__(self, layer_count: int, dtype: torch.dtype) -> None:
        self.answer_layers = [AnswerCacheLayer(dtype) for _ in range(layer_count)]
        super().__init__(layers=list(self.answer_layers))

    def expand(self, n: int, capacity: int) -> None:
        for layer in self.answer_layers:
            layer.expand(n, capacity)

    def select(self, rows: torch.Tensor) -> None:
        for layer in self.answer_layers:
            layer.select(rows)
