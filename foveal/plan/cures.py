"""What to change where a run doesn't fit: single changes and small sets of them, tried on the plan itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, TypeAlias

from foveal.cluster.topology import division_problems
from foveal.config import Config
from foveal.plan.engine import Engine, uses_vllm
from foveal.plan.gpus import Gpu
from foveal.plan.memory import Memory, actor_sizes, plan_memory
from foveal.plan.rows import Lengths
from foveal.plan.seconds import plan_seconds
from foveal.plan.splits import possible_splits
from foveal.plan.trained import gathers_once

Kind: TypeAlias = Literal["same", "precision", "learns otherwise", "more GPUs"]
KINDS: tuple[Kind, ...] = ("same", "precision", "learns otherwise", "more GPUs")
"""What a change costs beside time; the order in which cures are offered."""
_Wanted: TypeAlias = tuple[dict[str, Any], Kind, str]
"""Keys to set, and as in `Change`."""
MOST_TOGETHER = 3
MOST_GPUS = 64
_SAMPLING = ("gen", "hand over")
_SHARE = "worker.rollout.gpu_memory_utilization"


@dataclass(frozen=True)
class Change:
    """Keys to set.

    Attributes:
        pairs: of keys and values.
        kind: what it costs beside time.
        cost: in words.
    """

    pairs: tuple[tuple[str, Any], ...]
    kind: Kind
    cost: str

    @property
    def values(self) -> dict[str, Any]:
        return dict(self.pairs)


@dataclass(frozen=True)
class Cure:
    """Changes with which a run fits.

    Attributes:
        step: seconds of a step then.
        devices: GPUs then.
    """

    changes: tuple[Change, ...]
    step: float
    devices: int

    @property
    def arguments(self) -> list[str]:
        """For the command line."""
        return [f"{key}={_yaml(value)}" for change in self.changes for key, value in change.values.items()]

    @property
    def kind(self) -> Kind:
        return max((change.kind for change in self.changes), key=KINDS.index)

    @property
    def cost(self) -> str:
        return "; ".join(change.cost for change in self.changes)


def find_cures(config: Config, gpu: Gpu, lengths: Lengths, memory: Memory) -> list[Cure]:
    """Sets of changes with which the run fits, none of which can be left out; by what they cost, then by speed.

    Args:
        memory: of the configuration as it is.
    """
    changes = list(_changes(config, gpu, memory))
    found: list[Cure] = []
    for count in range(MOST_TOGETHER + 1):
        for several in combinations(changes, count):
            keys = [key for change in several for key in change.values]
            if len(set(keys)) < len(keys) or any(_is_enough(cure, several) for cure in found):
                continue
            cure = _tried(config, gpu, lengths, several)
            if cure is None and not any(_needed(other) == set() for other in found):  # whose share alone cures
                cure = _tried(config, gpu, lengths, several, _smaller_share(config, gpu, lengths, several))
            if cure is not None:
                found.append(cure)
    return sorted(found, key=lambda cure: (KINDS.index(cure.kind), cure.devices, cure.step))


def _is_enough(cure: Cure, changes: tuple[Change, ...]) -> bool:
    """Whether the cure is among the changes, whatever share vLLM is left. Beside a share that cures alone other changes
    may be faster."""
    needed = _needed(cure)
    return bool(needed) and needed <= set(changes)


def _needed(cure: Cure) -> set[Change]:
    """Its changes but for vLLM's share, which follows from them."""
    return {change for change in cure.changes if change.pairs[0][0] != _SHARE}


def _tried(
    config: Config, gpu: Gpu, lengths: Lengths, changes: tuple[Change, ...], last: Change | None = None
) -> Cure | None:
    """The changes, where there are any and the run fits with them."""
    changes = (*changes, last) if last is not None else changes
    if not 0 < len(changes) <= MOST_TOGETHER:
        return None
    changed = changed_by(config, changes)
    if division_problems(changed, "vllm" if uses_vllm(changed) else "transformers"):
        return None
    lengths = lengths.within(changed)
    planned = plan_memory(changed, gpu, lengths)
    if not planned.fits:
        return None
    return Cure(changes, plan_seconds(changed, gpu, lengths, planned).step, changed.trainer.devices)


def _smaller_share(config: Config, gpu: Gpu, lengths: Lengths, changes: tuple[Change, ...]) -> Change | None:
    """The part of the device that is left for vLLM, where after the changes only the rollout takes too much."""
    changed = changed_by(config, changes)
    planned = plan_memory(changed, gpu, lengths.within(changed))
    if planned.engine is None or any(not phase.fits for phase in planned.phases[1:]):
        return None
    resting = sum(size for name, size in planned.phases[0].parts.items() if not name.startswith("engine"))
    share = int(100 * (planned.phases[0].limit - resting) / gpu.bytes) / 100
    given = changed.worker.rollout.gpu_memory_utilization
    if share < 0.05 or share == given:
        return None
    share = share if share < given else min(share, 0.9)
    cost = "fewer answers side by side" if share < given else "more room for vLLM"
    return Change(((_SHARE, share),), "same", cost)


def changed_by(config: Config, changes: tuple[Change, ...]) -> Config:
    """A copy of the configuration with the changes made."""
    config = config.model_copy(deep=True)
    for change in changes:
        for key, value in change.values.items():
            section, _, name = key.rpartition(".")
            setattr(config.value(section), name, value)
    return config


