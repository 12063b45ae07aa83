"""Prompts as requests of vLLM's engine core: the trainer's own ids and picture features, processed once."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import Any

import torch

from foveal.types import Prompt, Sampling

THREADS = min(16, os.cpu_count() or 1)
FORBID = -100.0
"""Added to a forbidden id's logit (the most that vLLM takes): its probability is below 1e-43 of what it was."""


class RequestBuilder:
    """Turns a prompt into requests, one for each answer.

    The engine gets the very ids and features that the policy trains on, so nothing is processed twice, and nothing can
    differ.

    Args:
        vllm_config: of the engine.
        features: gives what the processor made of a prompt's media (`Processing.features`).
        image_token_id: the placeholder of a picture; None for a text model.
        forbidden_ids: ids that are never sampled.
        eos_ids: ids that end an answer.
        seeded: whether each answer gets a seed of its own.
    """

    def __init__(
        self,
        vllm_config: Any,
        features: Callable[[Prompt], dict[str, torch.Tensor]],
        *,
        image_token_id: int | None,
        forbidden_ids: list[int],
        eos_ids: list[int],
        seeded: bool,
    ) -> None:
        self.features = features
        self.image_token_id = image_token_id
        self.forbidden_ids = forbidden_ids
        self.eos_ids = eos_ids
        self.seeded = seeded
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        self.max_model_len: int = vllm_config.model_config.max_model_len
        self.processor: Any = None
        if vllm_config.model_config.is_multimodal_model:
            from vllm.multimodal import MULTIMODAL_REGISTRY

            self.processor = MULTIMODAL_REGISTRY.create_processor(vllm_config.model_config)

    def media(self, prompts: Sequence[Prompt]) -> list[list[Any]]:
        """The pictures of each prompt as vLLM takes them; in threads, since each is megabytes to convert and hash."""
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(self._media, prompts))

    def build(self, prompt: Prompt, sampling: Sampling, names: list[str], media: list[Any]) -> list[Any]:
        """An `EngineCoreRequest` for each name; all share the prompt's media."""
        from vllm.v1.engine import EngineCoreRequest

        params = self._params(prompt, sampling)
        now = time.time()
        requests = []
        for answer, name in enumerate(names):
            own = copy(params)
            if self.seeded and sampling.temperature > 0:
                own.seed = answer_seed(sampling.seed, prompt.uid, answer)
            requests.append(
                EngineCoreRequest(
                    request_id=name,
                    prompt_token_ids=prompt.expanded_ids,
                    mm_features=media,
                    sampling_params=own,
                    pooling_params=None,
                    arrival_time=now,
                    lora_request=None,
                    cache_salt=None,
                    data_parallel_rank=None,
                )
            )
        return requests

    def _params(self, prompt: Prompt, sampling: Sampling) -> Any:
        from vllm import SamplingParams

        extra = dict(sampling.extra)
        stops = [*([] if sampling.ignore_eos else self.eos_ids), *extra.pop("stop_token_ids", [])]
        bias = {**extra.pop("logit_bias", {}), **dict.fromkeys(self.forbidden_ids, FORBID)}
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),
            max_tokens=min(sampling.max_tokens, self.max_model_len - len(prompt.expanded_ids)),
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

        features = BatchFeature(
            {
                name: value.to(self.dtype) if value.is_floating_point() else value
                for name, value in self.features(prompt).items()
            }
        )
        fields = self.processor._get_mm_fields_config(features, {})
        items = MultiModalKwargsItems.from_hf_inputs(features, fields)["image"]
        specs = []
        offset = 0
        for medium, item, length in zip(prompt.media, items, self._lengths(features), strict=True):
            offset = prompt.expanded_ids.index(self.image_token_id, offset)
            content = hashlib.blake2b(medium.data, digest_size=16).hexdigest()
            position = PlaceholderRange(offset=offset, length=length)
            specs.append(MultiModalFeatureSpec(item, "image", content, position, content))
            offset += length
        return specs

    def _lengths(self, features: Any) -> list[int]:
        """Visual tokens of each picture."""
        merge = self.processor.info.get_hf_config().vision_config.spatial_merge_size
        return (features["image_grid_thw"].prod(-1) // merge**2).tolist()


def answer_seed(seed: int, uid: str, answer: int) -> int:
    """The seed of one answer: 63 bits that depend on nothing else in the batch."""
    digest = hashlib.blake2b(f"{seed}:{answer}:{uid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
