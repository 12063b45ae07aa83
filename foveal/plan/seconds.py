"""How long a step's phases may take, from counted operations and bytes and what was measured on one H200."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from foveal.cluster.room import shards
from foveal.config import Config
from foveal.config.schema_model import TrainedConfig
from foveal.models.flops import Work
from foveal.models.loading import DTYPES
from foveal.models.memory import decoder_block
from foveal.plan.engine import Engine
from foveal.plan.gpus import Gpu
from foveal.plan.memory import Memory, actor_sizes, critic_sizes
from foveal.plan.rows import Lengths, pack, work_of
from foveal.plan.sizes import ModelSizes
from foveal.plan.trained import Role, gathers_once, sums_at_end
from foveal.train.credit import needs_old_logprobs

# Parts of the peak rate of matrix products that a 7B's passes reach, from benchmarks/results/train_engine_*.json;
# selective is in between.
_UPDATE = {False: 0.56, "selective": 0.48, True: 0.40}
_FORWARD = 0.59
_EAGER = 0.8
_EXPERTS = {"update": 0.86, "forward": 0.66}
_ADAPTERS = {"update": 0.75, "forward": 0.92}  # many small products, that move more than they compute
# Of a layer's time products take a part that grows with its width, since the rest (norms, activation functions,
# rotations) grows with the width and they with its square: width / (width + _HALF_WIDTH), so that a 3B of 2,048
# (many_gpus_3B.json) reaches 0.85 of a 7B's rates. Nothing wider than that was measured, and is taken to be no faster.
_WIDTH, _HALF_WIDTH = 3584, 1160
_PASS_SECONDS = 0.02  # until the host is ahead of the GPU again; old at 9,400 and at 65,536 tokens a pass
# The host's, in FSDP2's hooks, for each module that is gathered on its own: what a pass over two GPUs takes longer is
# the same for 3B (many_gpus_3B.json) and 7B (train_2_gpus_7B.json).
GATHER_SECONDS, SUM_SECONDS = 0.7e-3, 1.0e-3
# From benchmarks/results/vllm_rollout_*.json.
_PREFILL = 0.45
_DECODE = 0.8
_SAMPLE_SECONDS = 4.7e-6  # for each answer in a decode step
_DECODE_SECONDS = 1e-3  # the host's in a decode step; many_gpus_3B.json too
_EAGER_LAYER_SECONDS = 1.35e-3  # of a decode step of the trainer's own module, which the host decides
_HAND_OVER_SECONDS, _HAND_OVER_RATE = 0.3, 25e9
# Not measured here.
_HOST_RATE = 25e9
_FABRIC = 40e9
_DISK_RATE = 1e9
_OVERLAP = 0.8
_OPTIMIZER_BYTES, _OPTIMIZER_RATE, _HOST_OPTIMIZER_RATE = 14, 0.25, 20e9
_ALL_REDUCE_SECONDS = 15e-6  # of a small tensor among the GPUs of an engine; there are two in a layer


def of_width(width: int) -> float:
    """Part of a 7B's rates that a model of this hidden size reaches."""
    return min(width, _WIDTH) / (min(width, _WIDTH) + _HALF_WIDTH) * (_WIDTH + _HALF_WIDTH) / _WIDTH


