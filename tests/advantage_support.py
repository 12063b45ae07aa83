"""Step batches for estimators: made from lists, and random ragged ones."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import torch

from foveal.algorithm import StepBatch, get_advantage


@dataclass
class Config:
    gamma: float = 1.0
    lam: float = 1.0
    reward_parts: dict[str, float] = field(default_factory=lambda: {"accuracy": 0.9, "format": 0.1})


def step(
    scores,
    group,
    lengths,
    *,
    rewards=None,
    mask=None,
    baselines=None,
    values=None,
    parts=None,
    dtype=torch.float64,
):
    """A batch with each score on its response's last token, unless given; parts are the scores."""
    tokens = sum(lengths)
    parts = parts or {"accuracy": scores, "format": scores}
    if rewards is None:
        rewards, end = [0.0] * tokens, 0
        for score, length in zip(scores, lengths, strict=True):
            end += length
            if length:
                rewards[end - 1] = score
    return StepBatch(
        scores=torch.tensor(scores, dtype=dtype),
        group=torch.tensor(group, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        token_rewards=torch.tensor(rewards, dtype=dtype),
        mask=torch.tensor([True] * tokens if mask is None else mask, dtype=torch.bool),
        baselines=None if baselines is None else torch.tensor(baselines, dtype=dtype),
        values=None if values is None else torch.tensor(values, dtype=dtype),
        parts={name: torch.tensor(part, dtype=dtype) for name, part in parts.items()},
    )


def random_step(seed, *, gaps):
    """Ragged, with empty and one-token responses, groups in mixed order, and rewards on every token."""
    rng = random.Random(seed)
    sizes = [4, 3, 1, 5]
    group = [10 * g for g, size in enumerate(sizes) for _ in range(size)]
    rng.shuffle(group)
    lengths = [0, 1] + [rng.randint(0, 6) for _ in group[2:]]
    tokens = sum(lengths)
    return step(
        [rng.choice([0.0, 1.0]) + rng.random() for _ in group],
        group,
        lengths,
        rewards=[rng.gauss(0, 1) for _ in range(tokens)],
        mask=[not gaps or rng.random() < 0.7 for _ in range(tokens)],
        baselines=[rng.random() for _ in group],
        values=[rng.gauss(0, 1) for _ in range(tokens)],
        parts={
            name: [rng.choice([math.nan, 0.0, 1.0, rng.random()]) for _ in group] for name in ("accuracy", "format")
        },
    )


def advantages(name, batch, **config):
    return get_advantage(name)(batch, Config(**config)).advantages.tolist()
