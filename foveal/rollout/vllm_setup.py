"""What vLLM is started with: its environment, and its arguments from the configuration."""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

from foveal.config import Config
from foveal.data.processing import Processing
from foveal.errors import ConfigError
from foveal.rollout.vllm_available import TESTED, vllm_version
from foveal.rollout.vllm_lora import AdapterShape

MAX_SEQUENCES = 2048
"""Answers sampled side by side. Beyond it a pass is no longer bound by the host but by arithmetic, while the logits of
a pass (one row of the vocabulary for each, in float32, several times over) go on growing."""
UNKNOWN_SEQUENCES = 512
"""The same where validation takes all rows at once, however many there are."""
STEPS_OF_PICTURES = 4
CPU_CACHE_GIB = "2"

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SPEED_ONLY = {
    "async_scheduling",
    "compilation_config",
    "disable_log_stats",
    "enable_prefix_caching",
    "max_num_batched_tokens",
    "mm_processor_cache_gb",
    "mm_processor_kwargs",
}
"""Arguments that a version may lack at no cost but speed."""
_NEWER = {"mm_device_do_normalize"}
"""Arguments that switch off what older versions do not have."""


def prepare_environment(device_type: str) -> None:
    """Sets the environment variables that must be there before vllm is imported.

    What the user has set stays, but for VLLM_ENABLE_V1_MULTIPROCESSING: with an engine in another process there would
    be nothing to hand weights to.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings speak of arguments that the user never gave
        "VLLM_NO_USAGE_STATS": "1",
        # Both write into memory of another process's device, which this one doesn't see. 0.32 takes the second unasked.
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    }
    if device_type == "cpu":
        defaults["VLLM_CPU_KVCACHE_SPACE"] = CPU_CACHE_GIB
    if not sys.stderr.isatty():
        defaults["TQDM_DISABLE"] = "1"  # its progress bars would fill a log file
    if find_spec("flashinfer") is None:
        defaults["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """While vLLM is imported and started: torch's and its own warnings about their internals help nobody."""
    torch_log = logging.getLogger("torch")
    level = torch_log.level
    torch_log.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch_log.setLevel(level)


def engine_arguments(
    config: Config,
    processing: Processing,
    model_path: str,
    device_type: str,
    images: int,
    processes: int = 1,
    adapter: AdapterShape | None = None,
) -> Any:
    """vLLM's `EngineArgs` for this run. Call `prepare_environment` before.

    Args:
        model_path: a Hugging Face folder or hub id: configuration, and for VLMs tokenizer and processor, are read.
        images: most pictures in a prompt.
        processes: of torch.distributed, where it is initialised.
        adapter: that the engine is to apply itself.

    Raises:
        ConfigError: the installed version lacks an argument that the engine cannot do without, or the processes cannot
            be divided into engines.
    """
    from vllm.config.compilation import PassConfig
    from vllm.engine.arg_utils import EngineArgs

    wanted = wanted_arguments(config, processing, model_path, device_type, images, processes, adapter)
    if passes := wanted.get("compilation_config", {}).get("pass_config"):
        for name in passes.keys() - {field.name for field in fields(PassConfig)}:
            del passes[name]  # a version without a pass needs no word that it is off, and refuses it
    return EngineArgs(**keep_known(wanted, {field.name for field in fields(EngineArgs)}))


def wanted_arguments(
    config: Config,
    processing: Processing,
    model_path: str,
    device_type: str,
    images: int,
    processes: int = 1,
    adapter: AdapterShape | None = None,
) -> dict[str, Any]:
    """The arguments of `engine_arguments` by name, whether or not a version knows them."""
    rollout, model, cuda = config.worker.rollout, config.worker.actor.model, device_type == "cuda"
    sequences = max_sequences(config)
    answer = max(config.data.max_response_length, rollout.val_sampling.get("max_tokens", 0))
    length = rollout.max_model_len or config.data.max_prompt_length + answer
    arguments: dict[str, Any] = {
        "model": model_path,
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": dict(model.override_config),
        "generation_config": "vllm",  # not the model's own, which would change how answers are sampled
        "load_format": "dummy",  # the trainer's weights come before the first answer
        "dtype": _dtype(config, device_type),
        "seed": 0,
        "max_model_len": length,
        "max_num_seqs": sequences,
        # vLLM warns of more tokens than its sequences can have; they would only make its memory profile larger.
        "max_num_batched_tokens": min(rollout.max_num_batched_tokens, sequences * length),
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enforce_eager": rollout.enforce_eager or not cuda,
        "enable_prefix_caching": True,  # the answers to a prompt share its keys and values
        "logprobs_mode": "processed_logprobs",  # those of the distribution that is sampled from
        "disable_log_stats": True,
        "mm_device_do_normalize": False,  # pictures come normalised
    }
    if cuda:
        arguments |= {"enable_sleep_mode": True, "async_scheduling": True}
    if not arguments["enforce_eager"]:
        sizes = capture_sizes(sequences)
        arguments["compilation_config"] = {
            "cudagraph_capture_sizes": sizes,
            "max_cudagraph_capture_size": sizes[-1],
        }
        if processes > 1:  # these kernels too write into the memory of other processes' devices
            arguments["compilation_config"]["pass_config"] = {"fuse_allreduce_rms": False, "fuse_gemm_comms": False}
    if processes > 1:
        arguments |= {
            "tensor_parallel_size": _tensor_parallel_size(config, processes),
            "distributed_executor_backend": "external_launcher",  # the processes are there already
            # It looks for the other processes' devices, and each of them sees its own alone.
            "disable_custom_all_reduce": True,
        }
    if adapter:
        arguments |= adapter.arguments(device_type)
    if processing.processor is None:
        return arguments | {"skip_tokenizer_init": True}
    return arguments | _media_arguments(config, processing.processor, model_path, images)


