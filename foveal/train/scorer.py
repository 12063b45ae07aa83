"""A model as the trainer sees it: packed tokens in, log-probabilities of the response tokens out."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn

from foveal.models.feature_store import FeatureStore
from foveal.models.head import Head, TokenScores, head_over, score_tokens
from foveal.models.lora import without_adapter
from foveal.models.ulysses import Ulysses
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
        ulysses: the processes that share each pack's tokens; all of them score the same packs, and get all scores.

    Attributes:
        compiled: whether the head runs compiled.
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
        ulysses: Ulysses | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.compiled = False
        self.offload = offload
        self.store = store
        self.ulysses = ulysses
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
        targets, owned = pack.targets, None
        if self.ulysses is not None:
            owned = self.ulysses.owned(pack.source, pack.token_ids.shape[1])
            targets = targets[owned]
        with autocast(pack.token_ids.device, self.autocast):
            scores = score_tokens(
                self._head(pack),
                targets,
                temperature=self.temperature,
                forbidden=self.forbidden,
                with_entropy=with_entropy,
                reference=reference,
                compiled=self.compiled,
            )
        if self.ulysses is None or owned is None:
            return scores
        return _gathered(scores, self.ulysses, owned, len(pack.targets))

    @torch.no_grad()
    def head(self, pack: Pack) -> Head:
        """The hidden states and output layer that predict the pack's response tokens, without gradient.

        Among processes that share the pack's tokens, those in this one's slice.
        """
        with autocast(pack.token_ids.device, self.autocast):
            return self._head(pack)

    def run(self, **inputs: Any) -> Any:
        """The model's own forward pass, for sampling."""
        return self.model(**inputs)

    def _head(self, pack: Pack) -> Head:
        states = source_states(self.model, pack, self.store, offload=self.offload, ulysses=self.ulysses)
        return head_over(self.model, states)


class StartScorer(nn.Module):
    """The reference policy of a run that trains adapters: the same module, as it was when training began.

    Args:
        scorer: the policy's.
    """

    def __init__(self, scorer: TokenScorer) -> None:
        super().__init__()
        self.scorer = scorer

    @property
    def model(self) -> nn.Module:
        return self.scorer.model

    @torch.no_grad()
    def forward(self, pack: Pack) -> TokenScores:
        """As `TokenScorer.forward`, without gradient."""
        with without_adapter(self.model):
            scores: TokenScores = self.scorer(pack)
        return scores

    def head(self, pack: Pack) -> Head:
        """As `TokenScorer.head`."""
        with without_adapter(self.model):
            return self.scorer.head(pack)


Reference: TypeAlias = TokenScorer | StartScorer


def _gathered(scores: TokenScores, ulysses: Ulysses, owned: torch.Tensor, count: int) -> TokenScores:
    """The scores of all `count` response tokens, from those that each process has."""

    def whole(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else ulysses.gather(values, owned, count)

    return TokenScores(ulysses.gather(scores.logprobs, owned, count), whole(scores.entropy), whole(scores.kl))
