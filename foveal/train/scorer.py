"""A model as the trainer sees it: packed tokens in, log-probabilities of the response tokens out."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from foveal.models.head import head_of, token_logprobs
from foveal.models.positions import backbone
from foveal.train.packing import Pack


class TokenScorer(nn.Module):
    """Backbone and head in one module, so that a sharded version gathers both from the same root.

    Args:
        model: a Hugging Face model with the packed attention installed.
        forbidden_ids: ids that are never sampled; left out of the distribution here as in the engine.
        temperature: that of the sampler.
        autocast: the type that matrix products run in where it isn't the weights' own, else None.
    """

    def __init__(
        self, model: nn.Module, *, forbidden_ids: list[int], temperature: float, autocast: torch.dtype | None
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.autocast = autocast
        self.forbidden: torch.Tensor
        self.register_buffer("forbidden", torch.tensor(forbidden_ids, dtype=torch.int64), persistent=False)

    def forward(self, pack: Pack) -> torch.Tensor:
        """(N,) float32 log-probabilities of the pack's response tokens, under the distribution that is sampled from."""
        with self._autocast(pack.token_ids.device):
            hidden = backbone(self.model)(
                input_ids=pack.token_ids,
                position_ids=pack.position_ids,
                use_cache=False,
                segments=pack.segments,
                **pack.features,
            ).last_hidden_state[0]
            weight, bias = head_of(self.model)
            return token_logprobs(
                hidden[pack.source],
                weight,
                bias,
                pack.targets,
                temperature=self.temperature,
                forbidden=self.forbidden,
            )

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.autocast(device.type, self.autocast) if self.autocast else nullcontext()