def create_config(arguments: Any, longest_prompt: int) -> Any:
    """vLLM's `VllmConfig`, with room for the pictures of several steps, and for a video that fills a prompt.

    Its own size, the tokens of one step, is taken up by pictures whose step is still under way, and admission stalls. A
    video is computed in one step; one that is larger than its bound would wait forever.

    Args:
        longest_prompt: tokens that one may have, `data.max_prompt_length`.
    """
    config = arguments.create_engine_config()
    scheduler = config.scheduler_config
    scheduler.max_num_encoder_input_tokens = max(scheduler.max_num_encoder_input_tokens, longest_prompt)
    scheduler.encoder_cache_size = max(STEPS_OF_PICTURES * scheduler.max_num_batched_tokens, longest_prompt)
    return config


def keep_known(arguments: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Drops arguments that the installed version doesn't know, where that costs nothing but speed.

    Raises:
        ConfigError: it lacks one that matters.
    """
    lacking = sorted(arguments.keys() - set(known) - _SPEED_ONLY - _NEWER)
    if lacking:
        raise ConfigError(
            f"vLLM {vllm_version()} has no engine argument {', '.join(lacking)}, which this version of Foveal needs. "
            f"Tested: {', '.join(f'{version}.x' for version in TESTED)}. Install one of these, or set "
            "worker.rollout.name=transformers."
        )
    return {name: value for name, value in arguments.items() if name in known}


def max_sequences(config: Config) -> int:
    """Answers that one engine samples side by side: the largest generation call of the run, where that is sensible."""
    data, rollout, trainer = config.data, config.worker.rollout, config.trainer
    engines = max(config.engine_devices // rollout.tensor_parallel_size, 1)
    calls = []
    if not trainer.val_only:
        calls.append((data.mini_rollout_batch_size or data.rollout_batch_size) * rollout.n)
    if data.val_files:
        rows = data.val_batch_size
        calls.append(rows * rollout.val_sampling["n"] if rows > 0 else UNKNOWN_SEQUENCES * engines)
    share = math.ceil(max(calls, default=1) / engines)
    # vLLM asks for a token for every sequence in a pass.
    return min(share, MAX_SEQUENCES, rollout.max_num_batched_tokens)


def capture_sizes(largest: int) -> list[int]:
    """Batch sizes that CUDA graphs are captured for; a batch runs with the next larger one, padded.

    vLLM's own list ends at 512, and larger batches then run without graphs, at 60 % of the speed. Each graph takes
    memory and time at the start, so steps above 128 grow with the size: at most an eighth of it.
    """
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + sizes[-1] // 64 * 8)
    return [*(size for size in sizes if size < largest), largest]


def _tensor_parallel_size(config: Config, processes: int) -> int:
    size = min(config.worker.rollout.tensor_parallel_size, processes)
    if processes % size:
        divisors = [str(d) for d in range(1, processes + 1) if processes % d == 0]
        raise ConfigError(
            f"worker.rollout.tensor_parallel_size={size}: the {processes} processes of this run cannot be divided into "
            f"engines of {size}. Set it to {', '.join(divisors[:-1])} or {divisors[-1]}."
        )
    return size


def _dtype(config: Config, device_type: str) -> str:
    if device_type == "cpu" and "worker.rollout.dtype" not in config.given:
        return "float32"  # bf16, the default, is for GPUs; most CPUs emulate it
    return _DTYPES[config.worker.rollout.dtype]


def _media_arguments(config: Config, processor: Any, model_path: str, images: int) -> dict[str, Any]:
    """The arguments of a VLM: what its memory is measured with, since pictures themselves come processed."""
    arguments: dict[str, Any] = {
        # vLLM builds the model's processor at the start, which needs one.
        "tokenizer": config.worker.actor.model.tokenizer_path or model_path,
        "mm_processor_cache_gb": 0,
        # How many come is not checked, since they come processed. A video's memory is that of pictures of as many
        # tokens, and its room is made in `create_config`; measuring with videos as well would only take time.
        "limit_mm_per_prompt": {"image": config.worker.rollout.limit_images or max(images, 1), "video": 0},
    }
    image_processor = processor.image_processor
    size = image_processor.size
    if "longest_edge" in size:  # a number of pixels, in spite of the name
        # A picture of more tokens than a prompt may have never comes.
        pixels_per_token = (image_processor.patch_size * image_processor.merge_size) ** 2
        largest = min(size["longest_edge"], config.data.max_prompt_length * pixels_per_token)
        arguments["mm_processor_kwargs"] = {
            "min_pixels": min(size["shortest_edge"], largest),
            "max_pixels": largest,
        }
    return arguments
