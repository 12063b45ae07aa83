"""transformers computes norms and rotations in float32 whatever the weights' type; here they stay in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DoublePrecision(TorchDispatchMode):
    """Within it a cast from float64 to float32 does nothing, forward and backward.

    Without it the gradients of a model in float64 agree to 1e-8 at best where a sum is cast in one computation and its
    terms are in the other, as those of a shared prompt's tokens.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.float32
        if is_cast and args[0].dtype is torch.float64:
            del kwargs["dtype"]
        return func(*args, **kwargs)
