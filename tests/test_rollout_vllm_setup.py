"""What vLLM is started with."""

from __future__ import annotations

import os
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from foveal.config import load_config
from foveal.data.processing import Processing, load_processing
from foveal.errors import ConfigError
from foveal.quickstart.tiny import build_tiny
from foveal.rollout.vllm_setup import (
    MAX_SEQUENCES,
    UNKNOWN_SEQUENCES,
    capture_sizes,
    engine_arguments,
    keep_known,
    max_sequences,
    prepare_environment,
    wanted_arguments,
)
from tests.small_run import small_run


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Processing:
    return load_processing(str(build_tiny(tmp_path_factory.mktemp("vlm"), "qwen2_5_vl")), max_pixels=200704)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Processing:
    return load_processing(str(build_tiny(tmp_path_factory.mktemp("text"), "qwen3")))


def arguments(
    processing: Processing, *overrides: str, device: str = "cuda", images: int = 1, processes: int = 1
) -> dict[str, Any]:
    config = load_config(["worker.rollout.n=2", "trainer.n_gpus_per_node=1", *overrides])
    return wanted_arguments(config, processing, "/the/model", device, images, processes)


def test_weights_come_from_the_trainer_and_logprobs_from_what_is_sampled(text: Processing) -> None:
    given = arguments(text)
    assert given["model"] == "/the/model" and given["load_format"] == "dummy"
    assert given["logprobs_mode"] == "processed_logprobs" and given["generation_config"] == "vllm"


def test_keys_of_the_configuration_arrive(text: Processing) -> None:
    given = arguments(
        text,
        "worker.rollout.gpu_memory_utilization=0.4",
        "worker.rollout.max_num_batched_tokens=4096",
        "worker.rollout.enforce_eager=true",
        "worker.rollout.dtype=fp16",
        "worker.actor.model.trust_remote_code=true",
        "worker.actor.model.override_config={rope_theta: 5}",
    )
    names = "gpu_memory_utilization max_num_batched_tokens enforce_eager dtype trust_remote_code hf_overrides"
    assert [given[name] for name in names.split()] == [0.4, 4096, True, "float16", True, {"rope_theta": 5}]
    assert "compilation_config" not in given


def test_the_longest_sequence_is_the_engines_own_key_or_prompt_and_answer(text: Processing) -> None:
    limits = ["data.max_prompt_length=100", "data.max_response_length=50"]
    assert arguments(text, *limits)["max_model_len"] == 150
    assert arguments(text, *limits, "worker.rollout.max_model_len=200")["max_model_len"] == 200


def test_a_cpu_computes_in_float32_unless_told_otherwise(text: Processing) -> None:
    assert arguments(text, device="cpu")["dtype"] == "float32"
    assert arguments(text, "worker.rollout.dtype=bf16", device="cpu")["dtype"] == "bfloat16"
    assert arguments(text)["dtype"] == "bfloat16"


def test_a_cpu_gets_nothing_that_is_for_gpus(text: Processing) -> None:
    given = arguments(text, device="cpu")
    assert given["enforce_eager"] is True
    assert not {"enable_sleep_mode", "async_scheduling", "compilation_config"} & given.keys()
    assert arguments(text)["enable_sleep_mode"] is True


def test_a_text_model_needs_no_tokenizer_and_a_vlm_its_own(text: Processing, vlm: Processing) -> None:
    assert arguments(text)["skip_tokenizer_init"] is True
    assert "limit_mm_per_prompt" not in arguments(text)
    assert arguments(vlm)["tokenizer"] == "/the/model" and "skip_tokenizer_init" not in arguments(vlm)
    assert arguments(vlm, "worker.actor.model.tokenizer_path=/other")["tokenizer"] == "/other"


@pytest.mark.parametrize(("images", "limit", "expected"), [(0, 0, 1), (3, 0, 3), (3, 5, 5)])
def test_room_for_pictures_is_the_key_or_what_the_data_has(
    vlm: Processing, images: int, limit: int, expected: int
) -> None:
    given = arguments(vlm, f"worker.rollout.limit_images={limit}", images=images)
    assert given["limit_mm_per_prompt"] == {"image": expected, "video": 0}


@pytest.mark.parametrize(("prompt", "largest"), [(2048, 200704), (64, 64 * 28 * 28)])
def test_memory_is_measured_with_the_largest_picture_that_can_come(vlm: Processing, prompt: int, largest: int) -> None:
    kwargs = arguments(vlm, f"data.max_prompt_length={prompt}")["mm_processor_kwargs"]
    assert kwargs["max_pixels"] == largest >= kwargs["min_pixels"] > 0


@pytest.mark.parametrize(("key", "processes", "size"), [(2, 2, 2), (4, 2, 2), (2, 6, 2), (1, 3, 1), (2, 1, 1)])
def test_several_processes_share_an_engine(text: Processing, key: int, processes: int, size: int) -> None:
    given = arguments(text, f"worker.rollout.tensor_parallel_size={key}", processes=processes)
    assert given.get("tensor_parallel_size", 1) == size
    assert given.get("distributed_executor_backend") == ("external_launcher" if processes > 1 else None)


