"""How many tokens go into one pass."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from foveal.config import Config
from foveal.config.schema_model import TrainedConfig
from foveal.models.feature_store import DEVICE_BYTES
from foveal.models.head import CHUNK_ELEMENTS
from foveal.models.loading import DTYPES
from foveal.models.memory import LEAST, Pass, budget, forward_bytes, head_bytes, tower_block, training_bytes
from foveal.models.parts import part_of
from foveal.models.transfer import local
from foveal.track import console
from foveal.train.processes import several_processes
from foveal.train.retry import CURE
from foveal.train.scoring import Packer

ON_CPU = 4096
"""More is not faster: the caches are full long before."""

MOST = 65_536
"""More is not faster either, and a tensor of this many tokens times the width of an MLP nears 2³¹ numbers, which not
every kernel can index."""

_GIB = 1024**3
_FEW = 3
_LOST = 1.1
"""A tenth is lost between blocks once passes have had many lengths."""


class Trained(Protocol):
    """A model that is trained: `Policy` or `Critic`."""

    optimizer: torch.optim.Optimizer
    packer: Packer
    experience_packer: Packer

    @property
    def scorer(self) -> nn.Module: ...


def initial_budget(config: Config) -> int:
    """What a packer has until the models are loaded and `set_budgets` knows more."""
    wanted = config.worker.actor.token_budget
    return wanted if isinstance(wanted, int) else ON_CPU


def set_budgets(
    config: Config, models: Mapping[str, Trained], device: torch.device, ceiling: int = sys.maxsize
) -> None:
    """Sets the budgets of all packers, and says which and why.

    `worker.actor.token_budget` when it is a number; "easyr1" gives what EasyR1's keys stand for: responses per device ×
    (prompt limit + response limit); "auto" the largest that the memory allows.

    Args:
        models: `actor` and, where there is one, `critic`. The reference must be loaded too.
        ceiling: tokens that no pass may exceed, because memory ran out above.
    """
    wanted = config.worker.actor.token_budget
    longest = config.data.max_prompt_length + config.data.max_response_length
    measured = wanted == "auto" and device.type == "cuda"
    free = _free_bytes(models.values(), device) if measured else 0
    for role, model in models.items():
        keys: TrainedConfig = config.value(f"worker.{role}")
        if isinstance(wanted, int):
            update = experience = wanted
            reason = ""
        elif wanted == "easyr1":
            update = keys.micro_batch_size_per_device_for_update * longest
            experience = keys.micro_batch_size_per_device_for_experience * longest
            reason = ": micro batch sizes × (prompt limit + response limit)"
        elif device.type != "cuda":
            update = experience = ON_CPU
            reason = f" on a {device.type.upper()}"
        else:
            update, experience, reason = _largest(config, keys, model.scorer, free)
        update, experience = (min(ceiling, -int(most)) for most in _most([-update, -experience], device))
        model.packer.budget, model.experience_packer.budget = update, experience
        model.packer.ceiling = model.experience_packer.ceiling = ceiling
        console.note(
            f"{role}: passes of up to {update:,} tokens with gradient and {experience:,} without "
            f"(worker.actor.token_budget={wanted}{reason})"
        )
        if measured and update == LEAST:
            console.warn(f"{role}: hardly any memory is left for what an update computes, and it may run out. {CURE}")


@contextmanager
def learning(model: Trained, device: torch.device, role: str) -> Iterator[None]:
    """Around an update on a GPU, with the device's statistics reset: what its passes took replaces the estimate of
    `auto`.

    The estimate is of layers that run eagerly, over groups of as little text as they may have.
    """
    packer = model.packer
    states, given_back = bool(model.optimizer.state), _memory_given_back(device)
    packer.largest = 0
    yield
    if not states:  # the peak was without what rests there now
        return
    gradients = _gradient_bytes(_weights(model.optimizer), device) + _held_bytes(model)  # let go of by now
    free = _unallocated(device) - gradients
    taken = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device) - gradients
    # of all processes: one that only kept the others company has had passes of a single token
    retries = _memory_given_back(device) - given_back
    largest, most_taken, lacking, most_retries = _most([packer.largest, taken, -free, retries], device)
    packer.largest = int(largest)
    if packer.largest and most_retries > _FEW:  # it fits, but is moved about all the time
        packer.ceiling = min(packer.ceiling, int(0.85 * packer.largest))
    learned = learned_budget(packer, most_taken, -lacking)
    if learned != packer.budget:
        packer.budget = learned
        console.note(
            f"{role}: passes of up to {learned:,} tokens with gradient from now on, as they took "
            f"{most_taken / packer.largest / 2**20:.2f} MiB a token (worker.actor.token_budget=auto)"
        )


def _memory_given_back(device: torch.device) -> int:
    """How often torch found no memory and gave back all that it held in reserve; each time the device waits."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def learned_budget(packer: Packer, taken: float, free: float) -> int:
    """The budget for as much memory as there is; a change of less than a tenth is none, and more than twice what was
    tried is not believed at once.

    Args:
        taken: bytes at the peak of passes of which the largest had `packer.largest` tokens; 0 is no pass.
        free: bytes that there are for a pass.
    """
    if not packer.largest or taken <= 0:
        return packer.budget
    believed = max(packer.budget, 2 * packer.largest)
    wanted = min(budget(free, _LOST * taken / packer.largest, MOST), believed, packer.ceiling)
    return packer.budget if abs(wanted - packer.budget) < 0.1 * packer.budget else wanted


