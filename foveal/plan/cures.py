"""What to change where a run doesn't fit: single changes and small sets of them, tried on the plan itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, TypeAlias

from foveal.config import Config
from foveal.plan.engine import Engine
from foveal.plan.gpus import Gpu
from foveal.plan.memory import Memory, plan_memory
from foveal.plan.rows import Lengths
from foveal.plan.seconds import plan_seconds

Kind: TypeAlias = Literal["same", "precision", "learns otherwise", "more GPUs"]
KINDS: tuple[Kind, ...] = ("same", "precision", "learns otherwise", "more GPUs")
"""What a change costs beside time; the order in which cures are offered."""
MOST_TOGETHER = 3
MOST_GPUS = 64


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
    changes = list(_changes(config, memory))
    found: list[Cure] = []
    for count in range(MOST_TOGETHER + 1):
        for several in combinations(changes, count):
            keys = [key for change in several for key in change.values]
            if len(set(keys)) < len(keys) or any(set(cure.changes) <= set(several) for cure in found):
                continue
            cure = _tried(config, gpu, lengths, several) or _tried(
                config, gpu, lengths, several, _smaller_share(config, gpu, lengths, several)
            )
            if cure is not None:
                found.append(cure)
    smallest = [cure for cure in found if not any(set(other.changes) < set(cure.changes) for other in found)]
    return sorted(smallest, key=lambda cure: (KINDS.index(cure.kind), cure.devices, cure.step))


def _tried(
    config: Config, gpu: Gpu, lengths: Lengths, changes: tuple[Change, ...], last: Change | None = None
) -> Cure | None:
    """The changes, where there are any and the run fits with them."""
    changes = (*changes, last) if last is not None else changes
    if not 0 < len(changes) <= MOST_TOGETHER:
        return None
    changed = changed_by(config, changes)
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
    return Change((("worker.rollout.gpu_memory_utilization", share),), "same", cost)


def changed_by(config: Config, changes: tuple[Change, ...]) -> Config:
    """A copy of the configuration with the changes made."""
    config = config.model_copy(deep=True)
    for change in changes:
        for key, value in change.values.items():
            section, _, name = key.rpartition(".")
            setattr(config.value(section), name, value)
    return config


def _changes(config: Config, memory: Memory) -> Iterator[Change]:
    """Changes that may help, one by one."""

    def change(values: dict[str, Any], kind: Kind, cost: str) -> Iterator[Change]:
        new = tuple((key, value) for key, value in values.items() if config.value(key) != value)
        if new:
            yield Change(new, kind, cost)

    actor, algorithm, trainer = config.worker.actor, config.algorithm, config.trainer
    roles = ["worker.actor", "worker.critic"] if algorithm.uses_critic else ["worker.actor"]

    def of_roles(name: str, value: Any) -> dict[str, Any]:
        return {f"{role}.{name}": value for role in roles}

    if memory.engine:
        parallel = 2 * config.worker.rollout.tensor_parallel_size
        if memory.short and trainer.devices % parallel == 0:
            yield from change({"worker.rollout.tensor_parallel_size": parallel}, "same", "an engine over more GPUs")
        away = of_roles("offload.offload_optimizer", True)
        yield from change(away, "same", "optimizer states travel to the host and back each step")
        away = of_roles("offload.offload_params", True)
        if algorithm.uses_reference and not actor.model.lora.rank:
            away["worker.ref.offload.offload_params"] = True
        yield from change(away, "same", "weights travel to the host and back each step")
    if any(not phase.fits for phase in memory.phases[1:]):
        yield from change({"worker.actor.token_budget": "auto"}, "same", "passes are as large as fit")
        again = of_roles("model.enable_gradient_checkpointing", True)
        yield from change(again, "same", "layers are computed twice")
        yield from change(of_roles("model.activation_offload", True), "same", "activations travel to the host and back")
        if algorithm.exact_kl_in_loss:
            yield from change({"algorithm.kl_penalty": "low_var_kl"}, "learns otherwise", "the KL is an estimate")
    if not actor.model.lora.rank:
        if actor.weights_dtype("cuda") == "fp32" and actor.fsdp.torch_dtype is None:
            small = of_roles("optim.strategy", "adamw_bf16")
            yield from change(small, "precision", "weights and moments in bf16, rounded stochastically")
        if actor.optim.strategy == "adamw":
            yield from change(of_roles("optim.strategy", "adamw_8bit"), "precision", "moments in 8 bits")
        yield from change(of_roles("model.lora.rank", 64), "learns otherwise", "adapters alone are trained")
    if config.data.max_response_length >= 512:
        half = {"data.max_response_length": config.data.max_response_length // 2}
        yield from change(half, "learns otherwise", "longer answers are cut off")
    devices = 2 * trainer.devices
    while devices <= MOST_GPUS:
        of_machine = min(devices, 8)
        values = {"trainer.n_gpus_per_node": of_machine, "trainer.nnodes": devices // of_machine}
        if memory.engine and memory.short:
            values["worker.rollout.tensor_parallel_size"] = min(_engine_gpus(memory.engine), of_machine)
        yield from change(values, "more GPUs", f"{devices} GPUs, over which weights and states are spread")
        devices *= 2


def _engine_gpus(engine: Engine) -> int:
    """Over how many GPUs an engine must be spread for its weights to take no more than six tenths of its share."""
    parallel = engine.tensor_parallel
    while engine.weights * engine.tensor_parallel / parallel > 0.6 * engine.share and parallel < 8:
        parallel *= 2
    return parallel


def _yaml(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)
