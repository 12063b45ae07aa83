"""Rules between keys, what this version refuses to start, and what it says about keys without effect."""

from __future__ import annotations

from typing import Literal, TypeAlias

import pytest

from foveal.config import Config, load_config
from foveal.config.rules import missing, no_effect, remarks, unsupported
from foveal.config.schema_data import GROUP_ESTIMATORS
from foveal.errors import ConfigError

Engine: TypeAlias = Literal["vllm", "transformers"]


def load(*argv: str) -> Config:
    config = load_config(["worker.rollout.n=2", *argv])
    if config.trainer.n_gpus_per_node == -1:
        config.trainer.n_gpus_per_node = 8  # as if so many were found
    return config


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    return str(caught.value)


def test_batches_that_do_not_divide_name_both_values_and_the_neighbours() -> None:
    text = refusal("data.rollout_batch_size=512", "worker.actor.global_batch_size=100")
    assert "data.rollout_batch_size: 512" in text and "worker.actor.global_batch_size (100)" in text
    assert "500 or 600" in text


def test_a_batch_below_one_optimizer_step_names_the_only_neighbour() -> None:
    assert "set it to 256, or" in refusal("data.rollout_batch_size=100")


def test_nothing_divides_by_devices() -> None:
    config = load("data.rollout_batch_size=512", "worker.actor.global_batch_size=512", "trainer.n_gpus_per_node=6")
    assert config.trainer.devices == 6


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_group_estimators_need_groups(estimator: str) -> None:
    text = refusal("worker.rollout.n=1", f"algorithm.adv_estimator={estimator}", "algorithm.reward_parts={x: 1}")
    assert "worker.rollout.n: 1 given" in text and f"algorithm.adv_estimator={estimator}" in text


@pytest.mark.parametrize("change", ["algorithm.adv_estimator=reinforce_plus_plus", "trainer.val_only=true"])
def test_groups_of_one_are_fine_elsewhere(change: str) -> None:
    assert load("worker.rollout.n=1", change).worker.rollout.n == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["worker.rollout.max_model_len=1000"], "worker.rollout.max_model_len: 1000 is below"),
        (["data.mini_rollout_batch_size=600"], "data.mini_rollout_batch_size: 600 is above"),
        (["algorithm.filter_low=0.5", "algorithm.filter_high=0.5"], "algorithm.filter_low: 0.5 must be below"),
        (["data.min_pixels=100", "data.max_pixels=99"], "data.min_pixels: 100 is above data.max_pixels (99)"),
        (["worker.rollout.temperature=0"], "worker.rollout.temperature: 0 given"),
        (
            ["worker.rollout.val_override_config={temperature: -1}"],
            "val_override_config.temperature: -1 given",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(argv: list[str], said: str) -> None:
    assert said in refusal(*argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["worker.rollout.max_model_len=1024"],
        ["data.mini_rollout_batch_size=1024", "algorithm.online_filtering=true"],
        ["worker.rollout.temperature=0", "trainer.val_only=true"],
        ["worker.rollout.val_override_config={temperature: 0, min_p: 0.1}"],
        ["worker.rollout.tensor_parallel_size=16", "worker.rollout.name=vllm"],
        ["worker.actor.clip_ratio_low=0", "worker.actor.clip_ratio_high=4", "worker.actor.loss_type=cispo"],
    ],
)
def test_values_that_go_together_are_accepted(argv: list[str]) -> None:
    load(*argv)


@pytest.mark.parametrize(
    "argument",
    [
        "worker.actor.fsdp.torch_dtype=fp16",
        "worker.actor.fsdp.mp_param_dtype=fp16",
    ],
)
def test_what_this_version_lacks_loads_and_is_refused_at_the_start(argument: str) -> None:
    one_process = ["trainer.n_gpus_per_node=1", "worker.rollout.tensor_parallel_size=1"]
    (line,) = unsupported(load(*one_process, "algorithm.use_kl_loss=true", argument))
    assert line.startswith(f"{argument}: ")


def test_a_plain_run_in_one_process_is_supported() -> None:
    assert unsupported(load("trainer.n_gpus_per_node=1", "worker.actor.fsdp.enable_cpu_offload=true")) == []


def test_missing_names_what_nobody_set() -> None:
    assert [line.split()[0] for line in missing(load())] == [
        "worker.actor.model.model_path",
        "worker.reward.reward_function",
        "data.train_files",
    ]


def test_defaults_are_no_reason_for_a_line() -> None:
    given = load("worker.actor.padding_free=true", "worker.rollout.enforce_eager=false")
    assert no_effect(given, "transformers") == []


def test_keys_without_effect_share_a_line_per_reason() -> None:
    lines = no_effect(
        load(
            "worker.rollout.enforce_eager=true",
            "worker.rollout.gpu_memory_utilization=0.5",
            "worker.actor.offload.offload_params=true",
            "worker.critic.optim.lr=1e-5",
        ),
        "transformers",
    )
    assert lines == [
        "no effect here: worker.critic.optim.lr (grpo has no critic)",
        "no effect here: worker.rollout.gpu_memory_utilization, worker.rollout.enforce_eager (vLLM only)",
        "no effect here: worker.actor.offload.offload_params (the transformers engine samples with these very weights)",
    ]