def _changes(config: Config, gpu: Gpu, memory: Memory) -> Iterator[Change]:
    """Changes that may help, one by one, leaving out those that are there already."""
    for pairs, kind, cost in (
        *_of_sampling(config, memory),
        *_of_passes(config, gpu, memory),
        *_of_training(config),
        *_of_devices(config, memory),
    ):
        new = tuple((key, value) for key, value in pairs.items() if config.value(key) != value)
        if new:
            yield Change(new, kind, cost)


def _of_roles(config: Config, name: str, value: Any) -> dict[str, Any]:
    """The same key of all models that are trained."""
    roles = ["worker.actor", "worker.critic"] if config.algorithm.uses_critic else ["worker.actor"]
    return {f"{role}.{name}": value for role in roles}


def _of_sampling(config: Config, memory: Memory) -> Iterator[_Wanted]:
    if memory.engine and memory.short:
        parallel = 2 * config.worker.rollout.tensor_parallel_size
        if config.engine_devices % parallel == 0:
            yield {"worker.rollout.tensor_parallel_size": parallel}, "same", "an engine over more GPUs"
    if memory.engine and not config.cluster.rollout_devices:
        away = _of_roles(config, "offload.offload_optimizer", True)
        yield away, "same", "optimizer states travel to the host and back each step"
        away = _of_roles(config, "offload.offload_params", True)
        if config.algorithm.uses_reference and not config.worker.actor.model.lora.rank:
            away["worker.ref.offload.offload_params"] = True
        yield away, "same", "weights travel to the host and back each step"


def _of_passes(config: Config, gpu: Gpu, memory: Memory) -> Iterator[_Wanted]:
    if any(not phase.fits for phase in memory.phases[1:]):
        yield {"worker.actor.token_budget": "auto"}, "same", "passes are as large as fit"
        again = _of_roles(config, "model.enable_gradient_checkpointing", True)
        yield again, "same", "layers are computed twice"
        offloaded = _of_roles(config, "model.activation_offload", True)
        yield offloaded, "same", "activations travel to the host and back"
        actor = config.worker.actor
        if (
            config.training_devices > 1
            and gathers_once(actor, actor_sizes(config), gpu)
            and actor.fsdp.enable_full_shard
        ):
            yield _of_roles(config, "fsdp.gather_weights", "layer"), "same", "weights are gathered in every pass"
        if config.algorithm.exact_kl_in_loss:
            yield {"algorithm.kl_penalty": "low_var_kl"}, "learns otherwise", "the KL is an estimate"
    limit = config.data.max_response_length
    if limit >= 512:
        yield {"data.max_response_length": limit // 2}, "learns otherwise", "longer answers are cut off"


def _of_training(config: Config) -> Iterator[_Wanted]:
    actor = config.worker.actor
    if actor.model.lora.rank:
        return
    if actor.weights_dtype("cuda") == "fp32" and actor.fsdp.torch_dtype is None:
        small = _of_roles(config, "optim.strategy", "adamw_bf16")
        yield small, "precision", "weights and moments in bf16, rounded stochastically"
    if actor.optim.strategy == "adamw":
        yield _of_roles(config, "optim.strategy", "adamw_8bit"), "precision", "moments in 8 bits"
    yield _of_roles(config, "model.lora.rank", 64), "learns otherwise", "adapters alone are trained"


def _of_devices(config: Config, memory: Memory) -> Iterator[_Wanted]:
    trainer, own = config.trainer, config.cluster.rollout_devices
    for number in _other_splits(config):
        cost = f"{number} of the GPUs sample and {trainer.devices - number} train"
        yield {"cluster.rollout_devices": number}, "same", cost
    crowded = any(not phase.fits for phase in memory.phases if phase.name in _SAMPLING)
    if memory.engine and not own and trainer.devices > 1 and crowded:
        apart = {"cluster.rollout_devices": trainer.devices // 2, "trainer.async_rollout": True}
        cost = "half of the GPUs sample beside the others' training; answers are a step old"
        yield apart, "learns otherwise", cost
    devices = 2 * trainer.devices
    while devices <= MOST_GPUS:
        of_machine = min(devices, 8)
        values = {"trainer.n_gpus_per_node": of_machine, "trainer.nnodes": devices // of_machine}
        if own:
            values["cluster.rollout_devices"] = own * devices // trainer.devices
        if memory.engine and memory.short:
            values["worker.rollout.tensor_parallel_size"] = min(_engine_gpus(memory.engine), of_machine)
        yield values, "more GPUs", f"{devices} GPUs, over which weights and states are spread"
        devices *= 2


def _other_splits(config: Config) -> list[int]:
    """Some of the possible ones: the next to today's on either side, a quarter, half, and three quarters."""
    own, devices = config.cluster.rollout_devices, config.trainer.devices
    possible = possible_splits(config)
    wanted = {devices // 4, devices // 2, 3 * devices // 4}
    wanted |= {max((n for n in possible if n < own), default=0), min((n for n in possible if n > own), default=0)}
    return sorted(wanted & set(possible))


def _engine_gpus(engine: Engine) -> int:
    """Over how many GPUs an engine must be spread for its weights to take no more than six tenths of its share."""
    parallel = engine.tensor_parallel
    while engine.weights * engine.tensor_parallel / parallel > 0.6 * engine.share and parallel < 8:
        parallel *= 2
    return parallel


def _yaml(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)
