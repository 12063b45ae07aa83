"""A model's backbone over packed responses, in the type that its matrix products run in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from foveal.config.schema_model import FsdpConfig
from foveal.models.loading import DTYPES
from foveal.models.positions import backbone
from foveal.train.packing import Pack


def source_states(model: nn.Module, pack: Pack) -> torch.Tensor:
    """(N, H): the last hidden state before each response token of the pack, which is what predicts it.

    Args:
        model: a Hugging Face model with the packed attention installed.
    """
    output = backbone(model)(
        input_ids=pack.token_ids,
        position_ids=pack.position_ids,
        use_cache=False,
        segments=pack.segments,
        **pack.features,
    )
    return output.last_hidden_state[0][pack.source]


def autocast_dtype(model: nn.Module, fsdp: FsdpConfig, device: torch.device) -> torch.dtype | None:
    """The type of matrix products where it isn't that of the weights, else None.

    On a GPU float32 weights compute in `mp_param_dtype`; elsewhere all computes in the weights' own type.
    """
    compute = DTYPES[fsdp.mp_param_dtype]
    weights = next(model.parameters()).dtype
    return compute if device.type == "cuda" and weights == torch.float32 != compute else None


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype) if dtype else nullcontext()
