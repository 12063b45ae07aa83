"""One optimizer step over micro-batches, the same for policy and critic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from foveal.train.optim import take_step
from foveal.train.packing import Pack
from foveal.train.scoring import Packer
from foveal.types import Group

PackLoss = Callable[[Pack, int, int], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(pack, tokens and answers of the whole step) → (the pack's share of the loss, sums for the metrics)."""


def optimizer_step(
    optimizer: torch.optim.Optimizer, packer: Packer, groups: Sequence[Group], loss_of: PackLoss, max_grad_norm: float
) -> dict[str, float]:
    """Accumulates the gradient of the whole batch, micro-batch by micro-batch, then steps once.

    The loss is normalised by the batch's own counts, never a micro-batch's, so cuts don't change the gradient.

    Returns:
        what `loss_of` counted, summed, with `tokens`, `grad_norm` and `steps` = 1; or only `empty_steps` = 1 when
        nothing is trained on, or `not_finite_steps` = 1 when the gradient is not finite and no step was taken.
    """
    trained = [r for g in groups for r in g.trained if len(r.token_ids)]
    if not trained:
        return {"empty_steps": 1.0}
    total_tokens = sum(len(r.token_ids) for r in trained)
    optimizer.zero_grad(set_to_none=True)
    sums: dict[str, torch.Tensor] = {}
    for pack in packer.packs(groups):
        loss, counted = loss_of(pack, total_tokens, len(trained))
        loss.backward()
        for name, value in counted.items():
            sums[name] = sums.get(name, torch.zeros_like(value)) + value.detach()
    norm = take_step(optimizer, max_grad_norm)
    if norm is None:
        return {"not_finite_steps": 1.0}
    result = {name: float(value) for name, value in sums.items()}
    return result | {"tokens": float(total_tokens), "grad_norm": norm, "steps": 1.0}
