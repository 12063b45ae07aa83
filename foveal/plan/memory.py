"""Memory of a GPU in each phase of a step, part by part, from sizes alone.

The peaks are those that `torch.cuda.max_memory_allocated` tells, and beside them what vLLM takes, which torch's
statistics leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from foveal.cluster.room import KEPT_FREE, gradient_size, moment_bytes, shards, weight_bytes
from foveal.config import Config
from foveal.config.schema_model import TrainedConfig
from foveal.models.feature_store import DEVICE_BYTES
from foveal.models.head import CHUNK_ELEMENTS
from foveal.models.loading import DTYPES
from foveal.models.memory import (
    Pass,
    backward_bytes,
    head_bytes,
    layer_forward_bytes,
    waiting_bytes,
)
from foveal.plan.engine import ASLEEP, Engine, engine_of, transformers_batch_bytes, uses_vllm
from foveal.plan.gpus import Gpu
from foveal.plan.rows import Lengths, Packed, pack
from foveal.plan.sizes import ModelSizes, measure
from foveal.train.budget import MOST, compiles_head, how_computed, largest_passes
from foveal.train.credit import needs_old_logprobs
from foveal.train.sharding import GRADIENT_SHARE

Role: TypeAlias = Literal["actor", "critic"]
Parts: TypeAlias = dict[str, float]


@dataclass(frozen=True)
class Phase:
    """A phase of a step.

    Attributes:
        name: as it is timed under (`timing_s/…`).
        parts: bytes of a GPU at the phase's peak.
        limit: bytes that it may take.
        tokens: of its largest pass; 0 where there is none.
    """

    name: str
    parts: Parts
    limit: float
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
        self.devices = config.trainer.devices
        self.vllm = uses_vllm(config)
        self.usable = gpu.bytes * (1 - KEPT_FREE)
        self.roles: dict[Role, _Trained] = {"actor": _Trained(self, "actor", config.worker.actor, actor_sizes(config))}
        if config.algorithm.uses_critic:
            self.roles["critic"] = _Trained(self, "critic", config.worker.critic, critic_sizes(config))
        self.reference, self.reference_size = 0.0, 0
        if config.algorithm.uses_reference and not config.worker.actor.model.lora.rank:
            fsdp = config.worker.ref.fsdp
            self.reference_size = DTYPES[fsdp.torch_dtype or "bf16"].itemsize
            parameters = self.roles["actor"].sizes.parameters
            self.reference = parameters * self.reference_size / shards(fsdp, self.devices)

    def held(self, *, away: bool = False) -> Parts:
        """What rests on the device; `away`: while answers are sampled, but for what waits on the host."""
        worker, parts = self.config.worker, {}
        for role, trained in self.roles.items():
            # The transformers engine samples with these very weights.
            parked = away and trained.keys.offload.offload_params and (role != "actor" or self.vllm)
            parts[f"{role} weights"] = 0.0 if parked else trained.weights
            parts[f"{role} optimizer"] = 0.0 if away and trained.keys.offload.offload_optimizer else trained.moments
        parts["reference"] = 0.0 if away and worker.ref.offload.offload_params else self.reference
        return {name: size for name, size in parts.items() if size}

    def asleep(self) -> Parts:
        return {"engine asleep": ASLEEP} if self.vllm else {}

    def plan(self) -> Memory:
        config = self.config
        budgets = {role: trained.budgets() for role, trained in self.roles.items()}
        actor = self.roles["actor"]
        phases = [self.rollout()]
        if needs_old_logprobs(config):
            phases.append(self.without_gradient("old", actor, budgets["actor"][1]))
        if config.algorithm.needs_ref_logprobs:
            phases.append(self.without_gradient("ref", actor, budgets["actor"][1], self.reference_size))
        if "critic" in self.roles:
            phases.append(self.without_gradient("values", self.roles["critic"], budgets["critic"][1]))
            phases.append(self.update("update_critic", self.roles["critic"], budgets["critic"][0]))
        phases.append(self.update("update_actor", actor, budgets["actor"][0]))
        phases.append(Phase("save_checkpoint", self.held() | self.asleep(), self.usable))
        room = self.usable - sum((self.held() | self.asleep()).values())
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

    def rollout(self) -> Phase:
        away = self.held(away=True)
        if not self.vllm:
            actor = self.roles["actor"]
            room = self.usable - sum(away.values())
            needed = transformers_batch_bytes(self.config, actor.sizes, self.lengths, room)
            casts = {"casts": actor.compute * actor.sizes.parameters * (actor.stream != actor.compute)}
            return Phase("gen", away | casts | {"keys and values": needed}, self.usable)
        engine = engine_of(self.config, self.gpu, self.roles["actor"].sizes)
        share = {"engine weights": engine.weights, "engine work": engine.work, "engine keys and values": engine.keys}
        sampling = away | {name: max(size, 0.0) for name, size in share.items()}
        # What waits on the host is fetched for the hand-over; vLLM takes memory for keys after that.
        handing = away | {"actor weights": self.roles["actor"].weights, "engine weights": engine.weights}
        return Phase("gen", max(sampling, handing, key=lambda parts: sum(parts.values())), self.usable)

    def without_gradient(self, name: str, trained: _Trained, tokens: int, held_in: int = 0) -> Phase:
        parts, largest = trained.forward_parts(tokens, held_in)
        return Phase(name, self.held() | self.asleep() | parts, self.usable, largest)

    def update(self, name: str, trained: _Trained, tokens: int) -> Phase:
        parts = self.held() | self.asleep() | trained.update_parts(tokens)
        return Phase(name, parts, self.usable, trained.packed(tokens, update=True).first)

    def saved(self) -> float:
        """Bytes of a checkpoint that this GPU writes."""
        model_only = self.config.trainer.save_model_only
        return sum(
            size
            for name, size in self.held().items()
            if name.endswith("weights") or (name.endswith("optimizer") and not model_only)
        )

    def host(self) -> Parts:
        worker, found = self.config.worker, {}
        parked = {
            "actor weights": worker.actor.offload.offload_params,
            "actor optimizer": worker.actor.offload.offload_optimizer,
            "critic weights": worker.critic.offload.offload_params,
            "critic optimizer": worker.critic.offload.offload_optimizer,
            "reference": worker.ref.offload.offload_params,
        }
        resting = self.held()
        found["offloaded"] = sum(size for name, size in resting.items() if parked[name])
        if self.config.trainer.async_save:
            found["copy for a checkpoint"] = self.saved()
        return {name: size for name, size in found.items() if size}


class _Trained:
    """A model that is trained, as one GPU holds it."""

    def __init__(self, planner: _Planner, role: Role, keys: TrainedConfig, sizes: ModelSizes) -> None:
        self.planner, self.role, self.keys, self.sizes = planner, role, keys, sizes
        config, devices = planner.config, planner.devices
        spread = shards(keys.fsdp, devices)
        self.sharded = devices > 1
        self.size = DTYPES[keys.weights_dtype("cuda")].itemsize
        mixed = DTYPES[keys.fsdp.mp_param_dtype].itemsize
        self.compute = mixed if self.sharded or self.size == 4 else self.size
        self.stream = self.compute if self.sharded else self.size
        self.reduce = DTYPES[keys.fsdp.mp_reduce_dtype].itemsize
        whole = sizes.whole if self.sharded else 0
        self.weights = weight_bytes(keys, sizes.parameters - whole, sizes.adapters) / spread + whole * self.compute
        self.moments = moment_bytes(keys, sizes.trained) / spread
        self.gradients = sizes.trained * gradient_size(keys) / spread
        if self.sharded and self._sums_at_end(planner.gpu):
            self.gradients = float(sizes.trained * self.reduce)
        if keys.fsdp.enable_cpu_offload and self.sharded:
            self.weights = self.moments = 0.0
        self.layer = sizes.layer
        self.compiled = config.worker.actor.use_torch_compile

    def _sums_at_end(self, gpu: Gpu) -> bool:
        chosen = self.keys.fsdp.gradient_sync
        fits = self.sizes.trained * self.reduce <= GRADIENT_SHARE * gpu.bytes
        return fits if chosen == "auto" else chosen == "last"

    def budgets(self) -> tuple[int, int]:
        """Tokens of passes with gradient and without; of `auto` with gradient those that it settles at."""
        config = self.planner.config
        wanted, longest = config.worker.actor.token_budget, config.data.max_sequence_length
        if isinstance(wanted, int):
            return wanted, wanted
        if wanted == "easyr1":
            micro = self.keys.micro_batch_size_per_device_for_update
            return micro * longest, self.keys.micro_batch_size_per_device_for_experience * longest
        resting = sum((self.planner.held() | self.planner.asleep()).values())
        free = self.planner.usable - resting - max(t.gradients for t in self.planner.roles.values())
        if self.sizes.sees and not self.sizes.tower_trained:
            free -= DEVICE_BYTES
        how = how_computed(config, self.keys, self.sizes.config, stream=self.stream, compute=self.compute)
        _, forward, _ = largest_passes(
            config,
            self.sizes.config,
            how,
            free,
            parameters=self.sizes.parameters,
            tower_trained=self.sizes.tower_trained,
        )
        update = largest_tokens(self._taken, free, margin=0.9 / 1.1)
        return max(update, 256), forward

    def _taken(self, tokens: int) -> float:
        return sum(self.update_parts(tokens).values()) - self.gradients

    def packed(self, tokens: int, *, update: bool) -> Packed:
        """The groups of an optimizer step on this GPU, or of the whole step, in passes of up to `tokens`."""
        config = self.planner.config
        prompts = min(self.keys.global_batch_size, config.data.rollout_batch_size)
        prompts = prompts if update else config.data.rollout_batch_size
        workers = max(self.planner.devices // self.keys.ulysses_size, 1)
        return pack(config, self.planner.lengths, -(-prompts // workers), tokens)

    def how(self, packed: Packed) -> Pass:
        config = self.planner.config
        how = how_computed(config, self.keys, self.sizes.config, stream=self.stream, compute=self.compute)
        return replace(how, visual=packed.visual, keys_per_token=packed.keys_per_token, compiled=self.compiled)

    def forward_parts(self, tokens: int, held_in: int = 0) -> tuple[Parts, int]:
        """What a pass without gradient takes beside what rests, and the tokens of the largest.

        Args:
            held_in: bytes of a weight, where another model of this size is read.
        """
        packed = self.packed(tokens, update=False)
        largest = max(packed.first, packed.later) // self.keys.ulysses_size
        how, casts = self.how(packed), self.casts(forward=True)
        if held_in == self.compute:
            how, casts = replace(how, stream=held_in), {}
        layers = largest * layer_forward_bytes(self.sizes.config, how)
        states = largest * self.sizes.text.hidden_size * how.stream
        logits = self._logits(packed, largest) / 2
        common = casts | self._gathered()
        if layers > states + logits:
            return common | {"activations": layers}, largest
        return common | {"activations": states, "logits": logits}, largest

    def update_parts(self, tokens: int) -> Parts:
        """What an update takes beside what rests, at its peak."""
        packed = self.packed(tokens, update=True)
        return max(self._moments_of_update(packed), key=lambda parts: sum(parts.values()))

    def _moments_of_update(self, packed: Packed) -> Iterator[Parts]:
        """What is there when most may be: in the first pass, which finds no gradients; in a later one; at the end."""
        sizes, how = self.sizes, self.how(packed)
        size = gradient_size(self.keys)
        head_trained = self.role == "actor" and not sizes.adapters and "language" not in self.keys.model.frozen_parts
        of_head = sizes.embedding * (size + self.compute + self.compute * (self.stream != self.compute))
        waiting = waiting_bytes(sizes.config, how, tower_trained=sizes.tower_trained)
        backward = backward_bytes(sizes.config, how, tower_trained=sizes.tower_trained)
        trained_share = sizes.trained / max(sizes.parameters, 1)
        for tokens, gradients in ((packed.first, 0.0), (packed.later, self.gradients)):
            tokens //= self.keys.ulysses_size
            if not tokens:
                continue
            common = {"gradients": gradients} | self._gathered()
            wait = tokens * waiting
            logits = self._logits(packed, tokens)
            yield common | self.casts(forward=True) | {"activations": wait, "logits": logits / 2}
            at_head = logits + of_head * head_trained
            yield common | self.casts(forward=False) | {"activations": wait, "logits": at_head}
            of_layer = self.layer * size * trained_share
            yield common | self.casts(forward=False) | {"activations": wait + tokens * backward + of_layer}
        embeddings = sizes.embedding * size * (2 if sizes.tied else 1) * (not sizes.adapters)
        yield {"gradients": self.gradients, "activations": float(embeddings)} | self._gathered()

    def _logits(self, packed: Packed, tokens: int) -> float:
        if self.role == "critic":
            return 0.0
        config = self.planner.config
        compiled = compiles_head(config)
        rows = int(packed.scored * tokens) * self.sizes.text.vocab_size
        elements = min(CHUNK_ELEMENTS["compiled" if compiled else "cuda"], rows)
        both = 1.5 if config.algorithm.exact_kl_in_loss else 1.0  # the reference's as well
        return both * head_bytes(elements, compiled=compiled)

    def casts(self, *, forward: bool) -> Parts:
        """Copies of float32 weights in the type of matrix products: eager layers' stay until a forward pass ends, and
        what a layer that isn't computed again was given stays until its backward pass."""
        if self.stream == self.compute:
            return {}
        again = {False: 0.0, "selective": 0.5, True: 1.0}[self.keys.model.enable_gradient_checkpointing]
        kept = (1 - again) * self.sizes.parameters
        if forward:
            kept = max(kept, 0.0 if self.compiled else self.sizes.parameters)
        return {"casts": self.compute * max(kept, self.layer + self.sizes.embedding)}

    def _gathered(self) -> Parts:
        """Weights of other GPUs while a layer runs, the next one's with them, and what stays gathered."""
        if not self.sharded:
            return {}
        if not self.keys.fsdp.enable_full_shard:
            return {"gathered": float(self.compute * self.sizes.parameters)}
        summed = self.reduce if self.sizes.trained else 0
        of_layers = self.layer * (2 * self.compute + summed)
        return {"gathered": float(of_layers + self.sizes.embedding * (self.compute + summed))}


def largest_tokens(taken: Callable[[int], float], free: float, margin: float = 1.0) -> int:
    """The largest pass, in whole 256s, that takes no more than `margin` of the free bytes; 0 where none does."""
    low, high = 0, MOST // 256
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if taken(256 * middle) <= margin * free else (low, middle - 1)
    return 256 * low
