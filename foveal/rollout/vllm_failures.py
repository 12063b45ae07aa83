"""What vLLM's errors mean in terms of the configuration."""

from __future__ import annotations

import math
import os
import re
import traceback
from collections.abc import Callable

from foveal.config import Config

_GIB = 2**30
_UTILIZATION = "worker.rollout.gpu_memory_utilization"
_CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"

Memory = tuple[int, int]
"""Free and total bytes of the device."""


def explain_failure(
    error: BaseException, config: Config, *, starting: bool = False, memory: Memory | None = None
) -> str:
    """One message about an exception that vLLM raised: what is short, in numbers, and which keys to change.

    Args:
        starting: whether the engine was being started, or at work.
        memory: free and total bytes of the device; None asks the device, where there is one.
    """
    memory = memory or _device_memory()
    text = str(error)
    for pattern, explain in _EXPLANATIONS:
        found = re.search(pattern, text, re.DOTALL)
        if found:
            return explain(found, config, memory)
    first = text.strip().splitlines()[0] if text.strip() else "no message"
    return (
        f"the vLLM engine {'did not start' if starting else 'failed'}: {type(error).__name__}: {first}{_place(error)}\n"
        "VLLM_LOGGING_LEVEL=INFO in the environment shows what it did. worker.rollout.name=transformers needs none."
    )


