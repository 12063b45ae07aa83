"""One optimizer step over micro-batches, the same for policy and critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch

from foveal.train.optim import take_step
from foveal.train.packing import Pack
from foveal.train.retry import within_memory
from foveal.train.scoring import Packer
from foveal.types import Group

PackLoss = Callable[[Pack, int, int], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(pack, tokens and answers of the whole step) → (the pack's share of the loss, sums for the metrics)."""


def optimizer_batches(
    groups: Sequence[Group], size: int, sizes: Sequence[int] | None
) -> Iterator[tuple[int, Sequence[Group]]]:
    """Yields (number, groups) of each optimizer step: `size` prompts, or as many of each as `sizes` says."""
    if sizes is None:
        sizes = [min(size, len(groups) - start) for start in range(0, len(groups), size)]
    ends = list(accumulate(sizes))
    assert not ends or ends[-1] == len(groups)
    for number, (length, end) in enumerate(zip(sizes, ends, strict=True)):
        yield number, groups[end - length : end]


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    packer: Packer,
    groups: Sequence[Group],
    loss_of: PackLoss,
    max_grad_norm: float,
    phase: str,
) -> dict[str, float]:
    """Accumulates the gradient of the whole batch, micro-batch by micro-batch, then steps once.

    The loss is normalised by the counts of the whole batch, over all processes, never by a micro-batch's, so cuts don't
    change the gradient. Among several processes each must call this, with its own groups of the batch, if only none.

    Args:
        phase: what this is a step of, for messages.

    Returns:
        what `loss_of` counted, summed, with `tokens`, `grad_norm` and `steps` = 1; or only `empty_steps` = 1 when
        nothing is trained on, or `not_finite_steps` = 1 when the gradient is not finite and no step was taken.

    Raises:
        DeviceMemoryError: as `within_memory`; the weights are those from before the step.
    """
    peers = packer.peers
    trained = [r for g in groups for r in g.trained if len(r.token_ids)]
    counts = [float(sum(len(r.token_ids) for r in trained)), float(len(trained))]
    tokens, answers = (int(count) for count in (peers.sum(counts) if peers else counts))
    if not answers:
        return {"empty_steps": 1.0}

    def add_gradients() -> dict[str, torch.Tensor]:
        optimizer.zero_grad(set_to_none=True)
        sums: dict[str, torch.Tensor] = {}
        micro_batches = packer.split(groups)
        for number, parts in enumerate(micro_batches, start=1):
            if peers:
                peers.before_backward(last=number == len(micro_batches))
            if number > 1:
                packer.largest = max(packer.largest, packer.tokens(parts))
            loss, counted = loss_of(packer.build(parts), tokens, answers)
            if loss.requires_grad:  # not where the vision tower alone is trained, and no answer is to a picture
                loss.backward()
            for name, value in counted.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value.detach()
        if peers:
            peers.after_backward()
        return sums

    sums = within_memory(packer, phase, add_gradients, discard=optimizer.zero_grad)
    norm = take_step(optimizer, max_grad_norm)
    if norm is None:
        return {"not_finite_steps": 1.0}
    names = sorted(sums)
    found = [float(sums[name]) for name in names]
    result = dict(zip(names, peers.sum(found) if peers else found, strict=True))
    return result | {"tokens": float(tokens), "grad_norm": norm, "steps": 1.0}