ASSUMPTIONS = [
    f"passes of a 7B reach {_UPDATE[True]:.0%} (checkpointed) to {_UPDATE[False]:.0%} (not) of the GPU's bf16 peak "
    f"with gradient, {_FORWARD:.0%} without, as on an H200; narrower models less, a 3B {of_width(2048):.0%} of that, "
    f"eager ones {_EAGER:.0%}, mixtures of experts {_EXPERTS['update']:.0%} and {_EXPERTS['forward']:.0%}, adapters "
    f"{_ADAPTERS['update']:.0%} and {_ADAPTERS['forward']:.0%}; a pass takes {1e3 * _PASS_SECONDS:.0f} ms besides",
    f"with several GPUs each layer and vision block takes the host {1e3 * GATHER_SECONDS:.1f} ms whenever weights are "
    f"gathered and {1e3 * SUM_SECONDS:.1f} ms when gradients are summed, which hides behind nothing",
    f"decoding reaches {_DECODE:.0%} of memory and matrix rates and takes {1e3 * _DECODE_SECONDS:.0f} ms a token and "
    f"{1e6 * _SAMPLE_SECONDS:.1f} µs an answer and token besides; it ends with the longest answer",
    f"an engine's GPUs wait {1e6 * _ALL_REDUCE_SECONDS:.0f} µs for each other twice a layer and token",
    f"the host is reached with {_HOST_RATE / 1e9:.0f} GB/s, other machines with {_FABRIC / 1e9:.0f} GB/s a GPU, the "
    f"disk with {_DISK_RATE / 1e9:.0f} GB/s; {_OVERLAP:.0%} of what GPUs send each other hides behind computation",
    "rewards and data keep up with sampling; validation and the first step's compilation are not counted",
]


@dataclass(frozen=True)
class Seconds:
    """Expected seconds.

    Attributes:
        phases: of a step.
        apart: engines have GPUs of their own, and ahead: they sample the next step's answers while this step's train.
        save: of one checkpoint.
        start: until the first step.
        steps: of the run; None where that depends on rows that nobody counted.
        saves: checkpoints of the run.
    """

    phases: dict[str, float]
    apart: bool
    ahead: bool
    save: float
    start: float
    steps: int | None
    saves: int
    assumptions: list[str] = field(default_factory=lambda: list(ASSUMPTIONS))

    @property
    def training(self) -> float:
        """Of a step, without sampling and new weights."""
        return sum(value for name, value in self.phases.items() if name not in ("gen", "hand over"))

    @property
    def step(self) -> float:
        if not self.ahead:
            return sum(self.phases.values())
        return max(self.phases["gen"], self.training) + self.phases["hand over"]

    @property
    def idle(self) -> dict[str, float]:
        """Seconds of a step in which either side's GPUs wait, where each has its own (`perf/idle_s/…`)."""
        if not self.apart:
            return {}
        busy = {"trainer": self.training, "engine": self.phases["gen"]}
        return {side: self.step - self.phases["hand over"] - seconds for side, seconds in busy.items()}

    @property
    def run(self) -> float | None:
        return None if self.steps is None else self.start + self.steps * self.step + self.saves * self.save


