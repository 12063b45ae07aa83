"""Whether trainer and engine fit on one device, before either is there."""

from __future__ import annotations

import math

import torch

from foveal.config import Config
from foveal.config.schema_model import FsdpConfig
from foveal.errors import ConfigError
from foveal.models.families import family_of, read_config
from foveal.models.loading import DTYPES

KEPT_FREE = 0.03
"""Part of the device that contexts, kernels and fragments take."""
MOMENTS = 2


def check_room(config: Config, total: int, *, train: bool) -> None:
    """Refuses a run whose trainer leaves less memory than `worker.rollout.gpu_memory_utilization` promises to vLLM.

    While answers are sampled the trainer keeps weights and optimizer states on the device. The states come with the
    first update, so that without this check the second step would fail.

    Args:
        total: bytes of the device.
        train: whether there will be an optimizer and a reference policy.

    Raises:
        ConfigError: with the numbers, and the largest value that fits.
    """
    held = held_bytes(config, train=train)
    key = "worker.rollout.gpu_memory_utilization"
    given, fits = config.value(key), 1 - KEPT_FREE - held / total
    if given <= fits:
        return
    gib = 2**30
    largest = math.floor(100 * fits) / 100
    cure = (
        f"set it to {largest:g} or less"
        if largest >= 0.05
        else "take a larger device or a smaller model, or train in bf16 (worker.actor.fsdp.torch_dtype=bf16)"
    )
    raise ConfigError(
        f"{key}: {given:g} given, {given * total / gib:.0f} of the device's {total / gib:.0f} GiB, but weights and "
        f"optimizer states take {held / gib:.0f} GiB of it; {cure}."
    )


def held_bytes(config: Config, *, train: bool) -> int:
    """Bytes of weights, and of optimizer states where `train` is set, that stay on the device."""
    worker = config.worker
    parameters = count_parameters(config.worker.actor.model.model_path or "")
    held = parameters * _size(worker.actor.fsdp)
    if not train:
        return held
    held *= 1 + MOMENTS
    if config.algorithm.uses_reference:
        held += parameters * DTYPES[worker.ref.fsdp.torch_dtype or "bf16"].itemsize
    if config.algorithm.uses_critic:
        critic = count_parameters(worker.critic.model.model_path or worker.actor.model.model_path or "")
        held += critic * (1 + MOMENTS) * _size(worker.critic.fsdp)
    return held


def count_parameters(model_path: str) -> int:
    """Weights of a model, from its configuration alone."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    family = family_of(read_config(model_path), model_path)
    auto = AutoModelForImageTextToText if family.vision else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.from_pretrained(model_path))
    return sum(parameter.numel() for parameter in model.parameters())


def _size(fsdp: FsdpConfig) -> int:
    return DTYPES[fsdp.torch_dtype or "fp32"].itemsize
