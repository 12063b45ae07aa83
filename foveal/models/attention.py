"""Attention over packed sequences with shared prompts, registered with transformers under two names.

`foveal` serves the decoder, `foveal_flash` the vision tower: transformers hands a tower its cumulative lengths in one
call per layer only where the implementation's name contains "flash". A decoder call without a segment table (rollout on
a padded batch, say) is plain scaled-dot-product attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn

from foveal.models.transfer import to_device
from foveal.models.ulysses import Ulysses

# torch 2.11 shares key heads without being asked; from 2.13 the argument is needed.
_TAKES_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters

TEXT_NAME = "foveal"
VISION_NAME = "foveal_flash"


@dataclass(frozen=True)
class Segments:
    """Which keys the queries of a packed sequence of T tokens see.

    The sequence is cut into S runs of tokens, in order. A run attends to the run of its prompt, if it has one, and
    causally to itself; so a group laid out as prompt | response 1 | … | response n computes its prompt once.

    Attributes:
        lengths: S run lengths, summing to T.
        prefix: for each run the number of the run that is its prompt, or -1.
        device: where the index tensors live.
    """

    lengths: tuple[int, ...]
    prefix: tuple[int, ...]
    device: torch.device

    @cached_property
    def starts(self) -> list[int]:
        starts, total = [], 0
        for length in self.lengths:
            starts.append(total)
            total += length
        return starts

    @cached_property
    def cu_q(self) -> torch.Tensor:
        """(S + 1,) int32: where each run's queries begin and end."""
        return _cumulative(self.lengths, self.device)

    @cached_property
    def _key_lengths(self) -> list[int]:
        return [n + (self.lengths[p] if p >= 0 else 0) for n, p in zip(self.lengths, self.prefix, strict=True)]

    @cached_property
    def cu_k(self) -> torch.Tensor:
        """(S + 1,) int32: where each run's keys begin and end among the gathered keys."""
        return _cumulative(self._key_lengths, self.device)

    @cached_property
    def key_index(self) -> torch.Tensor | None:
        """(K,) int64: the token of each gathered key, prompt before own tokens; None where nothing is shared."""
        if all(p < 0 for p in self.prefix):
            return None
        parts: list[torch.Tensor] = []
        for start, length, prefix in zip(self.starts, self.lengths, self.prefix, strict=True):
            if prefix >= 0:
                begin = self.starts[prefix]
                parts.append(torch.arange(begin, begin + self.lengths[prefix]))
            parts.append(torch.arange(start, start + length))
        return to_device(torch.cat(parts), self.device)

    @cached_property
    def max_q(self) -> int:
        return max(self.lengths)

    @cached_property
    def max_k(self) -> int:
        return max(self._key_lengths)

    @cached_property
    def blocks(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For the reference attention: runs that share keys are gathered into one padded block each.

        Returns:
            tokens: (B, W) int64, the token in each place of a block, 0 in padding.
            places: (T,) int64, where each token stands among the B·W places.
            visible: (B, 1, W, W) bool, which key places a query place sees; padding sees itself alone.
        """
        block_of: list[int] = []
        for number, prefix in enumerate(self.prefix):
            block_of.append(block_of[prefix] if prefix >= 0 else (max(block_of, default=-1) + 1))
            assert prefix < number
        count = max(block_of) + 1
        tokens: list[list[int]] = [[] for _ in range(count)]
        runs: list[list[int]] = [[] for _ in range(count)]
        for number, block in enumerate(block_of):
            start = self.starts[number]
            tokens[block].extend(range(start, start + self.lengths[number]))
            runs[block].extend([number] * self.lengths[number])
        width = max(map(len, tokens))
        index = torch.zeros(count, width, dtype=torch.int64)
        run = torch.full((count, width), -1, dtype=torch.int64)
        for block in range(count):
            index[block, : len(tokens[block])] = torch.tensor(tokens[block])
            run[block, : len(runs[block])] = torch.tensor(runs[block])
        index, run = index.to(self.device), run.to(self.device)
        filled = run >= 0
        prompt_of = torch.tensor([*self.prefix, -1], device=self.device)[run]  # run -1 is padding and reads the last -1
        place = torch.arange(width, device=self.device)
        own = (run[:, :, None] == run[:, None, :]) & (place[:, None] >= place[None, :])
        prompt = (prompt_of[:, :, None] == run[:, None, :]) & (prompt_of >= 0)[:, :, None]
        visible = (own | prompt) & filled[:, None, :]
        visible |= torch.eye(width, dtype=torch.bool, device=self.device)
        places = torch.empty(sum(self.lengths), dtype=torch.int64, device=self.device)
        places[index[filled]] = filled.flatten().nonzero().squeeze(1)
        return index, places, visible.unsqueeze(1)

    def prepare(self) -> None:
        """Makes the tables that attention on this device reads.

        A compiled layer then finds them as tensors; made inside it, they would break it in two and tie it to these
        lengths.
        """
        if self.device.type == "cuda":
            _ = self.cu_q, self.cu_k, self.key_index, self.max_q, self.max_k
        else:
            _ = self.blocks


def _cumulative(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    total = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    total[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    return to_device(total, device)


def _repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeats key or value heads (dimension 1) so that there are as many as query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def reference_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float | None
) -> torch.Tensor:
    """Packed attention by plain masked attention over padded blocks; runs anywhere, in any dtype.

    Args:
        query: (T, H, D). key, value: (T, H_kv, D).

    Returns:
        (T, H, D)
    """
    tokens, places, visible = segments.blocks
    q, k, v = (x[tokens].transpose(1, 2) for x in (query, key, value))
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale).transpose(1, 2)
    return out.flatten(0, 1)[places]


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    *,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """One call of PyTorch's variable-length kernel (CUDA, 16-bit). Causal alignment is to the bottom right."""
    extra: dict[str, Any] = {"window_size": (-1, 0) if causal else (-1, -1)}
    if query.shape[1] != key.shape[1] and _TAKES_ENABLE_GQA:
        extra["enable_gqa"] = True
    out = varlen_attn(query, key, value, cu[0], cu[1], longest[0], longest[1], scale=scale, **extra)
    assert isinstance(out, torch.Tensor)  # a tuple only where the log-sum-exp is asked for
    return out


def _kernel_dtype(query: torch.Tensor) -> torch.dtype | None:
    """The 16-bit type in which the CUDA kernel runs, or None where it can't."""
    if query.device.type != "cuda":
        return None
    if query.dtype in (torch.bfloat16, torch.float16):
        return query.dtype
    # Under autocast the rotary embedding leaves queries and keys in float32: cast them as the matrix products are.
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


def text_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: Segments | None = None,
    ulysses: Ulysses | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a decoder layer: (1, H, T, D) packed with a segment table, or an ordinary batch without one.

    With `ulysses` T is this process's slice of the tokens of the segment table.
    """
    if segments is None:
        if query.shape[2] == 1:
            return _decode_attention(query, key, value, attention_mask, scaling), None
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    dtype = _kernel_dtype(q)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if ulysses is not None:
        q, k, v = ulysses.exchange(q, k, v, sum(segments.lengths))
    if dtype is None:
        out = reference_attention(q, k, v, segments, scaling)
    else:
        if segments.key_index is not None:
            k, v = k[segments.key_index], v[segments.key_index]
        cu, longest = (segments.cu_q, segments.cu_k), (segments.max_q, segments.max_k)
        out = _varlen(q, k, v, cu, longest, causal=True, scale=scaling)
    if ulysses is not None:
        out = ulysses.exchange_back(out)
    return out.unsqueeze(0), None


def _decode_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """One new token a sequence: (B, H, 1, D) over keys (B, H_kv, K, D), giving (B, 1, H, D).

    The query heads that share a key head stand in as its query tokens, so that keys and values aren't copied once per
    query head as they otherwise are wherever there is a mask.
    """
    batch, heads, _, width = query.shape
    out = F.scaled_dot_product_attention(
        query.view(batch, key.shape[1], heads // key.shape[1], width), key, value, attn_mask=mask, scale=scale
    )
    return out.reshape(batch, 1, heads, width)


def vision_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a vision layer: (1, H, T, D), all pictures (or windows of them) in one call, not causal."""
    assert cu_seq_lens_q is not None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    dtype = _kernel_dtype(q)
    if dtype is not None:
        cu = cu_seq_lens_q.to(torch.int32)
        longest = int(max_length_q) if max_length_q is not None else int(cu.diff().max())
        out = _varlen(q.to(dtype), k.to(dtype), v.to(dtype), (cu, cu), (longest, longest), causal=False, scale=scaling)
        return out.unsqueeze(0), None
    return _reference_vision(q, k, v, cu_seq_lens_q, scaling).unsqueeze(0), None


def _reference_vision(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """(T, H, D): each picture (or window) attends to itself; those of equal size go in one batched call."""
    lengths = ends.diff()
    result = torch.empty_like(q)
    for size in set(lengths.tolist()):
        tokens = ends[:-1][lengths == size, None] + torch.arange(size, device=ends.device)
        a, b, c = (x[tokens].transpose(1, 2) for x in (q, k, v))
        result[tokens] = F.scaled_dot_product_attention(a, b, c, scale=scale).transpose(1, 2)
    return result


def _text_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """No mask where the segment table decides (packed, or a single unpadded call); sdpa's own for padded batches.

    Without a registered mask function transformers passes None for every name it doesn't know, and a left-padded batch
    would go unmasked without a word.
    """
    if kwargs.get("attention_mask") is None:
        return None
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **kwargs)


def install(model: Any) -> None:
    """Registers the two attention functions and switches a model, loaded with sdpa, over to them."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(TEXT_NAME, text_attention)
    AttentionInterface.register(VISION_NAME, vision_attention)
    AttentionMaskInterface.register(TEXT_NAME, _text_mask)
    if hasattr(model.config, "vision_config"):
        model.set_attn_implementation({"text_config": TEXT_NAME, "vision_config": VISION_NAME})
    else:
        model.set_attn_implementation(TEXT_NAME)
