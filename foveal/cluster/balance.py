"""Which worker trains on which groups: whole groups, by what they cost to compute."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from foveal.models.flops import FlopCounter, Work
from foveal.models.grids import Grid
from foveal.types import Group

SLACK = 1.02
"""How far above an even share a worker's load may be for a group to stay where its prompt is."""


def assign(costs: Sequence[float], homes: Sequence[Collection[int]], batch: int, workers: int) -> list[int]:
    """The worker of each group.

    Every `batch` consecutive groups make an optimizer step, at whose end all workers wait for each other, so each of
    these is balanced by itself: the costliest groups first, each to the worker with least to do. A group stays where
    its prompt is as long as that keeps the worker within its share, because pictures are large.

    Args:
        costs: of each group. homes: the workers that have its prompt already, as all those of one engine do.
    """
    owners = [0] * len(costs)
    for start in range(0, len(costs), batch):
        step = range(start, min(start + batch, len(costs)))
        share = SLACK * sum(costs[i] for i in step) / workers
        loads = [0.0] * workers
        for i in sorted(step, key=lambda i: (-costs[i], i)):
            at_home = [home for home in homes[i] if loads[home] + costs[i] <= share]
            owner = min(at_home or range(workers), key=lambda w: (loads[w], w))
            owners[i] = owner
            loads[owner] += costs[i]
    return owners


def sizes_of(owners: Sequence[int], batch: int, worker: int) -> list[int]:
    """How many of a worker's groups go into each optimizer step of `batch` groups."""
    return [list(owners[start : start + batch]).count(worker) for start in range(0, len(owners), batch)]


def training_cost(group: Group, counter: FlopCounter, media_ids: set[int], merge: int, *, shared_prefix: bool) -> float:
    """Operations of a forward and backward pass over a group's trained responses.

    Args:
        media_ids: the placeholders of pictures; merge: side, in patches, of the square that makes one token. From them
            follows how large a picture is, but for its shape.
    """
    prompt = len(group.prompt.expanded_ids)
    answers = [len(r.token_ids) for r in group.trained if len(r.token_ids)]
    if not answers:
        return 0.0
    copies = 1 if shared_prefix else len(answers)
    pairs = copies * _triangle(prompt) + sum(_triangle(n - 1) + (n - 1) * prompt for n in answers)
    grids = tuple(_grids(group.prompt.expanded_ids, media_ids, merge)) * copies
    return counter.training(Work(copies * prompt + sum(answers) - len(answers), pairs, sum(answers), grids))


def _triangle(length: int) -> int:
    return length * (length + 1) // 2


def _grids(ids: Sequence[int], media_ids: set[int], merge: int) -> Iterable[Grid]:
    array, is_media = np.asarray(ids), np.zeros(len(ids) + 2, bool)
    for media_id in media_ids:
        is_media[1:-1] |= array == media_id
    edges = np.flatnonzero(is_media[1:] != is_media[:-1])  # where runs begin and end, by turns
    for length in (edges[1::2] - edges[::2]).tolist():
        yield 1, merge, merge * length
