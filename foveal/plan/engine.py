"""What sampling takes: vLLM's share of a GPU, or the trainer's own module."""

from __future__ import annotations

from dataclasses import dataclass

from foveal.config import Config
from foveal.models.loading import DTYPES
from foveal.models.memory import Pass, layer_forward_bytes
from foveal.plan.gpus import Gpu
from foveal.plan.rows import Lengths
from foveal.plan.sizes import ModelSizes
from foveal.rollout.transformers_engine import FREE_FRACTION, bytes_of_prompt
from foveal.rollout.vllm_setup import max_sequences

_SAMPLER = 16
"""Bytes of a logit while a token is sampled: float32, some times over."""


@dataclass(frozen=True)
class Engine:
    """vLLM's share of a GPU.

    Attributes:
        share: bytes that it may take in all.
        weights, work, keys: its parts. keys is below 0 where the others take more than the share.
        cache_tokens: whose keys and values fit, in the cache of one engine.
        sequences: answers that it samples side by side.
        tensor_parallel: GPUs of an engine.
        obstacle: why it can't start; "" for nothing.
    """

    share: float
    weights: float
    work: float
    keys: float
    cache_tokens: int
    sequences: int
    tensor_parallel: int
    obstacle: str


def uses_vllm(config: Config) -> bool:
    """Whether vLLM samples, on a GPU where it is installed."""
    return config.worker.rollout.name != "transformers"


def engine_of(config: Config, gpu: Gpu, sizes: ModelSizes) -> Engine:
    """vLLM on each GPU of a run. Its work is an estimate: a pass of `max_num_batched_tokens`, and sampling."""
    rollout = config.worker.rollout
    size = DTYPES[rollout.dtype].itemsize
    parallel = min(rollout.tensor_parallel_size, config.engine_devices)
    share = rollout.gpu_memory_utilization * gpu.bytes
    weights = size * sizes.parameters / parallel
    sequences = max_sequences(config)
    layers = layer_forward_bytes(sizes.config, Pass(size, size, compiled=True))
    work = rollout.max_num_batched_tokens * layers / parallel + _SAMPLER * sequences * sizes.text.vocab_size
    keys = share - weights - work
    # An engine's GPUs divide the heads of keys among them; where they are more than the heads, copies.
    of_token = sizes.key_bytes * size / 2 / min(parallel, sizes.text.num_key_value_heads)
    tokens = int(max(keys, 0.0) / of_token)
    longest = rollout.max_model_len or config.data.max_sequence_length
    obstacle = ""
    if tokens < longest:
        key = "worker.rollout.gpu_memory_utilization"
        obstacle = (
            f"vLLM: {key}={rollout.gpu_memory_utilization:g} leaves room for the keys of {tokens:,} tokens, but one "
            f"sequence may have {longest:,}"
        )
    return Engine(share, weights, work, keys, tokens, sequences, parallel, obstacle)


def transformers_batch_bytes(config: Config, sizes: ModelSizes, lengths: Lengths, room: float) -> float:
    """Bytes of the prompts that the trainer's own module answers at once: what of a step fits half of the room, one
    prompt at least."""
    actor, n = config.worker.actor, config.worker.rollout.n
    weights = DTYPES[actor.weights_dtype("cuda")].itemsize
    cache = min(weights, DTYPES[actor.fsdp.mp_param_dtype].itemsize)
    each = bytes_of_prompt(sizes.text, lengths.prompt, n, lengths.answer, cache=cache, weights=weights)
    prompts = -(-config.data.rollout_batch_size // config.trainer.devices)
    return float(each * max(1, min(prompts, int(FREE_FRACTION * room / each))))