def _most(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each in all processes, which so come to one budget: those that share sequences must cut alike."""
    if not several_processes():
        return list(values)
    most = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    found: list[float] = most.tolist()
    return found


def _largest(config: Config, keys: TrainedConfig, scorer: Any, free: int) -> tuple[int, int, str]:
    """Tokens with gradient and without, and why."""
    weights = next(scorer.model.parameters()).dtype.itemsize
    compute = scorer.autocast.itemsize if scorer.autocast else weights
    if any(isinstance(p, DTensor) for p in scorer.parameters()):  # gathered in the type that is computed in
        weights = compute = DTYPES[keys.fsdp.mp_param_dtype].itemsize
    sizes = scorer.model.config
    how = how_computed(config, keys, sizes, stream=weights, compute=compute)
    return largest_passes(
        config,
        sizes,
        how,
        free,
        parameters=sum(p.numel() for p in scorer.parameters()),
        tower_trained=any(p.requires_grad for p in _tower(scorer)),
    )


def largest_passes(
    config: Config, sizes: Any, how: Pass, free: float, *, parameters: int, tower_trained: bool
) -> tuple[int, int, str]:
    """Tokens of the first passes of `auto`, with gradient and without, and why.

    Args:
        sizes: the configuration of the transformers model.
        free: bytes that are left for a pass.
        parameters: of the model, as one process gathers them.
        tower_trained: whether the vision tower is.
    """
    compiled = compiles_head(config)
    fixed = head_bytes(CHUNK_ELEMENTS["compiled" if compiled else "cuda"], compiled=compiled)
    if how.stream != how.compute:  # autocast keeps a copy of each weight
        fixed += how.compute * parameters
    training = training_bytes(sizes, how, tower_trained=tower_trained)
    room = free - fixed
    return (
        budget(room, training, MOST),
        budget(room, forward_bytes(sizes, how), MOST),
        f": {max(room, 0) / _GIB:.1f} GiB are left for activations, {training / 2**20:.2f} MiB a token with gradient",
    )


def compiles_head(config: Config) -> bool:
    """Whether the logits of an update run through compiled code, on a GPU."""
    return config.worker.actor.use_torch_compile and not config.algorithm.exact_kl_in_loss


def how_computed(config: Config, keys: TrainedConfig, sizes: Any, *, stream: int, compute: int) -> Pass:
    """How passes compute, for groups as long as they may be.

    Args:
        keys: of the model that is trained.
        sizes: the configuration of the transformers model.
        stream, compute: bytes of a number, as in `Pass`.
    """
    prompt, answer, n = config.data.max_prompt_length, config.data.max_response_length, config.worker.rollout.n
    if not config.worker.actor.shared_prefix:
        n = 1
    return Pass(
        stream=stream,
        compute=compute,
        keys_per_token=(prompt + n * (prompt + answer)) / (prompt + n * answer) if n > 1 else 1.0,
        # All of the prompt, in groups whose answers are half as long as they may be.
        visual=prompt / (prompt + n * answer / 2) if tower_block(sizes) else 0.0,
        checkpointing=keys.model.enable_gradient_checkpointing,
        offload=keys.model.activation_offload,
        rank=keys.model.lora.rank,
    )


def _tower(scorer: nn.Module) -> list[nn.Parameter]:
    """The weights of the vision tower, without those of the projector."""
    return [parameter for name, parameter in scorer.named_parameters() if part_of(name) == "vision"]


def _free_bytes(models: Iterable[Trained], device: torch.device) -> int:
    """What the device has free, less what is still to come: gradients, optimizer states, features of pictures, weights
    that others hold."""
    free = _unallocated(device)
    gradients, states = 0, 0
    for model in models:
        tower, optimizer = _tower(model.scorer), model.optimizer
        if tower and not any(p.requires_grad for p in tower):
            free -= DEVICE_BYTES  # those of one model are still there while another is trained
        weights = _weights(optimizer)
        gradients = max(gradients, _gradient_bytes(weights, device) + _held_bytes(model))
        if not optimizer.state:
            states += state_bytes(optimizer, weights)
    return free - gradients - states


def state_bytes(optimizer: torch.optim.Optimizer, weights: Iterable[torch.Tensor]) -> int:
    """Bytes of the two moments of each weight."""
    in_8_bits = getattr(optimizer, "block_size", math.inf) < math.inf  # numbers that share a scale
    return sum(2 * (p.numel() if in_8_bits else p.nbytes) for p in weights)


def _unallocated(device: torch.device) -> int:
    """Bytes of the device that no tensor takes, torch's reserve included."""
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserve


def _gradient_bytes(weights: Iterable[torch.Tensor], device: torch.device) -> int:
    return sum(weight.nbytes for weight in weights if weight.device.type == device.type)


def _held_bytes(model: Trained) -> int:
    return model.packer.peers.held_bytes if model.packer.peers else 0


def _weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What is trained, of sharded weights this process's part."""
    return [local(p) for group in optimizer.param_groups for p in group["params"]]
