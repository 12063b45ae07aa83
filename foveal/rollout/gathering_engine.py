"""Sampling with the trainer's own module where its weights are spread over processes."""

from __future__ import annotations

from typing import Any

import torch

from foveal.config.schema_model import FsdpConfig
from foveal.models.loading import DTYPES
from foveal.rollout.transformers_engine import TransformersEngine
from foveal.train.scorer import TokenScorer
from foveal.train.sharding import gather_all, release_all


class GatheringEngine(TransformersEngine):
    """From `wake` to `sleep` each process holds the whole weights, in the type that is computed in: processes have
    other prompts, and answers of other lengths, so no forward pass may wait for another process's.

    All processes must call `wake` and `sleep` together.

    Args:
        scorer: the sharded module around the model, fsdp: how it is sharded, and device: where it computes.
        arguments, options: as of `TransformersEngine`.
    """

    def __init__(
        self, scorer: TokenScorer, fsdp: FsdpConfig, device: torch.device, *arguments: Any, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._scorer = scorer
        self._fsdp = fsdp
        self.forward = scorer.run  # whose hooks know the whole module's shards, as the model's own don't
        self.device = device
        self.forbidden_ids = self.forbidden_ids.to(device)
        if device.type == "cuda":
            self.cache_dtype = DTYPES[fsdp.mp_param_dtype]

    def wake(self) -> None:
        gather_all(self._scorer)

    def sleep(self) -> None:
        release_all(self._scorer, self._fsdp, self.device)
