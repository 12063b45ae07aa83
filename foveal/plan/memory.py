"""Memory of a GPU in each phase of a step, part by part, from sizes alone.

The peaks are those that `torch.cuda.max_memory_allocated` tells, and beside them what vLLM takes, which torch's
statistics leave out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from foveal.cluster.room import BESIDE_SHARE, KEPT_FREE, shards
from foveal.config import Config
from foveal.models.loading import DTYPES
from foveal.plan.engine import Engine, engine_of, transformers_batch_bytes, uses_vllm
from foveal.plan.gpus import Gpu
from foveal.plan.rows import Lengths
from foveal.plan.sizes import ModelSizes, measure
from foveal.plan.trained import Parts, Role, Trained, largest_tokens
from foveal.train.credit import needs_old_logprobs

BUCKETS = 2 * (512 << 20)
"""Bytes of weights on their way to the engine: one bucket of `named_tensors` is made while another is taken."""
Side: TypeAlias = Literal["both", "trainers", "engines"]


@dataclass(frozen=True)
class Phase:
    """A phase of a step.

    Attributes:
        name: as it is timed under (`timing_s/…`).
        parts: bytes of a GPU at the phase's peak.
        limit: bytes that it may take.
        side: whose GPUs, where engines have some of their own (`cluster.rollout_devices`).
        tokens: of its largest pass; 0 where there is none.
    """

    name: str
    parts: Parts
    limit: float
    side: Side
    tokens: int = 0

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def of_torch(self) -> float:
        """What torch's own statistics count."""
        return sum(size for name, size in self.parts.items() if not name.startswith("engine"))

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


@dataclass(frozen=True)
class Memory:
    """A configuration on a kind of GPU.

    Attributes:
        phases: in the order of a step.
        budgets: tokens of passes with gradient and without, by role.
        largest_budget: tokens of the largest pass of the actor's update that fits; 0 where none does.
        engine: vLLM's share; None where the trainer's module samples.
        short: what is wrong beside phases that take too much.
        host: bytes of host memory for each GPU, by what they hold.
        saved: bytes of a checkpoint that each GPU writes.
    """

    phases: list[Phase]
    budgets: dict[Role, tuple[int, int]]
    largest_budget: int
    engine: Engine | None
    short: list[str] = field(default_factory=list)
    host: Parts = field(default_factory=dict)
    saved: float = 0.0

    @property
    def fits(self) -> bool:
        return not self.short and all(phase.fits for phase in self.phases)

    @property
    def peak(self) -> Phase:
        """The phase that leaves least."""
        return max(self.phases, key=lambda phase: phase.total / phase.limit)


def plan_memory(config: Config, gpu: Gpu, lengths: Lengths) -> Memory:
    """The peaks of a run's phases on each of its GPUs, once the optimizer has its states."""
    return _Planner(config, gpu, lengths).plan()


def actor_sizes(config: Config) -> ModelSizes:
    model = config.worker.actor.model
    return measure(model, model.model_path or "")


def critic_sizes(config: Config) -> ModelSizes:
    model = config.worker.critic.model
    return measure(model, model.model_path or config.worker.actor.model.model_path or "")


