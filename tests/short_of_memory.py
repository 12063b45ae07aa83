"""A worker under Ray in which memory runs out."""

from __future__ import annotations

from typing import Any

import torch

from foveal.cluster.member import Member


class ShortOfMemory(Member):
    """A worker; after the first step the second one's memory suffices for passes over four answers, with gradient."""

    def start(self, *arguments: Any) -> Any:
        started = super().start(*arguments)

        def look(module: Any, inputs: Any, output: Any) -> None:
            if self.worker.weight_version and torch.is_grad_enabled() and len(inputs[0].responses) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        if self.rank == 1:
            self.worker.scorer.register_forward_hook(look)
        return started
