"""vLLM's errors in terms of the configuration; the texts are those of 0.25.1 and 0.32.0."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from foveal.config import load_config
from foveal.rollout.vllm_failures import explain_failure
from tests.small_run import small_run

GIB = 2**30
MEMORY = (12 * GIB, 140 * GIB)
TOO_LONG = (
    "To serve at least one request with the model's max seq len (1024), (1.43 GiB KV cache is needed, which is larger "
    "than the available KV cache memory (1.0 GiB). Based on the available memory, the estimated maximum model length "
    "is 704. Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or decreasing "
    "`max_model_len` when initializing the engine."
)


def explain(text: str, *overrides: str, memory: tuple[int, int] | None = MEMORY, kind: type = ValueError) -> str:
    return explain_failure(kind(text), load_config(["worker.rollout.n=2", *overrides]), memory=memory)


def test_a_device_that_others_use_too() -> None:
    said = explain(
        "Free memory on device cuda:0 (69.5/139.8 GiB) on startup is less than desired GPU memory utilization "
        "(0.6, 83.88 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
    )
    assert "worker.rollout.gpu_memory_utilization=0.6 asks for 83.88 of 139.8 GiB on cuda:0" in said
    assert "69.5 GiB are free" in said and "to 0.48 or less" in said


def test_a_full_device_offers_no_smaller_share() -> None:
    said = explain(
        "Free memory on device cuda:0 (1.2/139.8 GiB) on startup is less than desired GPU memory utilization "
        "(0.6, 83.88 GiB)."
    )
    assert "nvidia-smi" in said and "or less" not in said


def test_no_memory_for_keys_and_values() -> None:
    text = "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing"
    said = explain(text, "worker.rollout.gpu_memory_utilization=0.1")
    assert "14.0 of 140.0 GiB (worker.rollout.gpu_memory_utilization=0.1)" in said
    assert "worker.rollout.max_num_batched_tokens=8192" in said


def test_a_sequence_that_does_not_fit_names_lengths_and_the_share_that_would_do() -> None:
    said = explain(TOO_LONG, "worker.rollout.gpu_memory_utilization=0.2")
    assert "1024 tokens (data.max_prompt_length=512 and data.max_response_length=512)" in said
    assert "1.43 GiB" in said and "has 1 GiB, enough for 704 tokens" in said
    assert "Raise worker.rollout.gpu_memory_utilization to 0.22" in said


def test_a_sequence_that_no_share_of_the_device_would_hold() -> None:
    said = explain(TOO_LONG, "worker.rollout.gpu_memory_utilization=0.95", "worker.rollout.max_model_len=1024")
    assert "worker.rollout.max_model_len=1024" in said and "a device with more memory" in said


@pytest.mark.parametrize("text", ["CUDA out of memory. Tried to allocate 2.00 GiB.", "CUDA Error: out of memory at x"])
def test_a_device_without_memory(text: str) -> None:
    said = explain(text, kind=RuntimeError)
    assert "12.0 of 140.0 GiB are free" in said and "allowed 84.0 of 140.0 GiB" in said
    assert "worker.rollout.max_num_batched_tokens=8192" in said


def test_lengths_beyond_the_models_own() -> None:
    said = explain(
        "1 validation error for ModelConfig\n  Value error, User-specified max_model_len (1024) is greater than the "
        "derived max_model_len (max_position_embeddings=512.0 or model_max_length=None in model's config.json)."
    )
    assert "1024 tokens" in said and "max_position_embeddings=512" in said and "data.max_response_length" in said


def test_memory_that_moved_while_it_was_measured() -> None:
    assert "another process" in explain("Memory usage increased after sleeping.", kind=AssertionError)


@pytest.mark.parametrize(
    "text",
    [
        "1 validation error for VllmConfig\n  Value error, Total number of attention heads (28) must be divisible by "
        "tensor parallel size (8).",
        "28 is not divisible by 8",
    ],
)
def test_heads_that_processes_cannot_share(text: str) -> None:
    assert "worker.rollout.tensor_parallel_size=8 does not divide 28" in explain(text, kind=AssertionError)


@pytest.mark.parametrize(("starting", "verb"), [(True, "did not start"), (False, "failed")])
def test_anything_else_is_told_as_it_is(starting: bool, verb: str) -> None:
    config = load_config(["worker.rollout.n=2"])
    said = explain_failure(KeyError("blocks"), config, starting=starting, memory=MEMORY)
    assert f"the vLLM engine {verb}: KeyError: 'blocks'\n" in said and "VLLM_LOGGING_LEVEL=INFO" in said


START = """
import sys, torch
from foveal.config import load_config
from foveal.data.processing import load_processing
from foveal.rollout.vllm_failures import explain_failure
from foveal.rollout.vllm_setup import engine_arguments, prepare_environment

config = load_config(sys.argv[1:])
model = config.worker.actor.model.model_path
prepare_environment("cpu")
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

made = engine_arguments(config, load_processing(model), model, "cpu", images=0).create_engine_config()
try:
    EngineCore(made, Executor.get_class(made), log_stats=False)
except Exception as error:
    print(explain_failure(error, config, starting=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gib", "length", "said"),
    [
        ("0", 8, ["no memory for keys and values", "VLLM_CPU_KVCACHE_SPACE"]),
        ("100000", 8, ["100000 GiB", "Set a smaller VLLM_CPU_KVCACHE_SPACE"]),
        ("1", 3_000_000, ["3000128 tokens", "vLLM has 1 GiB", "VLLM_CPU_KVCACHE_SPACE in the environment to 2"]),
    ],
)
def test_a_real_engine_without_enough_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: str, length: int, said: list[str]
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", gib)
    positions = "worker.actor.model.override_config={max_position_embeddings: 4000000}"
    keys = [f"data.max_response_length={length}", positions]
    command = [sys.executable, "-c", START, *small_run(tmp_path, "qwen3", *keys)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert all(text in done.stdout for text in said), done.stdout + done.stderr[-3000:]
