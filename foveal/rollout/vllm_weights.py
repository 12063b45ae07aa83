"""New weights for vLLM's model, in the place of the old ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def reload(worker: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> list[str]:
    """Runs in vLLM's worker: takes the weights; returns those of the model that did not come.

    vLLM only logs them.
    """
    model = worker.get_model()
    load, came = model.load_weights, set()

    def load_and_note(weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        came.update(load(weights))
        return came

    model.load_weights = load_and_note
    try:
        with _base_layers(model):
            wanted = {name for name, _ in model.named_parameters()}
            worker.reload_weights(weights_iterator=weights)
    finally:
        del model.load_weights
    # The experts' own module names its weights without itself.
    return sorted(name for name in wanted if name not in came and name.replace(".routed_experts.", ".") not in came)


def by_expert(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Splits the fused experts that `save_pretrained` writes for Qwen3-VL-MoE, (experts, out, in), into single ones.

    vLLM reads fused ones too, but its versions disagree on which way round they are.
    """
    for name, tensor in weights:
        path, _, kind = name.rpartition(".experts.")
        if kind not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        for expert, weight in enumerate(tensor.unbind()):
            if kind == "down_proj":
                yield f"{path}.experts.{expert}.down_proj.weight", weight
            else:
                gate, up = weight.chunk(2)
                yield f"{path}.experts.{expert}.gate_proj.weight", gate
                yield f"{path}.experts.{expert}.up_proj.weight", up


@contextmanager
def _base_layers(model: nn.Module) -> Iterator[None]:
    """Within the block, layers stand in the place of those that vLLM wrapped around them for adapters: weights have the
    names that loading looks for."""
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapped = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, BaseLayerWithLoRA) and hasattr(module, "base_layer")
    }
    for name, module in wrapped.items():
        model.set_submodule(name, module.base_layer)
    try:
        yield
    finally:
        for name, module in wrapped.items():
            model.set_submodule(name, module)
