"""Compiling a model's layers with torch.compile, for packs of ever new lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch._functorch.config
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from foveal.models.positions import decoder_of
from foveal.models.vision import vision_tower
from foveal.track import console

_GRAPHS = 32
"""Graphs that one kind of layer may have: with and without gradient, with and without a shared prompt, in the types of
policy, reference and critic. What none of them fits runs eagerly after that."""


def compile_layers(model: nn.Module, *, vision: bool, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compiles the decoder layers, each by itself, with lengths left open; layers of a kind share their graphs.

    A decoder layer runs compiled over packed sequences alone: sampling with the same module stays as it was. Where
    compiling fails, one warning says why and everything goes on eagerly.

    Args:
        model: a transformers model with the packed attention installed.
        vision: also the blocks of the vision tower. Not together with checkpointing of trained blocks: the second
            forward of Qwen2.5-VL's odd width (3,420) is padded otherwise than the first, and the backward pass fails.
        backend: torch.compile's.
    """
    decoder = decoder_of(model)
    tower: Any = vision_tower(model)
    blocks: list[nn.Module] = list(tower.blocks) if vision and tower is not None else []
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    decoder.register_forward_pre_hook(_prepare, with_kwargs=True)
    compiled = Compiled(backend)
    # Not `layer.compile`: that takes the hooks of a sharded layer into the graph.
    for layer in decoder.layers:
        layer.forward = compiled.wrap(layer.forward, lambda options: options.get("segments") is not None)
    for block in blocks:
        block.forward = compiled.wrap(block.forward)


class Compiled:
    """Functions that are compiled at their first call, and run eagerly once compiling has failed anywhere.

    Args:
        backend: torch.compile's.
    """

    failed: ClassVar[bool] = False

    def __init__(self, backend: str | Callable[..., Any] = "inductor") -> None:
        self._backend = backend
        # The backward pass is compiled with the forward pass: a failure then comes before anything has run. Halfway
        # through a backward pass, among several processes, nothing could begin again.
        torch._functorch.config.force_non_lazy_backward_lowering = True

    def wrap(
        self,
        eager: Callable[..., Any],
        applies: Callable[[dict[str, Any]], bool] = lambda options: True,
        *,
        dynamic: bool | None = True,
    ) -> Callable[..., Any]:
        """The compiled version of a function, for the keyword arguments that it applies to.

        Args:
            dynamic: torch.compile's: True leaves all sizes open, None those that were marked or changed.
        """
        compiled = torch.compile(eager, dynamic=dynamic, backend=self._backend)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not Compiled.failed and applies(kwargs):
                try:
                    return compiled(*args, **kwargs)
                except TorchDynamoException as error:  # raised before anything has run
                    _give_up(error)
            return eager(*args, **kwargs)

        return forward


def _give_up(error: TorchDynamoException) -> None:
    Compiled.failed = True
    cause = getattr(error, "inner_exception", error)  # what the backend raised
    reason = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
    console.warn(
        f"worker.actor.use_torch_compile: layers cannot be compiled here ({reason[:200]}); going on without. "
        "Set it to false to try no more."
    )


def _prepare(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    segments = options.get("segments")
    if segments is not None:
        segments.prepare()
