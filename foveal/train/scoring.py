"""Packing for one device, and log-probability passes over groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from foveal.train.layout import PromptLayouts
from foveal.train.packing import Pack, Part, build_pack, split_into_packs, store
from foveal.train.peers import Peers
from foveal.train.retry import within_memory
from foveal.train.scorer import Reference
from foveal.train.sharding import reshard
from foveal.types import Group, Response


@dataclass
class Packer:
    """Turns groups into micro-batches.

    Attributes:
        budget: input tokens of a micro-batch.
        shared_prefix: whether a group's prompt is laid out once.
        layouts: positions and pictures of a prompt.
        device: where the packs go.
        peers: the processes that must run their micro-batches in step with this one; None for none.
        parts: the micro-batch that was built last.
        largest: tokens of the largest micro-batch with gradient since this was last set to 0. The first of an optimizer
            step doesn't count: at its peak no gradient has taken memory yet.
        ceiling: what `budget` may not exceed any more, because memory ran out above it.
    """

    budget: int
    shared_prefix: bool
    layouts: PromptLayouts
    device: torch.device
    peers: Peers | None = None
    parts: Sequence[Part] = field(default=(), init=False)
    largest: int = field(default=0, init=False)
    ceiling: int = field(default=sys.maxsize, init=False)

    def packs(self, groups: Sequence[Group]) -> Iterator[Pack]:
        for parts in self.split(groups):
            yield self.build(parts)

    def split(self, groups: Sequence[Group]) -> list[list[Part]]:
        """What goes into each micro-batch; among several processes as many micro-batches in each."""
        micro_batches = split_into_packs(groups, self.budget, self.shared_prefix)
        return self.peers.align(micro_batches) if self.peers else micro_batches

    def tokens(self, parts: Sequence[Part]) -> int:
        """Tokens that the model processes for a micro-batch."""
        return sum(part.tokens(self.shared_prefix) for part in parts)

    def build(self, parts: Sequence[Part]) -> Pack:
        self.parts = parts
        return build_pack(parts, layouts=self.layouts, shared_prefix=self.shared_prefix, device=self.device)


@torch.no_grad()
def write_logprobs(scorer: Reference, packer: Packer, groups: Sequence[Group], column: str) -> None:
    """Scores every trained response and stores its (L,) log-probabilities as a column."""
    scorer.eval()

    def score() -> None:
        scored: tuple[list[Response], torch.Tensor] | None = None
        for pack in packer.packs(groups):
            logprobs = scorer(pack).logprobs
            if scored is not None:  # read only now: the device computes on while the host builds the next pack
                store(scored[0], column, scored[1])
            scored = pack.responses, logprobs
        if scored is not None:
            store(scored[0], column, scored[1])

    within_memory(packer, f"the pass for {column}", score)
    reshard(scorer)
