"""When the device's memory runs out in a pass: say where, and begin once more with half the tokens."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from foveal.errors import DeviceMemoryError
from foveal.track import console
from foveal.train.processes import several_processes

if TYPE_CHECKING:
    from foveal.train.scoring import Packer

Result = TypeVar("Result")

CURE = (
    "Lower data.max_response_length or data.max_pixels, set enable_gradient_checkpointing=true or "
    "activation_offload=true in the model's section, or choose optim.strategy=adamw_bf16 or adamw_8bit."
)


def within_memory(
    packer: Packer, phase: str, work: Callable[[], Result], discard: Callable[[], None] | None = None
) -> Result:
    """Runs `work`, which goes through the packer's micro-batches; where memory runs out, once more from the start with
    half the budget, which the packer keeps. Results don't depend on the budget.

    Among several processes nothing begins again, since the others wait for this one where it stopped: the whole run may
    (`foveal.restart`).

    Args:
        phase: for the messages, as "the policy's update".
        discard: lets go of what an interrupted `work` left behind.

    Raises:
        DeviceMemoryError: it ran out again, or the micro-batch was a single answer.
    """
    random = torch.get_rng_state()
    random_on_device = torch.cuda.get_rng_state(packer.device) if packer.device.type == "cuda" else None
    try:
        return work()
    except torch.OutOfMemoryError as error:
        smaller = _half(packer)
        if smaller is None or several_processes():
            raise _failure(packer, phase, error) from error
        place = _place(packer, phase)
    # Outside the handler: the exception held the frames of the pass, and with them its activations.
    if discard is not None:
        discard()
    gc.collect()
    torch.set_rng_state(random)
    if random_on_device is not None:
        torch.cuda.empty_cache()
        torch.cuda.set_rng_state(random_on_device, packer.device)
    packer.budget = packer.ceiling = smaller
    console.warn(
        f"{place}. Beginning again with passes of {smaller:,} tokens, from now on; results are the same. To start with "
        f"that, set worker.actor.token_budget={smaller}."
    )
    try:
        return work()
    except torch.OutOfMemoryError as error:
        raise _failure(packer, phase, error) from error


def _half(packer: Packer) -> int | None:
    """A budget that cuts the micro-batch that was built last; None for a single answer, which can't be cut."""
    if sum(len(part.responses) for part in packer.parts) < 2:
        return None
    return max(1, min(packer.budget, packer.tokens(packer.parts)) // 2)


def _place(packer: Packer, phase: str) -> str:
    rows = [(len(p.prompt.expanded_ids), len(r.token_ids), p.prompt.uid) for p in packer.parts for r in p.responses]
    prompt, answer, uid = max(rows, key=lambda row: row[0] + row[1], default=(0, 0, "none"))
    tokens = packer.tokens(packer.parts)
    return (
        f"out of memory in {phase}: a pass of {tokens:,} tokens (budget {packer.budget:,}), largest row "
        f"{prompt + answer:,} tokens ({uid}: prompt {prompt:,}, answer {answer:,})"
    )


def _failure(packer: Packer, phase: str, error: Exception) -> DeviceMemoryError:
    smaller = _half(packer)
    cure = CURE if smaller is None else f"Set worker.actor.token_budget={smaller} or less. {CURE}"
    return DeviceMemoryError(f"{_place(packer, phase)}. {cure}\n  {str(error).splitlines()[0]}", smaller)
