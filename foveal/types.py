"""The things that flow through a run: prompts, responses, groups, and how to sample.

Plain dataclasses that pickle cheaply: token ids and per-token numbers are numpy arrays, pictures stay encoded bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:  # reward processes import this and do without torch
    import torch

Metrics: TypeAlias = dict[str, float]
IntArray: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
FloatArray: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float32]]


@dataclass
class Media:
    """One picture or video of a prompt, as the file's own encoded bytes. Engine and trainer decode the same bytes."""

    kind: Literal["image", "video"]
    data: bytes
    name: str = ""
    """Where it came from (a path, or "row 3, image 0"), for messages."""


@dataclass
class Prompt:
    """One row of the data set, ready to be answered.

    Attributes:
        uid: unique within a run, stable across resumes: `SPLIT-EPOCH-ROW`, as `train-0-17`.
        token_ids: unexpanded ids, one placeholder per medium: what an engine takes.
        expanded_ids: what the model's own processor makes of it, and what the model trains on.
        media: in the order of their placeholders.
        row: every column of the data set except the media themselves.
        row_index: 0-based number of the row in its source.
        answer: the ground truth, whatever type the answer column has.
        features: what the processor made of the media (`pixel_values`, `image_grid_thw`, …), as torch tensors; empty
            for text. Left out when pickled; `data.processing.Processing.features` makes them again where needed.
    """

    uid: str
    token_ids: list[int]
    expanded_ids: list[int]
    media: list[Media]
    row: dict[str, Any]
    row_index: int
    answer: Any
    features: dict[str, torch.Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "features": None}


Role: TypeAlias = Literal["trained", "baseline", "left_out"]


@dataclass
class Response:
    """One sampled answer.

    Attributes:
        token_ids: (L,) int64, the end token included when the model wrote it.
        logprobs: (L,) float32, of the distribution that was sampled from (temperature, forbidden ids masked).
        finish_reason: "stop" (an end token), "length" (the limit), or "abort".
        text: decoded, with or without special tokens as `worker.reward.skip_special_tokens` says.
        rewards: `overall` and any other numbers the reward function gave; empty until scored.
        weight_spans: [(first token, weight version)]: which weights wrote which tokens.
        role: "trained"; "baseline" (ReMax's greedy answer: scored, not trained on); "left_out" (its reward was not a
            number: counted, neither trained on nor part of the group's statistics).
        columns: per-token arrays (L,) by name: old_logprobs, ref_logprobs, token_rewards, advantages, returns, mask …
    """

    token_ids: IntArray
    logprobs: FloatArray
    finish_reason: Literal["stop", "length", "abort"]
    text: str = ""
    rewards: dict[str, float] = field(default_factory=dict)
    weight_spans: list[tuple[int, int]] = field(default_factory=list)
    role: Role = "trained"
    columns: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass
class Group:
    """A prompt and its responses: scored, filtered, balanced and packed together."""

    prompt: Prompt
    responses: list[Response]

    @property
    def trained(self) -> list[Response]:
        """The responses that count for statistics and gradients."""
        return [r for r in self.responses if r.role == "trained"]


def trained_responses(groups: list[Group]) -> Iterator[tuple[int, Response]]:
    """Yields (index of the group, response) for every response that is trained on, in order."""
    for index, group in enumerate(groups):
        for response in group.trained:
            yield index, response


@dataclass(frozen=True)
class Sampling:
    """How to sample answers; the same meaning in every engine.

    Attributes:
        n: answers per prompt.
        temperature: 0 means greedy.
        top_p, top_k: 1.0 and -1 mean the full distribution.
        max_tokens: the most tokens an answer may have.
        seed: with the prompt's uid and the answer's number it decides that answer's random numbers.
        ignore_eos: go on to `max_tokens` whatever the model writes (for measurements).
        extra: any other parameter the engine's own sampler knows; an engine that lacks one says so.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    seed: int = 0
    ignore_eos: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def full_distribution(self) -> bool:
        """Whether the sampler's log-probabilities are those of the whole distribution at this temperature."""
        return self.top_p >= 1.0 and self.top_k <= 0 and not self.extra.keys() - {"stop_token_ids"}

    def with_seed(self, seed: int) -> Sampling:
        return replace(self, seed=seed)
