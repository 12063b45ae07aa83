"""A model as the trainer sees it: packed tokens in, log-probabilities of the response tokens out."""

from __future__ import annotations

import torch
from torch import nn

from foveal.models.feature_store import FeatureStore
from foveal.models.head import Head, TokenScores, head_of, score_tokens
from foveal.train.forward import autocast, source_states
from foveal.train.packing import Pack


class TokenScorer(nn.Module):
    """Backbone and head in one module, so that a sharded version gathers both from the same root.

    Args:
        model: a Hugging Face model with the packed attention installed.
        forbidden_ids: ids that are never sampled; left out of the distribution here as in the engine.
        temperature: that of the sampler.
        autocast: the type that matrix products run in where it isn't the weights' own, else None.
        store: for what an untrained vision tower makes of pictures; whoever holds it clears it.
        offload: what the backward pass needs waits in host memory.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        forbidden_ids: list[int],
        temperature: float,
        autocast: torch.dtype | None,
        store: FeatureStore | None = None,
        offload: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.offload = offload
        self.store = store
        self.temperature = temperature
        self.autocast = autocast
        self.forbidden: torch.Tensor
        self.register_buffer("forbidden", torch.tensor(forbidden_ids, dtype=torch.int64), persistent=False)

    def forward(self, pack: Pack, *, with_entropy: bool = False, reference: Head | None = None) -> TokenScores:
        """Scores the pack's N response tokens under the distribution that is sampled from.

        Args:
            with_entropy: also each token's entropy.
            reference: the reference policy's `head` of the same pack, for the exact KL.
        """
        with autocast(pack.token_ids.device, self.autocast):
            return score_tokens(
                self._head(pack),
                pack.targets,
                temperature=self.temperature,
                forbidden=self.forbidden,
                with_entropy=with_entropy,
                reference=reference,
            )

    @torch.no_grad()
    def head(self, pack: Pack) -> Head:
        """The hidden states and output layer that predict the pack's response tokens, without gradient."""
        with autocast(pack.token_ids.device, self.autocast):
            return self._head(pack)

    def _head(self, pack: Pack) -> Head:
        return Head(source_states(self.model, pack, self.store, offload=self.offload), *head_of(self.model))