class _Planner:
    def __init__(self, config: Config, gpu: Gpu, lengths: Lengths) -> None:
        self.config, self.gpu, self.lengths = config, gpu, lengths
        self.devices = config.training_devices
        self.apart = config.cluster.rollout_devices > 0
        self.vllm = uses_vllm(config)
        self.usable = gpu.bytes * (1 - KEPT_FREE)
        self.roles: dict[Role, Trained] = {
            "actor": Trained(config, gpu, lengths, "actor", config.worker.actor, actor_sizes(config))
        }
        if config.algorithm.uses_critic:
            self.roles["critic"] = Trained(config, gpu, lengths, "critic", config.worker.critic, critic_sizes(config))
        self.reference, self.reference_size = 0.0, 0
        if config.algorithm.uses_reference and not config.worker.actor.model.lora.rank:
            fsdp = config.worker.ref.fsdp
            self.reference_size = DTYPES[fsdp.torch_dtype or "bf16"].itemsize
            parameters = self.roles["actor"].sizes.parameters
            whole = self.roles["actor"].sizes.tower if self.devices > 1 else 0
            spread = (parameters - whole) * self.reference_size / shards(fsdp, self.devices)
            on_host = fsdp.enable_cpu_offload and self.devices > 1
            self.reference = spread * (not on_host) + whole * DTYPES[fsdp.mp_param_dtype].itemsize

    @cached_property
    def parked(self) -> frozenset[str]:
        """What of a trainer's device waits on the host while answers are sampled; each phase fetches what it needs."""
        worker = self.config.worker
        wanted = {
            "actor weights": worker.actor.offload.offload_params and self.vllm,  # or they are what samples
            "actor optimizer": worker.actor.offload.offload_optimizer,
            "critic weights": worker.critic.offload.offload_params,
            "critic optimizer": worker.critic.offload.offload_optimizer,
            "reference": worker.ref.offload.offload_params,
        }
        return frozenset(name for name, away in wanted.items() if away and not self.apart)

    def held(self, away: Collection[str] = ()) -> Parts:
        """What rests on a trainer's device, but for what is away."""
        parts = {"reference": self.reference}
        for role, trained in self.roles.items():
            parts |= {f"{role} weights": trained.weights, f"{role} optimizer": trained.moments}
        order = [f"{role} {what}" for role in self.roles for what in ("weights", "optimizer")]
        return {name: parts[name] for name in [*order, "reference"] if parts[name] and name not in away}

    def asleep(self) -> Parts:
        return {"engine graphs": BESIDE_SHARE} if self.vllm and not self.apart else {}

    def plan(self) -> Memory:
        config = self.config
        room = self.usable - sum((self.held() | self.asleep()).values())
        free = room - max(trained.gradients for trained in self.roles.values())
        budgets = {role: trained.budgets(free) for role, trained in self.roles.items()}
        actor = self.roles["actor"]
        phases = [self.rollout(), *self.hand_over()]
        away = set(self.parked)

        def resting(*fetched: str) -> Parts:
            away.difference_update(fetched)
            return self.held(away) | self.asleep()

        if needs_old_logprobs(config):
            phases.append(self.without_gradient("old", resting("actor weights"), actor, budgets["actor"][1]))
        if config.algorithm.needs_ref_logprobs:
            needed = resting("reference" if self.reference else "actor weights")
            phases.append(self.without_gradient("ref", needed, actor, budgets["actor"][1], self.reference_size))
        if "critic" in self.roles:
            critic, tokens = self.roles["critic"], budgets["critic"]
            phases.append(self.without_gradient("values", resting("critic weights"), critic, tokens[1]))
            needed = resting("critic weights", "critic optimizer")
            phases.append(self.update("update_critic", needed, critic, tokens[0]))
        exact = ["reference"] if config.algorithm.exact_kl_in_loss else []
        needed = resting("actor weights", "actor optimizer", *exact)
        phases.append(self.update("update_actor", needed, actor, budgets["actor"][0]))
        phases.append(Phase("save_checkpoint", resting(*self.parked), self.usable, self.side))
        engine = engine_of(config, self.gpu, actor.sizes) if self.vllm else None
        return Memory(
            phases,
            budgets,
            largest_tokens(lambda tokens: sum(actor.update_parts(tokens).values()), room),
            engine,
            short=[engine.obstacle] if engine and engine.obstacle else [],
            host=self.host(),
            saved=self.saved(),
        )

    @property
    def side(self) -> Side:
        return "trainers" if self.apart else "both"

    def rollout(self) -> Phase:
        away = self.held(self.parked)
        if not self.vllm:
            actor = self.roles["actor"]
            casts = {"casts": actor.compute * actor.sizes.parameters * (actor.stream != actor.compute)}
            away |= casts if self.devices == 1 else {"gathered": actor.gathered_whole}
            room = self.usable - sum(self.held(self.parked).values())
            needed = transformers_batch_bytes(self.config, actor.sizes, self.lengths, room)
            return Phase("gen", away | {"keys and values": needed}, self.usable, "both")
        engine = engine_of(self.config, self.gpu, self.roles["actor"].sizes)
        share = {"engine weights": engine.weights, "engine work": engine.work, "engine keys and values": engine.keys}
        share = {name: max(size, 0.0) for name, size in share.items()} | {"engine graphs": BESIDE_SHARE}
        if self.apart:
            return Phase("gen", share, self.usable, "engines")
        return Phase("gen", away | share, self.usable, "both")

    def hand_over(self) -> list[Phase]:
        """The moment at which vLLM is given new weights, where the trainer's wait on the host: all of them are fetched
        for it, or a bucket at a time; vLLM takes memory for keys after that."""
        actor = self.roles["actor"]
        if not self.vllm or self.apart or not (actor.on_host or "actor weights" in self.parked):
            return []
        engine = engine_of(self.config, self.gpu, actor.sizes)
        parts = self.held(self.parked - {"actor weights"}) | self.asleep() | {"engine weights": engine.weights}
        if actor.sharded or actor.size != DTYPES[self.config.worker.rollout.dtype].itemsize:
            parts["gathered" if actor.sharded else "casts"] = float(BUCKETS)
        return [Phase("hand over", parts, self.usable, "both")]

    def without_gradient(self, name: str, resting: Parts, trained: Trained, tokens: int, held_in: int = 0) -> Phase:
        parts, largest = trained.forward_parts(tokens, held_in)
        return Phase(name, resting | parts, self.usable, self.side, largest)

    def update(self, name: str, resting: Parts, trained: Trained, tokens: int) -> Phase:
        largest = trained.packed(tokens, update=True).first
        return Phase(name, resting | trained.update_parts(tokens), self.usable, self.side, largest)

    def saved(self) -> float:
        """Bytes of a checkpoint that this GPU writes."""
        model_only = self.config.trainer.save_model_only
        return sum(
            size
            for name, size in self.held().items()
            if name.endswith("weights") or (name.endswith("optimizer") and not model_only)
        )

    def host(self) -> Parts:
        found = {"offloaded": sum(size for name, size in self.held().items() if name in self.parked)}
        found["weights and states (fsdp.enable_cpu_offload)"] = sum(t.on_host for t in self.roles.values())
        if self.config.trainer.async_save:
            found["copy for a checkpoint"] = self.saved()
        return {name: size for name, size in found.items() if size}
