"""A model's backbone over packed responses, in the type that its matrix products run in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from foveal.config.schema_model import FsdpConfig
from foveal.models.feature_store import FeatureStore
from foveal.models.loading import DTYPES
from foveal.models.positions import backbone, decoder_of
from foveal.models.recompute import offloaded_activations
from foveal.models.ulysses import Ulysses
from foveal.models.vision import encode
from foveal.train.packing import Pack


def source_states(
    model: nn.Module,
    pack: Pack,
    store: FeatureStore | None = None,
    *,
    offload: bool = False,
    ulysses: Ulysses | None = None,
) -> torch.Tensor:
    """(N, H): the last hidden state before each response token of the pack, which is what predicts it.

    Args:
        model: a Hugging Face model with the packed attention installed.
        store: keeps the features of pictures that the model's training doesn't change, for the step's other passes.
        offload: what the backward pass needs waits in host memory.
        ulysses: the processes that share the pack's tokens. Each gets the (M, H) states that lie in its slice.
    """
    with offloaded_activations() if offload and torch.is_grad_enabled() else nullcontext():
        return _source_states(model, pack, store, ulysses)


def _source_states(model: nn.Module, pack: Pack, store: FeatureStore | None, ulysses: Ulysses | None) -> torch.Tensor:
    base = backbone(model)
    embeddings = base.get_input_embeddings()(pack.token_ids)
    deep: dict[str, object] = {}
    if pack.pictures:
        tokens, *stacked = encode(base.visual, pack.pictures, store, device=pack.token_ids.device)
        embeddings = embeddings.index_copy(1, pack.visual, tokens.to(embeddings.dtype).unsqueeze(0))
        if stacked:
            visual = torch.zeros_like(pack.token_ids, dtype=torch.bool).index_fill(1, pack.visual, True)
            if ulysses is not None:
                here = ulysses.owned(pack.visual, pack.token_ids.shape[1])
                visual, stacked = ulysses.slice(visual, 1), [features[here] for features in stacked]
            deep = {"visual_pos_masks": visual, "deepstack_visual_embeds": stacked}
    positions, source = pack.position_ids, pack.source
    if ulysses is not None:
        source = ulysses.local(source, pack.token_ids.shape[1])
        embeddings, positions = ulysses.slice(embeddings, 1), ulysses.slice(positions, -1)
    output = decoder_of(model)(
        inputs_embeds=embeddings,
        position_ids=positions,
        use_cache=False,
        segments=pack.segments,
        ulysses=ulysses,
        **deep,
    )
    return output.last_hidden_state[0][source]


def autocast_dtype(model: nn.Module, fsdp: FsdpConfig, device: torch.device) -> torch.dtype | None:
    """The type of matrix products where it isn't that of the weights, else None.

    On a GPU float32 weights compute in `mp_param_dtype`; elsewhere all computes in the weights' own type.
    """
    compute = DTYPES[fsdp.mp_param_dtype]
    weights = next(model.parameters()).dtype
    return compute if device.type == "cuda" and weights == torch.float32 != compute else None


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype) if dtype else nullcontext()
