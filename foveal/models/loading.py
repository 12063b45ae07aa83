"""Loading a Hugging Face model, whatever its family, ready for packed training."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from foveal.errors import ModelError
from foveal.models.attention import install
from foveal.models.experts import install_experts
from foveal.models.families import family_of, read_config
from foveal.models.patches import multiply_patches
from foveal.models.vision import vision_tower
from foveal.models.widths import align_vision_mlps

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_model(
    model_path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
    section: str = "worker.actor.model",
) -> nn.Module:
    """Loads the weights of a supported family in `dtype` onto `device`, with the packed attention installed.

    Args:
        section: of the configuration that names the model, for messages.

    Raises:
        ModelError: unsupported family; weights that are absent, damaged, incomplete or of another shape; or an
            `override_config` key that the configuration lacks.
    """
    auto, config = _architecture(model_path, trust_remote_code, override_config, section)
    with readable_weights(model_path):
        model, report = auto.from_pretrained(
            model_path,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            attn_implementation="sdpa",
            ignore_mismatched_sizes=True,  # refused below, with their names
            output_loading_info=True,
        )
    refuse_gaps(model_path, report["missing_keys"], report["mismatched_keys"], section)
    prepare(model, device)
    model.to(device)
    return model


def empty_model(
    model_path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
    section: str = "worker.actor.model",
) -> nn.Module:
    """The model that `load_model` gives, on the meta device: to be sharded, then filled by `filling.fill_weights`.

    Args:
        device: where it is to compute.

    Raises:
        ModelError: unsupported family, or an `override_config` key that the configuration lacks.
    """
    from transformers.initialization import no_init_weights

    auto, config = _architecture(model_path, trust_remote_code, override_config, section)
    with torch.device("meta"), no_init_weights():
        model: Any = auto.from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation="sdpa"
        )
    model.tie_weights()
    prepare(model, device)
    assert isinstance(model, nn.Module)
    return model.eval()


def prepare(model: nn.Module, device: torch.device) -> None:
    """Installs our attention and experts, and what makes the vision tower faster where the model is to compute."""
    install(model)
    install_experts(model)
    tower = vision_tower(model)
    if tower is not None:
        multiply_patches(tower)
        if device.type == "cuda":
            align_vision_mlps(tower)


def _architecture(
    model_path: str, trust_remote_code: bool, override_config: dict[str, Any] | None, section: str
) -> tuple[Any, Any]:
    """The auto class that builds the model, and the configuration with the user's changes."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

    family = family_of(read_config(model_path, section), model_path)
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    for key, value in (override_config or {}).items():
        if not hasattr(config, key):
            raise ModelError(
                f"{section}.override_config: {type(config).__name__} has no attribute {key!r}. "
                f"It has: {', '.join(sorted(k for k in config.to_dict() if not k.startswith('_')))}."
            )
        if isinstance(getattr(config, key), PretrainedConfig):
            raise ModelError(
                f"{section}.override_config: {key} is a section of {type(config).__name__}; only single "
                "values can be replaced. Change it in config.json, in a copy of the model's folder."
            )
        setattr(config, key, value)
    return AutoModelForImageTextToText if family.vision else AutoModelForCausalLM, config


@contextmanager
def readable_weights(model_path: str) -> Iterator[None]:
    """Within the block, weights that are absent or damaged raise ModelError."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{model_path}: cannot load the weights: {str(error).splitlines()[0]}") from error


def refuse_gaps(model_path: str, missing: Collection[str], mismatched: Iterable[tuple[Any, ...]], section: str) -> None:
    """Raises ModelError where there are any: transformers fills weights that it doesn't find with random numbers.

    Args:
        missing, mismatched: as in transformers' report; mismatched ones have their name first.
    """
    for fault, names in (
        ("are missing", missing),
        ("have another shape than config.json says", [name for name, *_ in mismatched]),
    ):
        if names:
            listed = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
            raise ModelError(
                f"{model_path}: {len(names)} weights {fault} ({listed}). Copy the model again, and see that "
                f"config.json belongs to it and {section}.override_config keeps the sizes."
            )
