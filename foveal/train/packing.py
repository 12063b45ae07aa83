"""Laying groups out as packed, padding-free sequences whose prompts are computed once.

A group becomes  prompt | response 1 | … | response n : the responses attend to the prompt and to themselves, and their
positions continue the prompt's. With `shared_prefix` off every response brings its own copy of the prompt and its
pictures, which is what other trainers do; the numbers are the same, the work is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import DTypeLike

from foveal.models.attention import Segments
from foveal.models.transfer import to_device
from foveal.models.vision import Picture
from foveal.train.layout import PromptLayout
from foveal.types import Group, Prompt, Response

IDLE = 8
"""Tokens after a prompt that has no answers."""


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
    """One micro-batch as flat tensors: T input tokens, V visual ones, N response tokens, R responses, A position axes.

    Attributes:
        token_ids: (1, T) int64.
        position_ids: (A, 1, T) int64 for M-RoPE models, (1, T) for others.
        segments: which keys each token sees.
        pictures: those of each prompt that is laid out, in the order of their tokens; empty for text.
        visual: (V,) int64, the input tokens that stand for the pictures.
        source: (N,) int64, the input token whose hidden state predicts each response token.
        targets: (N,) int64, the response tokens.
        responses: the R responses in order; `lengths` are their token counts, summing to N.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    segments: Segments
    pictures: list[Picture]
    visual: torch.Tensor
    source: torch.Tensor
    targets: torch.Tensor
    responses: list[Response]

    @property
    def lengths(self) -> torch.Tensor:
        """(R,) int64 on the pack's device."""
        return to_device(torch.tensor([len(r.token_ids) for r in self.responses]), self.targets.device)

    def column(self, name: str) -> torch.Tensor:
        """(N,) float32: a per-token column of the responses, in order."""
        values = _joined([np.asarray(r.columns[name], dtype=np.float32) for r in self.responses], np.float32)
        return to_device(torch.from_numpy(values), self.targets.device)

    @property
    def sampled_logprobs(self) -> torch.Tensor:
        """(N,) float32: the engine's log-probabilities."""
        values = _joined([r.logprobs for r in self.responses], np.float32)
        return to_device(torch.from_numpy(values), self.targets.device)


def store(responses: Sequence[Response], name: str, values: torch.Tensor) -> None:
    """Writes (N,) values of a pack's tokens back as a column of each of its responses that has none of that name."""
    flat = values.detach().float().cpu().numpy()
    ends = np.cumsum([len(r.token_ids) for r in responses])
    for response, piece in zip(responses, np.split(flat, ends)[:-1], strict=True):
        response.columns.setdefault(name, piece.copy())


def _joined(arrays: Sequence[np.ndarray], dtype: DTypeLike) -> np.ndarray:
    """One array; a micro-batch without responses has none to join."""
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


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
    layouts: Callable[[Prompt], PromptLayout],
    shared_prefix: bool,
    device: torch.device,
) -> Pack:
    """Builds the tensors of one micro-batch.

    Args:
        parts: from `split_into_packs`.
        layouts: positions and pictures of a prompt.
    """
    layout = _Layout()
    for part in parts:
        prompt = layouts(part.prompt)
        if not shared_prefix:  # each copy brings pictures of its own
            prompt = replace(prompt, pictures=[replace(picture, key=None) for picture in prompt.pictures])
        copies = [part.responses] if shared_prefix or not part.responses else [[r] for r in part.responses]
        for responses in copies:
            layout.add_prompt(part.prompt.expanded_ids, prompt)
            if not responses:
                layout.add_idle(prompt.positions[:, -1:])
            for response in responses:
                layout.add_response(response.token_ids, prompt.positions[:, -1:])
    axes = torch.cat(layout.positions, dim=1)
    return Pack(
        token_ids=to_device(torch.from_numpy(np.concatenate(layout.tokens)).unsqueeze(0), device),
        position_ids=to_device(axes if axes.shape[0] == 1 else axes.unsqueeze(1), device),
        segments=Segments(tuple(layout.lengths), tuple(layout.prefix), device),
        pictures=layout.pictures,
        visual=to_device(torch.from_numpy(np.concatenate(layout.visual)), device),
        source=to_device(torch.from_numpy(_joined(layout.source, np.int64)), device),
        targets=to_device(torch.from_numpy(_joined(layout.targets, np.int64)), device),
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
        self.pictures: list[Picture] = []
        self.visual: list[np.ndarray] = []
        self._total = 0
        self._prompt = -1

    def add_prompt(self, ids: Sequence[int], layout: PromptLayout) -> None:
        self._prompt = len(self.lengths)
        self.pictures += layout.pictures
        self.visual.append(layout.visual + self._total)
        self._add(np.asarray(ids, dtype=np.int64), layout.positions[:, :-1], prefix=-1)
        self._prompt_end = self._total - 1

    def add_response(self, ids: np.ndarray, first_position: torch.Tensor) -> None:
        """The last token predicts nothing, so it is a target only, not an input."""
        inputs = np.asarray(ids[:-1], dtype=np.int64)
        start = self._total
        self.source.append(np.concatenate([[self._prompt_end], np.arange(start, start + len(inputs))]).astype(np.int64))
        self.targets.append(np.asarray(ids, dtype=np.int64))
        if len(inputs):
            self._add(inputs, first_position + torch.arange(len(inputs)), prefix=self._prompt)

    def add_idle(self, first_position: torch.Tensor) -> None:
        """Tokens that predict nothing, where a prompt without answers is computed to keep other processes company.

        With them it has a shared prompt and lengths above one, as all packs: compiled layers would otherwise be
        compiled once more for it, while the others wait.
        """
        self._add(np.zeros(IDLE, np.int64), first_position + torch.arange(IDLE), prefix=self._prompt)

    def _add(self, ids: np.ndarray, positions: torch.Tensor, prefix: int) -> None:
        self.tokens.append(ids)
        self.positions.append(positions)
        self.lengths.append(len(ids))
        self.prefix.append(prefix)
        self._total += len(ids)
