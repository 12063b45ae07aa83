"""Low-rank adapters in vLLM: whether it can apply one itself, and putting one in without touching disk.

An adapter lies in buffers of vLLM's own layers. They are written in place from the trainer's tensors, so that nothing
of the adapter is rounded into the base weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from foveal.config.schema_model import ModelConfig
from foveal.models.adapter_files import pairs, tensor_name
from foveal.models.families import read_config
from foveal.models.lora import lora_layers
from foveal.models.lora_setup import empty_adapted
from foveal.track import console

NUMBER = 1
"""Under which vLLM knows the adapter; there is one."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes that vLLM's buffers can have."""
_DECODER = r"layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
_TEXT = rf"model\.{_DECODER}"
_QWEN2 = rf"model\.(language_model\.{_DECODER}|visual\.(blocks\.\d+\.(attn|mlp)\.\w+|merger\.mlp\.\d))"
_QWEN3 = (
    rf"model\.(language_model\.{_DECODER}|visual\.blocks\.\d+\.(attn|mlp)\.\w+"
    r"|visual\.(merger|deepstack_merger_list\.\d+)\.linear_fc\d)"
)
_MODULES = {
    "qwen2": _TEXT,
    "qwen3": _TEXT,
    "llama": _TEXT,
    "qwen3_moe": _TEXT,
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
}
"""By `model_type`, the modules whose adapters the tested versions of vLLM apply."""
_RENAMED = (
    (r"^model\.visual\.", "visual."),
    (r"^model\.language_model\.", "language_model.model."),
    (r"\.[qkv]_proj$", ".qkv_proj"),
    (r"\.(gate|up)_proj$", ".gate_up_proj"),
)
"""What makes vLLM's name of a module from the trainer's."""


@dataclass(frozen=True)
class AdapterShape:
    """What must be known of an adapter before the engine starts.

    Attributes:
        modules: paths of the trainer's modules that it changes.
    """

    rank: int
    modules: frozenset[str]

    def obstacle(self, model_type: str) -> str | None:
        """Why vLLM cannot apply such an adapter to a model of this type; None where it can."""
        beyond = sorted(name for name in self.modules if not re.fullmatch(_MODULES.get(model_type, ""), name))
        if beyond:
            return f"vLLM applies none to {', '.join(beyond[:3])}{', …' if len(beyond) > 3 else ''}"
        if self.rank > RANKS[-1]:
            return f"vLLM applies none above rank {RANKS[-1]}, and its rank is {self.rank}"
        return None

    def arguments(self, device_type: str) -> dict[str, Any]:
        """vLLM's engine arguments."""
        arguments: dict[str, Any] = {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": next(rank for rank in RANKS if rank >= self.rank),
            # Every module with room for an adapter costs time, also where it has none.
            "lora_target_modules": sorted({_packed(name) for name in self.modules}),
        }
        if any(".visual." in name for name in self.modules):
            arguments["enable_tower_connector_lora"] = True
            if device_type == "cpu":  # 0.25.1 profiles with an adapter that is not there yet, which a GPU survives
                arguments["skip_mm_profiling"] = True
        return arguments


def plan_adapter(model: ModelConfig, model_path: str) -> AdapterShape | None:
    """What the engine is to apply itself; None where there is no adapter, or vLLM cannot, which a line then says.

    Raises:
        ConfigError, ModelError: as `foveal.models.lora.add_lora`.
    """
    if not model.lora.rank:
        return None
    layers = lora_layers(empty_adapted(model, model_path))
    adapter = AdapterShape(len(next(iter(layers.values())).lora_A), frozenset(layers))
    obstacle = adapter.obstacle(read_config(model_path)["model_type"])
    if obstacle is not None:
        say_merged(obstacle)
        return None
    return adapter


def say_merged(reason: str) -> None:
    console.note(f"the engine gets weights with the adapter merged into them: {reason}")


def _packed(name: str) -> str:
    """The path of vLLM's module that a module of the trainer is, or is a part of."""
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def complete_packing() -> None:
    """Says of Qwen3-VL-MoE what vLLM says of Qwen3-VL: the tower's `qkv` is one module for adapters too. Without it
    vLLM refuses adapters there. Call before the engine starts."""
    from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration

    known = Qwen3VLMoeForConditionalGeneration.packed_modules_mapping
    Qwen3VLMoeForConditionalGeneration.packed_modules_mapping = {"qkv": ["qkv"], **known}


def adapter_request() -> Any:
    """vLLM's `LoRARequest`, which every request carries. Its path is never read: the adapter is there before."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name="policy", lora_int_id=NUMBER, lora_path="in memory")


def lacking_modules(worker: Any, modules: Iterable[str]) -> list[str]:
    """Runs in vLLM's worker: those of the trainer's modules that it has no room for an adapter of."""
    manager = worker.model_runner.lora_manager._adapter_manager
    there = set(manager.modules).union(*manager.packed_modules.values())
    return sorted(path for path, name in _in_vllm(manager.model, modules).items() if name not in there)


def put_in(worker: Any, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> list[str]:
    """Runs in vLLM's worker: writes an adapter over the one before.

    All of the buffers is written, so that nothing is left of what a deep sleep made of them.

    Returns:
        modules that vLLM has no room for; then nothing was written.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    lora = worker.model_runner.lora_manager
    manager, dtype = lora._adapter_manager, lora.lora_config.lora_dtype
    factors, rank = pairs(tensors), config["r"]
    lacking = lacking_modules(worker, factors)
    if lacking:
        return lacking
    layers = {}
    for path, name in _in_vllm(manager.model, factors).items():
        a, b = factors[path]
        # Scaled before it is rounded, and a copy in any case: vLLM scales in place what is rounded already.
        b = (b.float() * (config["lora_alpha"] / rank)).to(lora.device, dtype)
        layers[name] = LoRALayerWeights(name, rank, rank, a.to(lora.device, dtype), b, scaling=1.0)
    adapter = LoRAModel(NUMBER, rank, layers)
    manager.remove_adapter(NUMBER)
    manager.add_adapter(adapter)
    manager.activate_adapter(NUMBER)
    adapter.loras.clear()  # copied
    # Which token uses which adapter is written only when that changes, and a deep sleep loses it.
    manager._last_mapping = None
    return []


def _in_vllm(model: nn.Module, paths: Iterable[str]) -> dict[str, str]:
    """The trainer's module path → vLLM's, as if it did not pack several modules into one."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:  # without what packs modules
        mapper = mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()
    return {path: parse_fine_tuned_lora_name(tensor_name(path, "lora_A"), mapper)[0] for path in paths}
