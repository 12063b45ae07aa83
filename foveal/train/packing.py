"""Laying groups out as packed, padding-free sequences whose prompts are computed once.

A group becomes  prompt | response 1 | … | response n : the responses attend to the prompt and to themselves, and their
positions continue the prompt's. With `shared_prefix` off every response brings its own copy of the prompt and its
pictures, which is what other trainers do; the numbers are the same, the work is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foveal.models.attention import Segments
from foveal.types import Group, Prompt, Response


@dataclass
class Part:
    """Some or all trained responses of one group; what doesn't fit a budget whole is cut into several parts."""

    prompt: Prompt
    responses: list[Response]

    def tokens(self, shared_prefix: bool) -> int:
        """Tokens that the model processes for this part."""
        copies = 1 if shared_prefix else len(self.responses)
        return copies * len(self.prompt.expanded_ids) + sum(len(r.token_ids) for r in self.responses)


@dataclass
class Pack:
    """One micro-batch as flat tensors. T input tokens, N response tokens, R responses, A position axes.

    Attributes:
        token_ids: (1, T) int64.
        position_ids: (A, 1, T) int64 for M-RoPE models, (1, T) for others.
        segments: which keys each token sees.
        features: pixel values and grids, once per prompt that is laid out; empty for text.
        source: (N,) int64, the input token whose hidden state predicts each response token.
        targets: (N,) int64, the response tokens.
        responses: the R responses in order; `lengths` are their token counts, summing to N.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    segments: Segments
    features: dict[str, torch.Tensor]
    source: torch.Tensor
    targets: torch.Tensor
    responses: list[Response]

    @property
    def lengths(self) -> torch.Tensor:
        """(R,) int64 on the pack's device."""
        return torch.tensor([len(r.token_ids) for r in self.responses], device=self.targets.device)

    def column(self, name: str) -> torch.Tensor:
        """(N,) float32: a per-token column of the responses, in order."""
        values = np.concatenate([np.asarray(r.columns[name], dtype=np.float32) for r in self.responses])
        return torch.from_numpy(values).to(self.targets.device)

    @property
    def sampled_logprobs(self) -> torch.Tensor:
        """(N,) float32: the engine's log-probabilities."""
        return torch.from_numpy(np.concatenate([r.logprobs for r in self.responses])).to(self.targets.device)

    def store(self, name: str, values: torch.Tensor) -> None:
        """Writes (N,) values back as a column of each response that has none of that name yet."""
        flat = values.detach().float().cpu().numpy()
        ends = np.cumsum([len(r.token_ids) for r in self.responses])
        for response, piece in zip(self.responses, np.split(flat, ends[:-1]), strict=True):
            response.columns.setdefault(name, piece.copy())


def split_into_packs(groups: Sequence[Group], budget: int, shared_prefix: bool) -> list[list[Part]]:
    """Fills micro-batches with whole groups, in order, up to `budget` tokens each.

    A group too large for one micro-batch is cut between responses (its prompt is then laid out in each piece); a single
    response beyond the budget gets a micro-batch of its own. Responses without tokens are left out: nothing predicts
    them. Results don't depend on the cuts.
    """
    packs: list[list[Part]] = []
    room = 0
    for group in groups:
        for part in _pieces(group, budget, shared_prefix):
            cost = part.tokens(shared_prefix)
            if not packs or cost > room:
                packs.append([])
                room = budget
            packs[-1].append(part)
            room -= cost
    return packs


def _pieces(group: Group, budget: int, shared_prefix: bool) -> Iterator[Part]:
    responses = [r for r in group.trained if len(r.token_ids)]
    piece = Part(group.prompt, [])
    for response in responses:
        wider = Part(group.prompt, [*piece.responses, response])
        if piece.responses and wider.tokens(shared_prefix) > budget:
            yield piece
            wider = Part(group.prompt, [response])
        piece = wider
    if piece.responses:
        yield piece


def build_pack(
    parts: Sequence[Part],
    *,
    positions: Callable[[Prompt], torch.Tensor],
    features: Callable[[Prompt], dict[str, torch.Tensor]],
    shared_prefix: bool,
    device: torch.device,
) -> Pack:
    """Builds the tensors of one micro-batch.

    Args:
        parts: from `split_into_packs`.
        positions: (A, P + 1) positions of a prompt and of the first token after it.
        features: what the processor made of a prompt's media.
    """
    layout = _Layout()
    media: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        where = positions(part.prompt)
        copies = [part.responses] if shared_prefix else [[r] for r in part.responses]
        for responses in copies:
            for name, value in features(part.prompt).items():
                media.setdefault(name, []).append(value)
            layout.add_prompt(part.prompt.expanded_ids, where)
            for response in responses:
                layout.add_response(response.token_ids, where[:, -1:])
    axes = torch.cat(layout.positions, dim=1)
    return Pack(
        token_ids=torch.from_numpy(np.concatenate(layout.tokens)).unsqueeze(0).to(device),
        position_ids=(axes if axes.shape[0] == 1 else axes.unsqueeze(1)).to(device),
        segments=Segments(tuple(layout.lengths), tuple(layout.prefix), device),
        features={name: torch.cat(values).to(device) for name, values in media.items()},
        source=torch.from_numpy(np.concatenate(layout.source)).to(device),
        targets=torch.from_numpy(np.concatenate(layout.targets)).to(device),
        responses=[r for part in parts for r in part.responses],
    )


class _Layout:
    """Grows the flat lists of a pack run by run."""

    def __init__(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.positions: list[torch.Tensor] = []
        self.lengths: list[int] = []
        self.prefix: list[int] = []
        self.source: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []
        self._total = 0
        self._prompt = -1

    def add_prompt(self, ids: Sequence[int], positions: torch.Tensor) -> None:
        self._prompt = len(self.lengths)
        self._add(np.asarray(ids, dtype=np.int64), positions[:, :-1], prefix=-1)
        self._prompt_end = self._total - 1

    def add_response(self, ids: np.ndarray, first_position: torch.Tensor) -> None:
        """The last token predicts nothing, so it is a target only, not an input."""
        inputs = np.asarray(ids[:-1], dtype=np.int64)
        start = self._total
        self.source.append(np.concatenate([[self._prompt_end], np.arange(start, start + len(inputs))]).astype(np.int64))
        self.targets.append(np.asarray(ids, dtype=np.int64))
        if len(inputs):
            self._add(inputs, first_position + torch.arange(len(inputs)), prefix=self._prompt)

    def _add(self, ids: np.ndarray, positions: torch.Tensor, prefix: int) -> None:
        self.tokens.append(ids)
        self.positions.append(positions)
        self.lengths.append(len(ids))
        self.prefix.append(prefix)
        self._total += len(ids)
