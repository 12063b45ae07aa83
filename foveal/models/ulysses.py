"""Sequence parallelism: the processes of a group share each packed sequence (DeepSpeed-Ulysses, arXiv:2309.14509 §3).

Each process computes a slice of the tokens. Around attention the slices are exchanged for heads: each process then has
all tokens, on a share of the heads. The group counts as one process: its loss is the same in each, and a parameter's
gradient is the sum, not the mean, over the group of what each process finds.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from foveal.errors import ConfigError


class Ulysses:
    """This process's place in a group that shares sequences.

    Args:
        group: those that share them; slices go to its processes in order.
        model: whose attention heads are to be shared.
        key: names the size of the group, in messages.

    Raises:
        ConfigError: the heads cannot be shared evenly.
    """

    def __init__(self, group: dist.ProcessGroup, model: Any, key: str = "worker.actor.ulysses_size") -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        heads = model.config.get_text_config().num_attention_heads
        if heads % self._size:
            raise ConfigError(
                f"{key}: {self._size} given, but the model's {heads} attention heads cannot be shared evenly among so "
                f"many devices; set it to a divisor of {heads}."
            )

    def slice(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This process's slice of a dimension of T tokens: ⌈T / size⌉ of them, with zeros after the last."""
        width = self._width(x.shape[dim])
        start = min(self._rank * width, x.shape[dim])
        own = x.narrow(dim, start, min(width, x.shape[dim] - start))
        missing = width - own.shape[dim]
        if not missing:
            return own
        shape = [missing if number == dim % x.dim() else length for number, length in enumerate(x.shape)]
        return torch.cat([own, x.new_zeros(shape)], dim)

    def owned(self, tokens: torch.Tensor, length: int) -> torch.Tensor:
        """Which entries of `tokens` (N,) lie in this process's slice of `length` tokens: (M,) int64, ascending."""
        return (tokens // self._width(length) == self._rank).nonzero().squeeze(1)

    def local(self, tokens: torch.Tensor, length: int) -> torch.Tensor:
        """(M,) int64: where in this process's slice those of the tokens stand that lie in it, in their order."""
        return tokens[self.owned(tokens, length)] - self._rank * self._width(length)

    def gather(self, values: torch.Tensor, owned: torch.Tensor, count: int) -> torch.Tensor:
        """(N,) in every process, from the (M,) that each computed, which are entries `owned` of them.

        What follows must be the same in every process of the group: the gradient is then too, and each takes its part.
        """
        gathered: torch.Tensor = _Gather.apply(values, owned, count, self._group)
        return gathered

    @torch.compiler.disable
    def exchange(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All tokens on a share of the heads, from a slice of the tokens on all heads.

        Key heads are repeated where they are too few to be shared evenly.

        Args:
            query: (t, H, D). key, value: (t, H_kv, D), of the same dtype.
            length: T, the tokens of the whole sequence.

        Returns:
            query: (T, H / size, D). key, value: (T, lcm(H_kv, size) / size, D).
        """
        repeat = self._size // math.gcd(key.shape[1], self._size)
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        shares = [x.unflatten(1, (self._size, -1)) for x in (query, key, value)]
        received = self._send(torch.cat(shares, 2).transpose(0, 1)).flatten(0, 1)[:length]
        q, k, v = received.split([share.shape[2] for share in shares], 1)
        return q, k, v

    @torch.compiler.disable
    def exchange_back(self, x: torch.Tensor) -> torch.Tensor:
        """A slice of the tokens on all heads (t, H, D), from all tokens on a share of the heads (T, H / size, D)."""
        width = self._width(len(x))
        padded = F.pad(x, (0, 0, 0, 0, 0, self._size * width - len(x)))
        return self._send(padded.unflatten(0, (self._size, width))).transpose(0, 1).flatten(1, 2)

    def _send(self, x: torch.Tensor) -> torch.Tensor:
        """Row i goes to process i; row i of the result is what came from it."""
        received: torch.Tensor = _AllToAll.apply(x, self._group)
        return received

    def _width(self, length: int) -> int:
        return -(-length // self._size)


class _AllToAll(torch.autograd.Function):
    """Sends rows to processes; the gradient of a row goes back the way it came."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(grads[0], ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, owned: torch.Tensor, count: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(owned)
        whole = values.new_zeros(count).index_copy(0, owned, values)
        dist.all_reduce(whole, group=group)  # each entry is another process's, or zero
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        [owned] = ctx.saved_tensors
        return grads[0][owned], None, None, None
