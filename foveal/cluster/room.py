"""Whether trainer and engine fit on one device, before either is there."""

from __future__ import annotations

import math

import torch

from foveal.config import Config
from foveal.config.schema_model import FsdpConfig, ModelConfig, TrainedConfig
from foveal.errors import ConfigError
from foveal.models.loading import DTYPES, empty_model
from foveal.models.lora import is_factor
from foveal.models.lora_setup import empty_adapted

KEPT_FREE = 0.03
"""Part of the device that contexts, kernels and fragments take."""
BESIDE_SHARE = 1.5 * 2**30
"""Bytes of vLLM's graphs, kernels and buffers. They come on top of `worker.rollout.gpu_memory_utilization`, and stay
while it sleeps; 1.2 to 1.8 GiB were measured on an H200 (benchmarks/results)."""
MOMENTS = 2
PLAINLY = 0.2
"""Part of vLLM's share of a device that whole weights may take at no loss: by arithmetic, what devices send each other
in every layer then costs at least as much as that each reads all weights, and keys lose little room."""


def check_room(config: Config, total: int, *, train: bool, devices: int = 1) -> None:
    """Refuses a run whose trainer leaves less memory than `worker.rollout.gpu_memory_utilization` promises to vLLM.

    While answers are sampled the trainer keeps weights and optimizer states on the device. The states come with the
    first update, so that without this check the second step would fail.

    Args:
        total: bytes of the device.
        train: whether there will be an optimizer and a reference policy.
        devices: that train together, over which weights and states are spread.

    Raises:
        ConfigError: with the numbers, and the largest value that fits.
    """
    held = held_bytes(config, train=train, devices=devices)
    key = "worker.rollout.gpu_memory_utilization"
    given, fits = config.value(key), 1 - KEPT_FREE - (held + BESIDE_SHARE) / total
    if given <= fits:
        return
    gib = 2**30
    largest = math.floor(100 * fits) / 100
    lower = f"set it to {largest:g} or less, or " if largest >= 0.05 else ""
    offload = [f"worker.actor.offload.{name}=true" for name in ("offload_params", "offload_optimizer")]
    missing = [entry for entry in offload if not config.value(entry.removesuffix("=true"))]
    cure = lower + (
        f"move what waits to the host ({' '.join(missing)})" if missing else "train in bf16 (optim.strategy=adamw_bf16)"
    )
    raise ConfigError(
        f"{key}: {given:g} given, {given * total / gib:.0f} of the device's {total / gib:.0f} GiB, but weights and "
        f"optimizer states take {held / gib:.0f} GiB of it, and vLLM's graphs {BESIDE_SHARE / gib:g} GiB; {cure}."
    )


def needless_spread(config: Config, total: int) -> str | None:
    """A line where one vLLM engine is spread over several devices though its weights plainly fit on each.

    Args:
        total: bytes of the device.
    """
    rollout, key = config.worker.rollout, "worker.rollout.tensor_parallel_size"
    size = min(rollout.tensor_parallel_size, config.engine_devices)
    if size == 1:
        return None
    weights = count_parameters(config.worker.actor.model.model_path or "") * DTYPES[rollout.dtype].itemsize
    share = rollout.gpu_memory_utilization * total
    if weights > PLAINLY * share:
        return None
    return (
        f"{key}={size}: the model's weights take {weights / share:.0%} of the {share / 2**30:.0f} GiB that vLLM may "
        f"have of a device; {key}=1 is usually faster, as no layer then waits for another device"
    )


def held_bytes(config: Config, *, train: bool, devices: int = 1) -> int:
    """Bytes of weights, and of optimizer states where `train` is set, that stay on each device in a rollout."""
    worker = config.worker
    parameters = count_parameters(worker.actor.model.model_path or "")
    if not train:
        return parameters * DTYPES[worker.actor.weights_dtype("cuda")].itemsize // shards(worker.actor.fsdp, devices)
    held = _held(worker.actor, parameters, worker.actor.model) // shards(worker.actor.fsdp, devices)
    has_reference = config.algorithm.uses_reference and not worker.actor.model.lora.rank  # whose own is the same model
    if has_reference and not worker.ref.offload.offload_params:
        held += parameters * DTYPES[worker.ref.fsdp.torch_dtype or "bf16"].itemsize // shards(worker.ref.fsdp, devices)
    if config.algorithm.uses_critic:
        own = worker.critic.model.model_path
        source = worker.critic.model if own else worker.actor.model
        count = count_parameters(own) if own else parameters
        held += _held(worker.critic, count, source) // shards(worker.critic.fsdp, devices)
    return held


def shards(fsdp: FsdpConfig, devices: int) -> int:
    """Over how many of the devices one copy of the weights is spread."""
    return devices if fsdp.fsdp_size == -1 else min(fsdp.fsdp_size, devices)


def count_parameters(model_path: str) -> int:
    """Weights of a model, from its configuration alone."""
    model = empty_model(model_path, dtype=torch.float32, device=torch.device("cpu"))
    return sum(parameter.numel() for parameter in model.parameters())


def _held(role: TrainedConfig, parameters: int, source: ModelConfig) -> int:
    """Bytes of a trained model of so many weights, read from `source`, and of its optimizer's states."""
    trained, adapters = parameters, 0
    if role.model.lora.rank:  # without adapters there are no states
        model = empty_adapted(role.model, source.model_path or "")
        trained = adapters = sum(p.numel() for name, p in model.named_parameters() if is_factor(name))
    held = 0 if role.offload.offload_params else weight_bytes(role, parameters, adapters)
    return held + (0 if role.offload.offload_optimizer else moment_bytes(role, trained))


def weight_bytes(role: TrainedConfig, parameters: int, adapters: int = 0) -> int:
    """Bytes of the weights of a trained model; of its adapters, which are not among them, 4 each."""
    return parameters * DTYPES[role.weights_dtype("cuda")].itemsize + adapters * gradient_size(role)


def moment_bytes(role: TrainedConfig, trained: int) -> int:
    """Bytes of the optimizer's states of so many trained weights."""
    return MOMENTS * trained * (1 if role.optim.strategy == "adamw_8bit" else gradient_size(role))


def gradient_size(role: TrainedConfig) -> int:
    """Bytes of a number that is trained, and of its gradient."""
    return 4 if role.model.lora.rank else DTYPES[role.weights_dtype("cuda")].itemsize
