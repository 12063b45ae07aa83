"""Adapters of a checkpoint added to the weights of the model that training started from, one weight at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from foveal.errors import CheckpointError, ModelError
from foveal.models.disk_names import first_names, names_in_module
from foveal.models.filling import weight_files
from foveal.models.lora import Factors, lora_layers, merged


class BaseWeights:
    """The files of a source model, for a merge.

    Args:
        source: folder or hub id; its weights are safetensors.
        model: of that architecture with its adapters, on the meta device.

    Raises:
        CheckpointError: the files are absent or damaged, or lack a weight that has an adapter.
    """

    def __init__(self, source: str, model: nn.Module) -> None:
        try:
            self._files = weight_files(source)
            self._shapes = {name: shape for path in self._files for name, shape in _shapes(path).items()}
        except (OSError, SafetensorError, ModelError) as error:
            raise CheckpointError(
                f"{source}: cannot read the weights of the model that training started from, to which its adapters are "
                f"added: {str(error).splitlines()[0]} If the model has moved, a link in the old place will do; "
                "`--adapter` writes the adapters alone."
            ) from error
        self._names = _module_names(model, self._shapes)
        found = {self._names[name]: shape for name, shape in self._shapes.items() if name in self._names}
        for path, layer in lora_layers(model).items():
            if found.get(f"{path}.weight") != layer.weight.shape:
                raise CheckpointError(
                    f"{source}: {path}.weight, which has an adapter, is absent or of another shape than "
                    f"{tuple(layer.weight.shape)}. This is not the model that training started from."
                )

    @property
    def numbers(self) -> int:
        """Of all weights together."""
        return sum(self._shapes[name].numel() for name in self._names)

    def merged(
        self, factors: Callable[[str], Factors | None], scaling: float, dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Name on disk, weight + scaling · B·A computed in float32 and rounded once to `dtype`; other weights are cast.

        Names and layouts are those of the source's files.

        Args:
            factors: module path of a layer → A (rank, in) and B (out, rank); None for a layer without adapter.
        """
        for path in self._files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dictionary)
                    if name not in self._names:
                        continue
                    tensor: torch.Tensor = file.get_tensor(name)
                    pair = factors(self._names[name].removesuffix(".weight"))
                    if pair is not None:
                        yield name, merged(tensor, pair, scaling, dtype)
                    else:
                        yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor


def _shapes(path: str) -> dict[str, torch.Size]:
    with safe_open(path, framework="pt") as file:
        return {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _module_names(model: nn.Module, on_disk: Iterable[str]) -> dict[str, str]:
    """Name on disk → name in the module, as transformers loads it. What the module lacks keeps its name; other names of
    tied weights are left out."""
    in_module = names_in_module(model)
    state = model.state_dict(keep_vars=True)
    first = first_names(state)
    found = {name: in_module(name)[0] for name in on_disk}
    return {name: weight for name, weight in found.items() if weight not in state or first[id(state[weight])] == weight}
