"""Adapters as peft saves them: adapter_config.json and adapter_model.safetensors. peft itself isn't needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foveal.errors import ModelError
from foveal.models.disk_names import names_in_module
from foveal.models.lora_targets import linear_layers

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft puts before the path of a module."""

_ENDS = (".lora_A.weight", ".lora_B.weight")
_UNSUPPORTED: dict[str, Any] = {
    "use_dora": False,
    "use_rslora": False,
    "lora_bias": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "fan_in_fan_out": False,
    "target_parameters": None,
    "layer_replication": None,
    "use_qalora": False,
    "use_bdlora": None,
    "kasa_config": None,
    "arrow_config": None,
    "alora_invocation_tokens": None,
}
"""Keys of adapter_config.json whose other values mean what is not done here."""
_INIT, _PLAIN_STARTS = "init_lora_weights", (None, True, False, "gaussian", "eva", "orthogonal")
"""How an adapter began. All other ways (PiSSA, OLoRA, CorDA, LoftQ) change the weights under it too, which peft does
anew whenever it loads such an adapter."""


@dataclass(frozen=True)
class AdapterInfo:
    """What an adapter_config.json says.

    Attributes:
        place: the folder or hub id.
        base: the folder or hub id of the model that it belongs to; empty where it isn't said.
        rank, alpha: as in `worker.actor.model.lora`.
    """

    place: str
    base: str
    rank: int
    alpha: float


@dataclass(frozen=True)
class Adapter(AdapterInfo):
    """An adapter with its weights.

    Attributes:
        weights: module path, as the files name it → A (rank, in) and B (out, rank).
    """

    weights: dict[str, tuple[torch.Tensor, torch.Tensor]]

    def layers(self, model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The weights by the module's own paths, which for adapters of transformers 4 differ from the files'.

        Raises:
            ModelError: a layer that the model lacks, or of another size.
        """
        linear = linear_layers(model)
        in_module = names_in_module(model)
        found = {}
        for name, (a, b) in self.weights.items():
            path = name if name in linear else in_module(f"{name}.weight")[0].removesuffix(".weight")
            layer = linear.get(path)
            if layer is None:
                raise ModelError(
                    f"{self.place}: the adapter has weights for {name}, which is no linear layer of this model; give "
                    "the model that it was trained with."
                )
            if a.shape != (self.rank, layer.in_features) or b.shape != (layer.out_features, self.rank):
                raise ModelError(
                    f"{self.place}: the adapter's weights for {name} are {tuple(a.shape)} and {tuple(b.shape)}; rank "
                    f"{self.rank} and the model's {layer.out_features} × {layer.in_features} ask for others."
                )
            found[path] = (a, b)
        return found


def is_adapter(place: str) -> bool:
    """Whether this is a folder with an adapter and no model of its own."""
    return Path(place, CONFIG).is_file() and not Path(place, "config.json").exists()


def read_info(place: str, section: str) -> AdapterInfo:
    """Reads adapter_config.json.

    Args:
        section: of the configuration, for messages.

    Raises:
        ModelError: there is none, it is damaged, or the adapter is of a kind that isn't supported.
    """
    path = _file(place, CONFIG)
    if path is None:
        raise ModelError(f"{section}.lora.adapter_path: {place} has no {CONFIG}; give the folder of a peft adapter.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind, info = (
            config["peft_type"],
            AdapterInfo(
                place, config.get("base_model_name_or_path") or "", int(config["r"]), float(config["lora_alpha"])
            ),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: cannot be read ({type(error).__name__}: {error}).") from error
    odd = [f"{key}={config[key]!r}" for key, plain in _UNSUPPORTED.items() if (config.get(key) or plain) != plain]
    if config.get(_INIT) not in _PLAIN_STARTS:
        odd.append(f"{_INIT}={config[_INIT]!r}")
    if kind != "LORA":
        odd.insert(0, f"peft_type={kind!r}")
    if odd:
        raise ModelError(
            f"{place}: an adapter with {', '.join(odd)} can't be trained further here. Merge it into its model (peft's "
            f"merge_and_unload, or LLaMA-Factory's export) and set {section}.model_path to the result."
        )
    return info


def open_adapter(place: str, section: str) -> Adapter:
    """Reads an adapter with its weights.

    Raises:
        ModelError: as `read_info`; or the weights are absent or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    info = read_info(place, section)
    path = _file(place, WEIGHTS)
    if path is None:
        raise ModelError(f"{place}: there is no {WEIGHTS} beside {CONFIG}; save the adapter in that format.")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot load the adapter's weights: {str(error).splitlines()[0]}") from error
    weights = pairs(tensors)
    if 2 * len(weights) != len(tensors):
        strange = next(name for name in tensors if name.removeprefix(PREFIX)[: -len(_ENDS[0])] not in weights)
        raise ModelError(f"{path}: {strange} is not one of the two weights of a linear layer's adapter.")
    return Adapter(info.place, info.base, info.rank, info.alpha, weights)


def pairs(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Module path → A (rank, in) and B (out, rank), of tensors under peft's names; any others are left out."""
    found = {}
    for name, a in tensors.items():
        start = name.removesuffix(_ENDS[0])
        if start != name and start + _ENDS[1] in tensors:
            found[start.removeprefix(PREFIX)] = (a, tensors[start + _ENDS[1]])
    return found


def tensor_name(path: str, factor: str) -> str:
    """The name that peft gives a weight of the adapter on the module at `path`.

    Args:
        factor: "lora_A" or "lora_B".
    """
    return f"{PREFIX}{path}.{factor}.weight"


def peft_config(base: str | None, rank: int, alpha: float, targets: list[str]) -> dict[str, Any]:
    """The content of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _file(place: str, name: str) -> Path | None:
    if Path(place).is_dir():
        path = Path(place, name)
        return path if path.is_file() else None
    from transformers.utils import cached_file

    quiet: dict[str, Any] = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
        "_raise_exceptions_for_gated_repo": False,
    }
    try:
        found = cached_file(place, name, **quiet)
    except OSError:  # no such folder or repository, which reading the model's configuration explains
        return None
    return None if found is None else Path(str(found))
