"""Prompts as requests of vLLM's engine core: the trainer's own ids and picture features, processed once."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import torch

from foveal.errors import ConfigError
from foveal.models.grids import visual_tokens
from foveal.rollout.sampler import answer_key
from foveal.types import Prompt, Sampling

FORBID = -100.0
"""Added to a forbidden id's logit (the most that vLLM takes): its probability is below 1e-43 of what it was."""


class RequestBuilder:
    """Turns a prompt into requests, one for each answer.

    The engine gets the very ids and features that the policy trains on, so nothing is processed twice, and nothing can
    differ.

    Args:
        vllm_config: of the engine.
        block_hasher: hashes the blocks of a request, by which prompts that begin alike share their keys and values.
        features: gives what the processor made of a prompt's media (`Processing.features`).
        placeholders: the ids that stand for a picture and a video, by kind; none for a text model.
        forbidden_ids: ids that are never sampled.
        eos_ids: ids that end an answer.
        seeded: whether each answer gets a seed of its own.
        lora_request: the adapter that every answer is sampled with.
    """

    def __init__(
        self,
        vllm_config: Any,
        block_hasher: Callable[[Any], list[Any]] | None,
        features: Callable[[Prompt], dict[str, torch.Tensor]],
        *,
        placeholders: Mapping[str, int],
        forbidden_ids: list[int],
        eos_ids: list[int],
        seeded: bool,
        lora_request: Any = None,
    ) -> None:
        self.block_hasher = block_hasher
        self.features = features
        self.placeholders = placeholders
        self.forbidden_ids = forbidden_ids
        self.eos_ids = eos_ids
        self.seeded = seeded
        self.lora_request = lora_request
        self.max_model_len: int = vllm_config.model_config.max_model_len
        self.vocabulary: int = vllm_config.model_config.get_vocab_size()
        self.processor: Any = None
        if vllm_config.model_config.is_multimodal_model:
            from vllm.multimodal import MULTIMODAL_REGISTRY

            self.processor = MULTIMODAL_REGISTRY.create_processor(vllm_config.model_config)

    def check(self, sampling: Sampling) -> None:
        """Refuses ids beyond the vocabulary: vLLM would write outside a row of logits, and does not look.

        Raises:
            ConfigError: names the parameter and the id.
        """
        for name in ("stop_token_ids", "logit_bias"):
            largest = max(sampling.extra.get(name, ()), default=0)
            if largest >= self.vocabulary:
                raise ConfigError(
                    f"worker.rollout.val_override_config.{name}: token id {largest} given; the model has ids 0 to "
                    f"{self.vocabulary - 1}."
                )

    def build(self, prompt: Prompt, sampling: Sampling, names: list[str]) -> list[Any]:
        """A request of the scheduler (`vllm.v1.request.Request`) for each name; all share the prompt's media."""
        from vllm.v1.request import Request

        params = self._params(prompt, sampling)
        media = self._media(prompt)
        hashes: list[Any] | None = None
        now = time.time()
        requests = []
        for answer, name in enumerate(names):
            own = copy(params)
            if self.seeded and sampling.temperature > 0:
                own.seed = answer_seed(sampling.seed, prompt.uid, answer)
            request = Request(
                request_id=name,
                prompt_token_ids=prompt.expanded_ids,
                sampling_params=own,
                pooling_params=None,
                arrival_time=now,
                lora_request=self.lora_request,
                mm_features=media,
                block_hasher=self.block_hasher if hashes is None else partial(_known_hashes, hashes),
            )
            if hashes is None:
                hashes = list(request.block_hashes)
            request._block_hasher = self.block_hasher
            requests.append(request)
        return requests

    def _params(self, prompt: Prompt, sampling: Sampling) -> Any:
        from vllm import SamplingParams

        extra = dict(sampling.extra)
        limit = min(sampling.max_tokens, self.max_model_len - len(prompt.expanded_ids))
        if "min_tokens" in extra:
            extra["min_tokens"] = min(extra["min_tokens"], limit)
        stops = [*([] if sampling.ignore_eos else self.eos_ids), *extra.pop("stop_token_ids", [])]
        bias = {**extra.pop("logit_bias", {}), **dict.fromkeys(self.forbidden_ids, FORBID)}
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),
            max_tokens=limit,
            logprobs=0,  # that of the sampled token alone
            logit_bias=bias or None,
            detokenize=False,
            ignore_eos=True,  # the end tokens are those of the trainer, given as stops, and no others
            stop_token_ids=stops,
            **extra,
        )

    def _media(self, prompt: Prompt) -> list[Any]:
        if not prompt.media:
            return []
        from transformers import BatchFeature
        from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItems, PlaceholderRange

        features = BatchFeature(dict(self.features(prompt)))
        items = MultiModalKwargsItems.from_hf_inputs(features, self.processor._get_mm_fields_config(features, {}))
        queues = {
            kind: zip(items[kind], self._tokens(features[f"{kind}_grid_thw"]), strict=True)
            for kind in self.placeholders
            if f"{kind}_grid_thw" in features
        }
        ids = np.asarray(prompt.expanded_ids)
        visual = np.flatnonzero(np.isin(ids, list(self.placeholders.values())))
        specs = []
        place = 0
        for medium in prompt.media:
            item, tokens = next(queues[medium.kind])
            own = visual[place : place + tokens]
            place += tokens
            # An animation may stand in one row as a picture and in another as a video.
            content = hashlib.blake2b(medium.data, digest_size=16, person=medium.kind.encode()).hexdigest()
            specs.append(MultiModalFeatureSpec(item, medium.kind, content, _range(PlaceholderRange, own), content))
        return specs

    def _tokens(self, grids: torch.Tensor) -> list[int]:
        """Visual tokens of each medium."""
        merge = self.processor.info.get_hf_config().vision_config.spatial_merge_size
        return [visual_tokens((t, h, w), merge) for t, h, w in grids.tolist()]


def _range(kind: Any, places: np.ndarray) -> Any:
    """vLLM's PlaceholderRange of these places; where text stands between them, it says which ones they are."""
    first, length = int(places[0]), int(places[-1] - places[0]) + 1
    if length == len(places):
        return kind(offset=first, length=length)
    is_embed = torch.zeros(length, dtype=torch.bool)
    is_embed[torch.from_numpy(places - first)] = True
    return kind(offset=first, length=length, is_embed=is_embed)


def _known_hashes(hashes: list[Any], request: Any) -> list[Any]:
    """Those of a sibling: a prompt is hashed once."""
    return hashes


def answer_seed(seed: int, uid: str, answer: int) -> int:
    """The seed of one answer: 63 bits."""
    return answer_key(seed, uid, answer, 8) >> 1
