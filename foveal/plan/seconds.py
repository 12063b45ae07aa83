"""How long a step's phases may take, from counted operations and bytes and what was measured on one H200."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from foveal.config import Config
from foveal.config.schema_model import TrainedConfig
from foveal.models.flops import Work
from foveal.plan.engine import Engine
from foveal.plan.gpus import Gpu
from foveal.plan.memory import Memory, Role, actor_sizes, critic_sizes
from foveal.plan.rows import Lengths, pack, work_of
from foveal.plan.sizes import ModelSizes
from foveal.train.credit import needs_old_logprobs

# Parts of the peak rate of matrix products, from benchmarks/results/train_engine_*.json; selective is in between.
_UPDATE = {False: 0.53, "selective": 0.46, True: 0.40}
_FORWARD = 0.58
_EAGER = 0.8
_EXPERTS = {"update": 0.67, "forward": 0.53}
# From benchmarks/results/vllm_rollout_*.json.
_PREFILL = 0.45
_DECODE = 0.8
_SAMPLE_SECONDS = 5e-6  # for each answer in a decode step
_EAGER_LAYER_SECONDS = 1.35e-3  # of a decode step of the trainer's own module, which the host decides
_HAND_OVER_SECONDS, _HAND_OVER_RATE = 0.3, 25e9
# Not measured here.
_HOST_RATE = 25e9
_FABRIC = 40e9
_DISK_RATE = 1e9
_OVERLAP = 0.8
_OPTIMIZER_BYTES, _OPTIMIZER_RATE = 14, 0.25

ASSUMPTIONS = [
    f"passes reach {_UPDATE[True]:.0%} (checkpointed) to {_UPDATE[False]:.0%} (not) of the GPU's bf16 peak with "
    f"gradient, {_FORWARD:.0%} without, as on an H200; eager ones {_EAGER:.0%} of that, mixtures of experts half "
    "to two thirds",
    f"decoding reaches {_DECODE:.0%} of memory and matrix rates and takes {1e6 * _SAMPLE_SECONDS:.0f} µs an answer and "
    "token besides; it ends with the longest answer",
    f"the host is reached with {_HOST_RATE / 1e9:.0f} GB/s, other machines with {_FABRIC / 1e9:.0f} GB/s a GPU, the "
    f"disk with {_DISK_RATE / 1e9:.0f} GB/s; {_OVERLAP:.0%} of what GPUs send each other hides behind computation",
    "rewards and data keep up with sampling; validation and the first step's compilation are not counted",
]


@dataclass(frozen=True)
class Seconds:
    """Expected seconds.

    Attributes:
        phases: of a step.
        save: of one checkpoint.
        start: until the first step.
        steps: of the run; None where that depends on rows that nobody counted.
        saves: checkpoints of the run.
    """

    phases: dict[str, float]
    save: float
    start: float
    steps: int | None
    saves: int
    assumptions: list[str] = field(default_factory=lambda: list(ASSUMPTIONS))

    @property
    def step(self) -> float:
        return sum(self.phases.values())

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
        phases["hand over"] = _HAND_OVER_SECONDS + 2 * sizes.parameters / _HAND_OVER_RATE
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
        save=memory.saved / (_HOST_RATE if trainer.async_save else _DISK_RATE),
        start=150.0 if memory.engine else 30.0,
        steps=steps,
        saves=saves,
    )


def _vllm(config: Config, gpu: Gpu, lengths: Lengths, sizes: ModelSizes, engine: Engine) -> float:
    engines = max(config.trainer.devices // engine.tensor_parallel, 1)
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
    return prefill + steps * ((moving + products) / _DECODE + opened * _SAMPLE_SECONDS)


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
        self.devices = config.trainer.devices
        self.groups = config.data.rollout_batch_size / self.devices
        self.work = work_of(config, lengths, self.groups)
        self.rate = gpu.peak * (1.0 if config.worker.actor.use_torch_compile else _EAGER)
        self.experts = bool(getattr(sizes.text, "num_experts", 0))

    def without_gradient(self) -> float:
        rate = self.rate * _FORWARD * (_EXPERTS["forward"] if self.experts else 1)
        passes = pack(self.config, self.lengths, math.ceil(self.groups), max(self.budgets[1], 1)).passes
        return self._with_others(self.sizes.flops.forward(self.work) / rate, passes, sums=0)

    def update(self) -> float:
        actor, prompts = self.keys, self.config.data.rollout_batch_size
        checkpointing = actor.model.enable_gradient_checkpointing
        rate = self.rate * _UPDATE[checkpointing] * (_EXPERTS["update"] if self.experts else 1)
        steps = math.ceil(prompts / actor.global_batch_size)
        groups = math.ceil(min(actor.global_batch_size, prompts) / self.devices)
        passes = pack(self.config, self.lengths, groups, max(self.budgets[0], 1)).passes
        once = self._with_others(self.sizes.flops.training(self.work) / rate, steps * passes, sums=1)
        if actor.model.activation_offload:
            once *= 1.3
        stepping = _OPTIMIZER_BYTES * self.sizes.trained / self.devices / (_OPTIMIZER_RATE * self.gpu.bandwidth)
        return actor.ppo_epochs * (once + steps * stepping)

    def _with_others(self, computing: float, passes: int, *, sums: int) -> float:
        """Weights are gathered in the forward and again in the backward pass, gradients summed once a pass."""
        if self.devices == 1:
            return computing
        nodes = self.config.trainer.nnodes
        local = self.config.trainer.n_gpus_per_node
        gathers = 2 * self.sizes.parameters * (1 + sums) + 4 * self.sizes.trained * sums
        of_byte = (local - 1) / local / self.gpu.link + (nodes - 1) / nodes / _FABRIC / local
        talking = passes * gathers * of_byte
        return computing + max((1 - _OVERLAP) * talking, talking - computing)