def _place(error: BaseException) -> str:
    """Where it was raised, for errors that say little themselves."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    return f" ({frames[-1].filename.rpartition('site-packages/')[2]}:{frames[-1].lineno})"


def _device_memory() -> Memory | None:
    import torch

    return torch.cuda.mem_get_info() if torch.cuda.is_available() else None


def _too_little_free(found: re.Match[str], config: Config, memory: Memory | None) -> str:
    device, free, total, asked = found[1], float(found[2]), float(found[3]), float(found[4])
    below = math.floor(100 * free / total - 1) / 100
    lower = f", or set {_UTILIZATION} to {below:g} or less" if below >= 0.05 else ""
    return (
        f"vLLM cannot have its memory: {_UTILIZATION}={config.worker.rollout.gpu_memory_utilization:g} asks for "
        f"{asked:g} of {total:g} GiB on {device}, of which {free:g} GiB are free. End what else runs there "
        f"(nvidia-smi lists it){lower}."
    )


def _nothing_left(found: re.Match[str], config: Config, memory: Memory | None) -> str:
    if memory is None:
        return f"vLLM has no memory for keys and values: set {_CPU_CACHE} (GiB) in the environment to 1 or more."
    rollout = config.worker.rollout
    return (
        f"vLLM has no memory left for keys and values: weights and its largest pass "
        f"(worker.rollout.max_num_batched_tokens={rollout.max_num_batched_tokens}) fill {_allowed(config, memory)}. "
        f"Raise {_UTILIZATION}, or lower worker.rollout.max_num_batched_tokens."
    )


def _sequence_too_long(found: re.Match[str], config: Config, memory: Memory | None) -> str:
    needed, available, fitting = float(found[2]), float(found[3]), found[4]
    if memory is None:
        now = os.environ.get(_CPU_CACHE)
        more = f"set {_CPU_CACHE} in the environment to {math.ceil(needed)} (GiB{f', now {now}' if now else ''})"
    else:
        used = config.worker.rollout.gpu_memory_utilization
        enough = math.ceil(100 * (used + (needed - available) * _GIB / memory[1]) + 1) / 100
        more = f"raise {_UTILIZATION} to {enough:g}" if enough <= 0.95 else "take a device with more memory"
    room = f", enough for {fitting} tokens" if fitting else ""
    within = f" within {_allowed(config, memory)}" if memory else ""
    return (
        f"one sequence of {found[1]} tokens ({_longest(config)}) needs {needed:g} GiB for keys and values, and vLLM "
        f"has {available:g} GiB{room}{within}. {_capital(more)}, or lower data.max_prompt_length or "
        "data.max_response_length."
    )


def _cpu_memory(found: re.Match[str], config: Config, memory: Memory | None) -> str:
    return (
        f"vLLM's memory for keys and values, {float(found[3]):g} GiB ({_CPU_CACHE} in the environment), is more than "
        f"the {float(found[1]):g} GiB that are free of {float(found[2]):g} GiB. Set a smaller {_CPU_CACHE}."
    )


def _out_of_memory(found: re.Match[str], config: Config, memory: Memory | None) -> str:
    tokens = config.worker.rollout.max_num_batched_tokens
    state = f" ({memory[0] / _GIB:.1f} of {memory[1] / _GIB:.1f} GiB are free)" if memory else ""
    allowed = f"; vLLM was allowed {_allowed(config, memory)}" if memory else ""
    return (
        f"the device has no memory left for vLLM{state}{allowed}. Lower {_UTILIZATION} where the trainer or another "
        "process holds the rest, or else what a pass takes: "
        f"worker.rollout.max_num_batched_tokens={tokens}, data.max_pixels."
    )


def _beyond_the_model(found: re.Match[str], config: Config, memory: Memory | None) -> str:
    return (
        f"sequences of {found[1]} tokens ({_longest(config)}) are longer than the model was made for ({found[2]} in "
        "its config.json). Lower data.max_prompt_length or data.max_response_length."
    )


def _not_divisible(found: re.Match[str], config: Config, memory: Memory | None) -> str:
    return (
        f"worker.rollout.tensor_parallel_size={found[2]} does not divide {found[1]}, the number of heads or columns of "
        "a layer of the model. Set it to a number that does; 1 always does."
    )


def _disturbed(found: re.Match[str], config: Config, memory: Memory | None) -> str:
    return (
        f"the free memory of the device changed while vLLM measured it (it says: {found[0]}): another process uses the "
        "same device. Give the run a device of its own."
    )


_EXPLANATIONS: tuple[tuple[str, Callable[[re.Match[str], Config, Memory | None], str]], ...] = (
    (
        r"Free memory on device (\S+) \(([\d.]+)/([\d.]+) GiB\) on startup is less than desired GPU memory "
        r"utilization \([\d.]+, ([\d.]+) GiB\)",
        _too_little_free,
    ),
    (r"No available memory for the cache blocks", _nothing_left),
    (
        r"max seq len \((\d+)\), \(?([\d.]+) GiB KV cache is needed.*?KV cache memory \(([\d.]+) GiB\)"
        r"(?:.*?maximum model length is (\d+))?",
        _sequence_too_long,
    ),
    (
        r"Available memory on node \d+ \(([\d.]+)/([\d.]+) GiB\) on kv cache allocation is less than requested "
        r"memory for kv \(([\d.]+)",
        _cpu_memory,
    ),
    (r"(?i)out of memory|not enough GPU memory", _out_of_memory),
    (r"max_model_len \((\d+)\) is greater than the derived max_model_len \((\w+=[\w.]+)", _beyond_the_model),
    (r"(\d+)\)? (?:is not|must be) divisible by (?:tensor parallel size \()?(\d+)", _not_divisible),
    (r"Memory usage increased after sleeping|Error in memory profiling", _disturbed),
)
"""What vLLM 0.25 and 0.32 write, and who explains it."""


def _allowed(config: Config, memory: Memory) -> str:
    used = config.worker.rollout.gpu_memory_utilization
    return f"{used * memory[1] / _GIB:.1f} of {memory[1] / _GIB:.1f} GiB ({_UTILIZATION}={used:g})"


def _longest(config: Config) -> str:
    data, given = config.data, config.worker.rollout.max_model_len
    if given is not None:
        return f"worker.rollout.max_model_len={given}"
    return f"data.max_prompt_length={data.max_prompt_length} and data.max_response_length={data.max_response_length}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
