"""What a configuration says of adapters, before any weights are loaded."""

from __future__ import annotations

import torch
from torch import nn

from foveal.config import Config
from foveal.config.schema_model import LoraConfig, ModelConfig
from foveal.errors import ConfigError
from foveal.models.adapter_files import CONFIG, is_adapter, read_info
from foveal.models.families import is_absent
from foveal.models.loading import empty_model
from foveal.models.lora import add_lora, is_factor, lora_layers
from foveal.models.lora_targets import unused_exclusions
from foveal.models.parts import freeze_parts
from foveal.track.console import note


def adopt_adapters(config: Config) -> None:
    """Where a run starts from an adapter, takes over what the adapter says: its model, rank and alpha.

    Raises:
        ConfigError: keys that were given say otherwise, or the adapter's model is not there.
        ModelError: the adapter can't be read, or is of a kind that isn't supported.
    """
    start = config.trainer.load_checkpoint_path
    if start and is_adapter(start):
        raise ConfigError(
            f"trainer.load_checkpoint_path: {start} is an adapter and no checkpoint; to go on from it set "
            f"worker.actor.model.lora.adapter_path={start} instead."
        )
    for role, model in (("actor", config.worker.actor.model), ("critic", config.worker.critic.model)):
        section, lora = f"worker.{role}.model", model.lora
        if model.model_path and is_adapter(model.model_path):
            info = read_info(model.model_path, section)
            if lora.adapter_path not in (None, model.model_path) or not info.base:
                raise ConfigError(
                    f"{section}.model_path: {model.model_path} is an adapter"
                    + (f" and {section}.lora.adapter_path names another" if info.base else " that names no model")
                    + f"; give the folder of a model here, and the adapter as {section}.lora.adapter_path."
                )
            lora.adapter_path, model.model_path = model.model_path, info.base
            if is_absent(info.base):
                raise ConfigError(
                    f"{section}.model_path: {lora.adapter_path} is an adapter of the model {info.base}, which is not "
                    f"there; set {section}.model_path to where that model lies now, and {section}.lora.adapter_path to "
                    f"{lora.adapter_path}."
                )
        if not lora.adapter_path:
            continue
        info = read_info(lora.adapter_path, section)
        for name, value in (("rank", info.rank), ("alpha", info.alpha)):
            key, given = f"{section}.lora.{name}", getattr(lora, name)
            if key in config.given and given not in (getattr(LoraConfig(), name), value):
                raise ConfigError(
                    f"{key}: {given:g} given, but the adapter {info.place} has {name} {value:g} for good; set it to "
                    f"{value:g}, or leave it out."
                )
        lora.rank, lora.alpha = info.rank, info.alpha
        source = model.model_path or config.worker.actor.model.model_path
        other = f" (its {CONFIG} names {info.base})" if info.base not in ("", source) else ""
        note(
            f"{role}: going on from the adapter {info.place}, of {source}{other}: rank {info.rank}, alpha "
            f"{info.alpha:g}, and the layers that it has"
        )


def check_adapters(config: Config, *, critic: bool) -> None:
    """Finds the layers that get adapters and says how much of the model they are.

    Args:
        critic: whether there is one.

    Raises:
        ConfigError, ModelError: as `add_lora`.
    """
    for role in ("actor", "critic") if critic else ("actor",):
        model: ModelConfig = config.value(f"worker.{role}.model")
        if model.lora.rank:
            source = model.model_path or config.worker.actor.model.model_path
            assert source is not None
            empty = empty_adapted(model, source, f"worker.{role}.model")
            note(f"{role}: {summary(empty)}")
            if not model.lora.adapter_path and (unused := unused_exclusions(empty, model.lora)):
                note(f"worker.{role}.model.lora.exclude_modules: no linear layer is meant by {', '.join(unused)}")


def empty_adapted(model: ModelConfig, source: str, section: str = "worker.actor.model") -> nn.Module:
    """The model of a role with its adapters, on the meta device.

    Args:
        source: folder or hub id of the model.
    """
    empty = empty_model(
        source,
        dtype=torch.float32,
        device=torch.device("cpu"),
        trust_remote_code=model.trust_remote_code,
        override_config=model.override_config,
        section=section,
    )
    freeze_parts(empty, model)
    add_lora(empty, model.lora, model.lora.adapter_path, section=section)
    return empty


def summary(model: nn.Module) -> str:
    """One line on a model's adapters: how many, how large, and what share of the weights they are added to."""
    layers = lora_layers(model).values()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    factors = sum(size for name, size in sizes.items() if is_factor(name))
    covered = sum(layer.weight.numel() for layer in layers) / (sum(sizes.values()) - factors)
    rank = next(iter(layers)).lora_A.shape[0]
    fused = any(name.endswith("experts.gate_up_proj") for name in sizes)
    return (
        f"LoRA of rank {rank} on {len(layers)} linear layers, {factors:,} weights; these layers are {covered:.1%} of "
        f"the model's weights{'; its experts, fused into one tensor a layer, have no adapters' if fused else ''}"
    )
