"""Which model families are supported, and what the rest of the code must know about each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foveal.errors import ModelError


@dataclass(frozen=True)
class Family:
    """What a `model_type` in config.json stands for.

    Attributes:
        vision: the model takes pictures, and its positions have three axes (M-RoPE: time, height, width).
    """

    vision: bool


FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family(vision=True),
    "qwen2_5_vl": Family(vision=True),
    "qwen3_vl": Family(vision=True),
    "qwen3_vl_moe": Family(vision=True),
    "qwen2": Family(vision=False),
    "qwen3": Family(vision=False),
    "qwen3_moe": Family(vision=False),
    "llama": Family(vision=False),
}


def read_config(model_path: str, section: str = "worker.actor.model") -> dict[str, Any]:
    """Reads `config.json` of a folder or hub id as a plain dictionary; no model code runs and no weights are touched.

    Args:
        section: of the configuration that names the model, for messages.

    Raises:
        ModelError: no such folder or hub id, or no config.json there.
    """
    from transformers import PretrainedConfig

    if is_absent(model_path):
        raise ModelError(
            f"{section}.model_path: there is no folder {model_path!r} (looked in {Path.cwd()}). "
            "Give the folder of a Hugging Face model, or a hub id such as Qwen/Qwen2.5-VL-3B-Instruct."
        )
    try:
        config, _ = PretrainedConfig.get_config_dict(model_path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{section}.model_path: {_not_a_folder(model_path)}cannot read config.json of {model_path!r}: "
            f"{str(error).splitlines()[0]} Give the folder of a Hugging Face model, or a hub id that can be reached "
            "from here."
        ) from error
    if "model_type" not in config:
        raise ModelError(f"{model_path}: its config.json has no model_type (is this a Hugging Face model folder?).")
    return config


def _not_a_folder(model_path: str) -> str:
    return "" if Path(model_path).is_dir() else f"there is no such folder in {Path.cwd()}, and as a hub id: "


def is_absent(model_path: str) -> bool:
    """Whether this can only be a folder, not a hub id, and there is no such folder."""
    owner, slash, rest = model_path.partition("/")
    is_local = owner in ("", ".", "..", "~") or "/" in rest or bool(slash and Path(owner).is_dir())
    return is_local and not Path(model_path).is_dir()


def family_of(config: dict[str, Any], model_path: str) -> Family:
    """The family of a configuration read by `read_config`.

    Raises:
        ModelError: the family is not supported; names the type and the supported ones.
    """
    model_type = config["model_type"]
    if model_type not in FAMILIES:
        raise ModelError(f"{model_path}: model type {model_type!r} is not supported. Supported: {', '.join(FAMILIES)}.")
    return FAMILIES[model_type]