def plan_seconds(config: Config, gpu: Gpu, lengths: Lengths, memory: Memory) -> Seconds:
    """What a step and the run may take.

    Args:
        memory: of the same configuration on the same kind of GPU.
    """
    sizes = actor_sizes(config)
    trainer, algorithm = config.trainer, config.algorithm
    phases: dict[str, float] = {}
    if memory.engine:
        phases["gen"] = _vllm(config, gpu, lengths, sizes, memory.engine)
        rate = min(_HAND_OVER_RATE, gpu.link) if trainer.devices > 1 else _HAND_OVER_RATE
        phases["hand over"] = _HAND_OVER_SECONDS + 2 * sizes.parameters / rate
        fsdp, weights = config.worker.actor.fsdp, DTYPES[config.worker.actor.weights_dtype("cuda")].itemsize
        if fsdp.enable_cpu_offload and config.training_devices > 1:  # each GPU's share comes from the host
            phases["hand over"] += weights * sizes.parameters / shards(fsdp, config.training_devices) / _HOST_RATE
    else:
        phases["gen"] = _own_module(config, gpu, lengths, sizes)
    offloaded = memory.host.get("offloaded", 0.0)
    if offloaded:
        phases["offload"] = 2 * offloaded / _HOST_RATE
    forward = _Pass(config, gpu, lengths, memory, "actor", sizes, config.worker.actor)
    if needs_old_logprobs(config):
        phases["old"] = forward.without_gradient()
    if algorithm.needs_ref_logprobs:
        phases["ref"] = forward.without_gradient()
    if algorithm.uses_critic:
        critic = _Pass(config, gpu, lengths, memory, "critic", critic_sizes(config), config.worker.critic)
        phases["values"] = critic.without_gradient()
        phases["update_critic"] = critic.update()
    phases["update_actor"] = forward.update()
    steps = trainer.max_steps
    if steps is None and lengths.rows is not None:
        steps = trainer.total_epochs * max(lengths.rows // config.data.rollout_batch_size, 1)
    saves = 1 if steps is None or trainer.save_freq <= 0 else math.ceil(steps / trainer.save_freq)
    return Seconds(
        phases,
        apart=config.cluster.rollout_devices > 0,
        ahead=trainer.async_rollout and config.cluster.rollout_devices > 0,
        save=memory.saved / (_HOST_RATE if trainer.async_save else _DISK_RATE),
        start=150.0 if memory.engine else 30.0,
        steps=steps,
        saves=saves,
    )


def _vllm(config: Config, gpu: Gpu, lengths: Lengths, sizes: ModelSizes, engine: Engine) -> float:
    engines = max(config.engine_devices // engine.tensor_parallel, 1)
    groups = math.ceil(config.data.rollout_batch_size / engines)
    n, mean, longest = config.worker.rollout.n, lengths.mean_answer, lengths.answer
    of_prompt = Work(lengths.prompt, lengths.prompt**2 // 2, 0, lengths.grids())
    peak = gpu.peak * engine.tensor_parallel
    prefill = groups * sizes.flops.forward(of_prompt) / (_PREFILL * peak)
    # The answers to a prompt share its keys.
    room = engine.cache_tokens / (lengths.prompt / n + mean)
    at_once = max(min(groups * n, engine.sequences, room), 1.0)
    steps = max(float(longest if mean < longest else mean), groups * n * mean / at_once)
    opened = groups * n * mean / steps
    context = lengths.prompt + mean // 2
    read = engine.weights * engine.tensor_parallel + opened * context * sizes.key_bytes
    moving = read / engine.tensor_parallel / gpu.bandwidth
    products = opened * sizes.flops.forward(Work(1, context, 1)) / peak
    waiting = 2 * sizes.text.num_hidden_layers * _ALL_REDUCE_SECONDS * (engine.tensor_parallel > 1)
    return prefill + steps * ((moving + products) / _DECODE + opened * _SAMPLE_SECONDS + _DECODE_SECONDS + waiting)


def _own_module(config: Config, gpu: Gpu, lengths: Lengths, sizes: ModelSizes) -> float:
    groups = math.ceil(config.data.rollout_batch_size / config.trainer.devices)
    of_prompt = Work(lengths.prompt, lengths.prompt**2 // 2, 0, lengths.grids())
    prefill = groups * sizes.flops.forward(of_prompt) / (_PREFILL * gpu.peak)
    return prefill + lengths.answer * sizes.text.num_hidden_layers * _EAGER_LAYER_SECONDS


class _Pass:
    """The passes of one model over a step's groups, as one GPU does its share."""

    def __init__(
        self,
        config: Config,
        gpu: Gpu,
        lengths: Lengths,
        memory: Memory,
        role: Role,
        sizes: ModelSizes,
        keys: TrainedConfig,
    ) -> None:
        self.config, self.gpu, self.lengths, self.sizes, self.keys = config, gpu, lengths, sizes, keys
        self.budgets = memory.budgets[role]
        self.devices, self.sharing = config.training_devices, keys.ulysses_size
        self.shards = shards(keys.fsdp, self.devices)
        self.groups = config.data.rollout_batch_size / self.devices
        self.teams = max(self.devices // self.sharing, 1)
        work = work_of(config, lengths, self.groups)
        # Devices that share a sequence run the vision tower each over all of its pictures.
        self.work = replace(work, grids=work.grids * self.sharing)
        self.rate = gpu.peak * of_width(sizes.text.hidden_size)
        self.rate *= 1.0 if config.worker.actor.use_torch_compile else _EAGER
        self.gathers_once = gathers_once(keys, sizes, gpu)
        self.experts = bool(getattr(sizes.text, "num_experts", 0))

    def _rate(self, phase: str, part: float) -> float:
        """Operations per second, where a 7B's passes reach this part of the peak."""
        part *= _EXPERTS[phase] if self.experts else 1
        part *= _ADAPTERS[phase] if self.keys.model.lora.rank else 1
        return self.rate * part

    def without_gradient(self) -> float:
        rate = self._rate("forward", _FORWARD)
        groups = math.ceil(self.config.data.rollout_batch_size / self.teams)
        passes = pack(self.config, self.lengths, groups, max(self.budgets[1], 1)).passes
        computing = self.sizes.flops.forward(self.work) / rate + passes * _PASS_SECONDS
        return self._with_others(computing, 1 if self.gathers_once else passes)

    def update(self) -> float:
        actor, prompts = self.keys, self.config.data.rollout_batch_size
        checkpointing = actor.model.enable_gradient_checkpointing
        rate = self._rate("update", _UPDATE[checkpointing])
        steps = math.ceil(prompts / actor.global_batch_size)
        groups = math.ceil(min(actor.global_batch_size, prompts) / self.teams)
        passes = steps * pack(self.config, self.lengths, groups, max(self.budgets[0], 1)).passes
        sums = steps if sums_at_end(actor, self.sizes, self.gpu) else passes
        computing = self.sizes.flops.training(self.work) / rate + passes * _PASS_SECONDS
        once = self._with_others(computing, steps if self.gathers_once else 2 * passes, sums)
        if actor.model.activation_offload:
            once *= 1.3
        on_host = actor.fsdp.enable_cpu_offload and self.devices > 1
        rate = _HOST_OPTIMIZER_RATE if on_host else _OPTIMIZER_RATE * self.gpu.bandwidth
        stepping = _OPTIMIZER_BYTES * self.sizes.trained / self.shards / rate
        return actor.ppo_epochs * (once + steps * stepping)

    def _with_others(self, computing: float, gathers: int, sums: int = 0) -> float:
        """With what the GPUs send each other.

        Args:
            gathers: how often weights are gathered.
            sums: how often gradients are summed; 0 for passes without gradient.
        """
        if self.devices == 1:
            return computing
        fsdp, sizes, sharing = self.keys.fsdp, self.sizes, self.sharing
        whole = 2 * (sizes.parameters - sizes.whole)
        talking = (gathers * whole + sums * 4 * sizes.trained) * self._seconds_of_byte(self.shards)
        copies = self.devices // self.shards
        if copies > 1:  # what a device has of the sums, there and back
            talking += sums * 2 * 4 * sizes.trained / self.shards * self._seconds_of_byte(copies, self.shards)
        if sharing > 1:  # queries, keys and values, and what attention makes of them; in the backward pass too
            block = decoder_block(sizes.config)
            exchanged = 2 * self.work.tokens * block.count * (2 * block.queries + 2 * block.keys) * (3 if sums else 1)
            talking += exchanged * self._seconds_of_byte(sharing)
        if fsdp.enable_cpu_offload:
            talking += gathers * whole / self.shards / _HOST_RATE
        hooks = sizes.units * (gathers * GATHER_SECONDS + sums * SUM_SECONDS)
        return computing + hooks + max((1 - _OVERLAP) * talking, talking - computing)

    def _seconds_of_byte(self, group: int, stride: int = 1) -> float:
        """For each byte that every device of a group has in the end, of which each brings its part.

        Args:
            stride: between the group's devices; 1 where they are neighbours.
        """
        per_node = self.config.trainer.n_gpus_per_node
        local = min(group, max(per_node // stride, 1))
        nodes = math.ceil(group / local)
        return (local - 1) / local / self.gpu.link + (nodes - 1) / nodes / _FABRIC / local