def test_processes_of_one_engine_keep_to_devices_that_they_see(text: Processing) -> None:
    given = arguments(text, "worker.rollout.tensor_parallel_size=2", processes=2)
    assert given["disable_custom_all_reduce"]
    assert given["compilation_config"]["pass_config"] == {"fuse_allreduce_rms": False, "fuse_gemm_comms": False}
    alone = arguments(text)
    assert "disable_custom_all_reduce" not in alone and "pass_config" not in alone["compilation_config"]


def test_processes_that_cannot_be_divided_into_engines(text: Processing) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4: the 6 processes.*Set it to 1, 2, 3 or 6\."):
        arguments(text, "worker.rollout.tensor_parallel_size=4", processes=6)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["data.rollout_batch_size=256"], 256 * 5),
        (["data.rollout_batch_size=256", "data.mini_rollout_batch_size=100"], 500),
        (["data.rollout_batch_size=256", "trainer.n_gpus_per_node=3"], 427),
        (["data.rollout_batch_size=256", "trainer.n_gpus_per_node=4", "worker.rollout.tensor_parallel_size=2"], 640),
        (["data.val_files=x", "data.val_batch_size=300", "worker.rollout.val_override_config={n: 6}"], 1800),
        (["data.val_files=x", "data.val_batch_size=-1", "trainer.val_only=true"], UNKNOWN_SEQUENCES),
        (["data.val_files=x", "data.val_batch_size=7", "trainer.val_only=true"], 7),
        (["data.rollout_batch_size=4096"], MAX_SEQUENCES),
        (["data.rollout_batch_size=256", "worker.rollout.max_num_batched_tokens=600"], 600),
    ],
)
def test_the_largest_call_is_sampled_side_by_side(keys: list[str], expected: int) -> None:
    base = ["worker.rollout.n=5", "trainer.n_gpus_per_node=1", "worker.rollout.tensor_parallel_size=1"]
    small = ["data.rollout_batch_size=128", "worker.actor.global_batch_size=128"]
    assert max_sequences(load_config([*base, *small, *keys])) == expected


def test_no_more_tokens_in_a_pass_than_its_sequences_can_have(text: Processing) -> None:
    few = ["data.val_files=x", "data.val_batch_size=4", "trainer.val_only=true"]
    assert arguments(text, *few, "data.max_response_length=8")["max_num_batched_tokens"] == 4 * (512 + 8)


@pytest.mark.parametrize("largest", [1, 3, 8, 100, 128, 130, 512, 1280, MAX_SEQUENCES])
def test_captured_batch_sizes_end_at_the_largest_and_are_close(largest: int) -> None:
    sizes = capture_sizes(largest)
    assert sizes[-1] == largest and sizes == sorted(set(sizes)) and sizes[0] == 1
    assert all(b <= a * 1.125 for a, b in pairwise(sizes) if a >= 128)
    assert len(sizes) <= 40


def test_what_only_makes_it_faster_may_be_missing_and_the_rest_may_not() -> None:
    known = keep_known({"model": "m", "compilation_config": {}}, {"model"})
    assert known == {"model": "m"}
    with pytest.raises(ConfigError, match=r"no engine argument logprobs_mode.*0\.25\.x, 0\.32\.x"):
        keep_known({"model": "m", "logprobs_mode": "x"}, {"model"})


def test_the_environment_is_set_but_for_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"VLLM_LOGGING_LEVEL": "DEBUG"})
    prepare_environment("cpu")
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert int(os.environ["VLLM_CPU_KVCACHE_SPACE"]) > 0
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"


def test_no_all_reduce_of_vllms_own_is_left_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them write into the memory of other processes' devices, which a process does not see."""
    envs = pytest.importorskip("vllm.envs")
    monkeypatch.setattr(os, "environ", os.environ.copy())
    known = [name for name in envs.environment_variables if name.startswith("VLLM_ALLREDUCE_USE_")]
    for name in known:
        os.environ.pop(name, None)
    prepare_environment("cuda")
    assert known and not any(envs.environment_variables[name]() for name in known)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_installed_vllm_knows_every_argument(vlm: Processing, text: Processing, device: str) -> None:
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    known = {field.name for field in fields(arg_utils.EngineArgs)}
    for processing in (vlm, text):
        wanted = arguments(processing, "trainer.n_gpus_per_node=2", device=device, processes=2)
        assert wanted.keys() - known <= {"mm_device_do_normalize"}, "0.25 has no such normalisation to switch off"


def test_the_installed_vllm_accepts_what_several_processes_are_started_with(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    model = str(build_tiny(tmp_path, "qwen3"))
    config = load_config(["worker.rollout.n=2", "worker.rollout.tensor_parallel_size=2", "trainer.n_gpus_per_node=2"])
    given = engine_arguments(config, load_processing(model), model, "cuda", images=0, processes=2)
    assert given.compilation_config.pass_config.fuse_allreduce_rms is False


@pytest.mark.slow
def test_the_installed_vllm_accepts_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr(os, "environ", os.environ.copy())
    prepare_environment("cpu")
    config = load_config(small_run(tmp_path, "qwen3_vl"))
    model = str(config.worker.actor.model.model_path)
    processing = load_processing(model, max_pixels=config.data.max_pixels)
    made = engine_arguments(config, processing, model, "cpu", images=1).create_engine_config()
    assert made.scheduler_config.max_num_seqs == 16
    assert made.model_config.max_model_len == 136
    assert made.model_config.multimodal_config.mm_processor_kwargs["max_pixels"] <= 200704
