"""Packing for one device, and log-probability passes over groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foveal.config import Config
from foveal.models.positions import prompt_positions
from foveal.train.packing import Pack, build_pack, split_into_packs
from foveal.train.scorer import TokenScorer
from foveal.types import Group, Prompt


@dataclass
class Packer:
    """Turns groups into micro-batches.

    Attributes:
        budget: input tokens of a micro-batch.
        shared_prefix: whether a group's prompt is laid out once.
        features: what the processor made of a prompt's media.
        model: decides the positions.
        device: where the packs go.
    """

    budget: int
    shared_prefix: bool
    features: Callable[[Prompt], dict[str, torch.Tensor]]
    model: Any
    device: torch.device

    def packs(self, groups: Sequence[Group]) -> Iterator[Pack]:
        for parts in split_into_packs(groups, self.budget, self.shared_prefix):
            yield build_pack(
                parts,
                positions=lambda p: prompt_positions(self.model, p.expanded_ids, self.features(p)),
                features=self.features,
                shared_prefix=self.shared_prefix,
                device=self.device,
            )


def token_budget(config: Config, responses: int) -> int:
    """Tokens of a micro-batch.

    `worker.actor.token_budget` when it is a number; "easyr1" gives what EasyR1's keys stand for: responses per device ×
    (prompt limit + response limit).
    """
    actor = config.worker.actor
    if isinstance(actor.token_budget, int):
        return actor.token_budget
    return responses * (config.data.max_prompt_length + config.data.max_response_length)


@torch.no_grad()
def write_logprobs(scorer: TokenScorer, packer: Packer, groups: Sequence[Group], column: str) -> None:
    """Scores every trained response and stores its (L,) log-probabilities as a column."""
    scorer.eval()
    for pack in packer.packs(groups):
        pack.store(column, scorer(pack).logprobs)