def test_what_adapters_leave_without_effect() -> None:
    keys = ["worker.ref.fsdp.torch_dtype=bf16", "worker.actor.fsdp.torch_dtype=bf16"]
    lora = "worker.actor.model.lora"
    given = load(*keys, f"{lora}.rank=8", f"{lora}.alpha=16")
    assert no_effect(given, "vllm") == [
        "no effect here: worker.ref.fsdp.torch_dtype (with LoRA the reference is the actor's own model as it "
        "was at the start)"
    ]
    assert remarks(given) == []  # about rounded steps
    lines = no_effect(load(f"{lora}.alpha=16", f"{lora}.exclude_modules=.*visual.*"), "vllm")
    assert lines == [f"no effect here: {lora}.alpha ({lora}.rank is 0)"]
    (line,) = no_effect(load(f"{lora}.adapter_path=adapter", f"{lora}.target_modules=[q_proj]"), "vllm")
    assert line.startswith(f"no effect here: {lora}.target_modules (the adapter's own layers")


def test_keys_of_vllm_have_their_effect_on_vllm() -> None:
    given = load("worker.rollout.enforce_eager=true", "worker.rollout.dtype=fp32", "worker.rollout.limit_images=2")
    assert no_effect(given, "vllm") == []


@pytest.mark.parametrize(("engine", "why"), [("transformers", "vLLM only; devices: 1"), ("vllm", "devices: 1")])
def test_tensor_parallel_above_the_devices_is_one_line(engine: Engine, why: str) -> None:
    argv = ["worker.rollout.tensor_parallel_size=2", "trainer.n_gpus_per_node=1"]
    assert no_effect(load(*argv), engine) == [f"no effect here: worker.rollout.tensor_parallel_size=2 ({why})"]


def test_the_default_of_tensor_parallel_is_no_reason_for_a_line() -> None:
    assert no_effect(load("trainer.n_gpus_per_node=1"), "vllm") == []


def test_a_cispo_run_with_a_lower_bound_is_told_its_bounds() -> None:
    (line,) = remarks(
        load("worker.actor.loss_type=cispo", "worker.actor.clip_ratio_low=0", "worker.actor.clip_ratio_high=4")
    )
    assert "[1, 5]" in line
    assert remarks(load("worker.actor.loss_type=cispo", "worker.actor.clip_ratio_low=1")) == []


def test_weights_of_an_optimizer_in_bfloat16_are_not_float32() -> None:
    argv = ("worker.actor.optim.strategy=adamw_bf16", "worker.actor.fsdp.torch_dtype=fp32")
    assert "worker.actor.fsdp.torch_dtype: fp32 given" in refusal(*argv)
    assert load(argv[0]).worker.actor.weights_dtype("cuda") == "bf16"
    assert load("worker.actor.optim.strategy=adamw_8bit").worker.actor.weights_dtype("cuda") == "fp32"


def test_plain_adamw_on_bfloat16_weights_is_told_what_it_loses() -> None:
    (line,) = remarks(load("worker.actor.fsdp.torch_dtype=bf16"))
    assert "worker.actor.optim.strategy=adamw_bf16" in line
    assert remarks(load("worker.actor.fsdp.torch_dtype=bf16", "worker.actor.optim.strategy=adamw_bf16")) == []


def test_a_model_with_every_part_frozen_is_refused() -> None:
    model = "worker.actor.model"
    text = refusal(f"{model}.freeze_vision_tower=true", f"{model}.freeze_language_model=true")
    assert f"{model}.freeze_language_model: true given" in text
    load(f"{model}.freeze_vision_tower=true", f"{model}.freeze_language_model=true", f"{model}.freeze_projector=false")


def test_keys_of_the_micro_batch_have_their_effect_with_easyr1s_budget_only() -> None:
    key = "worker.actor.micro_batch_size_per_device_for_update"
    (line,) = no_effect(load(f"{key}=2"), "vllm")
    assert line == f"no effect here: {key} (worker.actor.token_budget is auto, not easyr1)"
    assert no_effect(load(f"{key}=2", "worker.actor.token_budget=easyr1"), "vllm") == []


def test_the_rate_of_a_frozen_part_has_no_effect() -> None:
    argv = ("worker.actor.model.freeze_vision_tower=true", "worker.actor.optim.lr_vision=1e-5")
    (line,) = no_effect(load(*argv), "vllm")
    assert line.startswith("no effect here: worker.actor.optim.lr_vision (")
    assert no_effect(load(argv[1]), "vllm") == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["worker.reward.reward_function=a.py:f", "worker.reward.functions={a: {function: 'b.py:f'}}"], "make that"),
        (["worker.reward.functions={overall: {function: 'b.py:f'}}"], "called overall"),
        (["worker.reward.functions={a: {function: 'b.py:f', only_for: [geo]}}"], "set worker.reward.route_by"),
        (["worker.reward.reward_function=a.py:f", "worker.reward.route_by=source"], "no function has only_for"),
        (["worker.reward.functions={a: {funktion: 'b.py:f'}}"], "names, each to a mapping of function, kwargs, weig"),
    ],
)
def test_reward_functions_that_contradict_each_other_are_refused(arguments: list[str], said: str) -> None:
    assert said in refusal(*arguments)


def test_a_key_of_one_of_several_reward_functions_can_be_overridden() -> None:
    config = load("worker.reward.functions={a: {function: 'b.py:f', weight: 2}}", "worker.reward.functions.a.weight=3")
    assert config.worker.reward.functions["a"].weight == 3
