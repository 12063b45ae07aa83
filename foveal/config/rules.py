"""What single values cannot show: rules between keys, what this version lacks, and keys without effect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from foveal.config.keys import known_keys
from foveal.config.schema import Config
from foveal.config.schema_data import ADVANTAGE_ESTIMATORS, GROUP_ESTIMATORS
from foveal.config.schema_worker import POLICY_LOSSES
from foveal.masking import MASK, masks


@dataclass(frozen=True)
class BrokenRule:
    """A rule that values break together: the keys concerned, and a line for the user."""

    keys: tuple[str, ...]
    text: str


def broken_rules(config: Config) -> list[BrokenRule]:
    """All rules between keys that the configuration breaks; those of training only where something is trained."""
    rules = [_masks, _data, _reward, _algorithm, _engine_limits, _val_sampling, _module_patterns]
    if not config.trainer.val_only:
        rules += [_batches, _sampling, _kl, _gdpo, _correction, _overlong, _optimizers, _all_frozen]
    return [broken for rule in rules for broken in rule(config)]


def missing(config: Config, *, scored: bool = True) -> list[str]:
    """A line for each key without a default that a run needs.

    Args:
        scored: whether answers are.
    """
    needed = {"worker.actor.model.model_path": "the folder of a Hugging Face model, or a hub id"}
    if scored and not config.worker.reward.functions:
        needed["worker.reward.reward_function"] = "FILE:function, as examples/reward_function/math.py:compute_score"
    needed["data.val_files" if config.trainer.val_only else "data.train_files"] = "PATH_OR_HUB_ID@split"
    return [f"{key} is not set: give {what}" for key, what in needed.items() if not config.value(key)]


def unsupported(config: Config) -> list[str]:
    """A line for each thing that the configuration asks for and this version does not do yet."""
    lines = []
    for role in trained_roles(config):
        for key in (f"{role}.fsdp.torch_dtype", f"{role}.fsdp.mp_param_dtype"):
            if config.value(key) == "fp16":
                lines.append(f"{key}=fp16: small gradients vanish in it without loss scaling; set {key}=bf16")
    return lines


def trained_roles(config: Config) -> list[str]:
    """The sections of the models that the run trains."""
    if config.trainer.val_only:
        return []
    return ["worker.actor", "worker.critic"] if config.algorithm.uses_critic else ["worker.actor"]


def no_effect(config: Config, engine: Literal["vllm", "transformers"]) -> list[str]:
    """A line for each reason why keys that were given, with a value of their own, change nothing in this version.

    Args:
        engine: what `worker.rollout.name` came to.
    """
    lines = []
    listed: set[str] = set()
    for reason, prefixes in _no_effect_reasons(config, engine):
        keys = [key for key in known_keys() if key.startswith(prefixes) and key not in listed and _is_set(config, key)]
        listed.update(keys)
        if keys:
            lines.append(f"no effect here: {', '.join(keys)} ({reason})")
    key, devices = "worker.rollout.tensor_parallel_size", config.engine_devices
    size = config.value(key)
    if size > devices and key in config.given and key not in listed:  # the default, 2, is EasyR1's: nobody's wish
        reason = f"devices: {devices}" if engine == "vllm" else f"vLLM only; devices: {devices}"
        lines.append(f"no effect here: {key}={size} ({reason})")
    return lines


def remarks(config: Config) -> list[str]:
    """Lines about keys and values that are accepted and may not do what their author meant."""
    actor = config.worker.actor
    lines = [*config.notes]
    lines += [
        f"{role}.fsdp.torch_dtype=bf16 with {role}.optim.strategy=adamw rounds most steps of a small learning rate "
        f"away; {role}.optim.strategy=adamw_bf16 rounds them stochastically"
        for role in trained_roles(config)
        if config.value(f"{role}.fsdp.torch_dtype") == "bf16"
        and config.value(f"{role}.optim.strategy") == "adamw"
        and not config.value(f"{role}.model.lora.rank")  # adapters are float32
    ]
    if actor.loss_type == "cispo" and actor.clip_ratio_low < 1:
        lines.append(
            f"worker.actor.clip_ratio_low={actor.clip_ratio_low:g} with loss_type=cispo keeps importance ratios "
            f"within [{1 - actor.clip_ratio_low:g}, {1 + actor.clip_ratio_high:g}]; 1 means no lower bound"
        )
    steps = actor.ppo_epochs * config.data.rollout_batch_size // actor.global_batch_size
    if actor.loss_type == "policy_gradient" and steps > 1:
        lines.append(
            f"worker.actor.loss_type=policy_gradient with {steps} optimizer steps per batch: it has no importance "
            "ratio, so all but the first take answers of an older policy for the current one's"
        )
    if config.algorithm.kl_in_loss and config.algorithm.kl_penalty == "kl":
        lines.append(
            "algorithm.kl_penalty=kl with algorithm.use_kl_loss=true does not hold the model near the reference: over "
            "answers of its own its gradient is 0 in the mean. Choose low_var_kl, mse or full, or take it from the "
            "reward (algorithm.use_kl_loss=false)"
        )
    if config.trainer.max_restarts and config.trainer.save_freq < 1:
        lines.append("trainer.max_restarts without trainer.save_freq: the run starts over from its beginning each time")
    return lines


def _no_effect_reasons(config: Config, engine: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields (reason, beginnings of the keys that it concerns)."""
    rollout, sections = "worker.rollout.", ("worker.actor.", "worker.ref.", "worker.critic.")
    estimator = config.algorithm.adv_estimator
    if estimator in ADVANTAGE_ESTIMATORS and not config.algorithm.uses_critic:
        yield f"{estimator} has no critic", ("worker.critic.", "trainer.critic_warmup")
    if engine != "vllm":
        names = "limit_images gpu_memory_utilization enforce_eager tensor_parallel_size max_num_batched_tokens dtype"
        yield "vLLM only", tuple(rollout + name for name in names.split())
        yield "the transformers engine samples with these very weights", ("worker.actor.offload.offload_params",)
    if config.training_devices == 1:
        names = "enable_ use_orig_params fsdp_size mp_reduce_dtype mp_buffer_dtype gradient_sync gather_weights"
        yield (
            "one process: nothing is sharded",
            tuple(f"{section}fsdp.{name}" for section in sections for name in names.split()),
        )
    else:
        names = "use_orig_params mp_buffer_dtype"
        yield "FSDP1 only", tuple(f"{section}fsdp.{name}" for section in sections for name in names.split())
        reason = "each process reads its own part of the weights"
        yield reason, tuple(f"{section}fsdp.enable_rank0_init" for section in sections)
    if config.trainer.devices == 1:
        yield "one process: no Ray", ("trainer.ray_timeline", "trainer.stage_timeout", "trainer.max_restarts")
    if config.cluster.rollout_devices:
        reason = "no engine shares the trainer's devices"
        yield reason, ("worker.actor.offload.", "worker.ref.offload.", "worker.critic.offload.")
    if config.trainer.val_only:
        yield "nothing is trained", ("trainer.async_rollout", "trainer.max_restarts")
    yield (
        "sequences are always packed up to a number of tokens",
        tuple(section + name for section in sections for name in ("padding_free", "dynamic_batching")),
    )
    yield from _no_effect_of_training(config)
    yield from _no_effect_of_algorithms(config)
    yield "the reference computes as the actor does", ("worker.ref.fsdp.mp_param_dtype",)
    yield "it meant vLLM's former engine", (rollout + "enable_chunked_prefill",)
    yield "vLLM's own statistics are never printed", (rollout + "disable_log_stats",)
    if not (config.trainer.val_before_train or config.trainer.val_freq > 0):
        yield "nothing is validated", ("trainer.best_metric", "trainer.best_mode")
    if config.trainer.val_only:
        yield "nothing is trained", ("trainer.profile_steps",)
    elif config.trainer.max_steps and min(config.trainer.profile_steps, default=0) > config.trainer.max_steps:
        yield f"the run has {config.trainer.max_steps} steps", ("trainer.profile_steps",)
    yield "no progress bar is drawn", (rollout + "disable_tqdm",)


def _no_effect_of_training(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    budget = config.worker.actor.token_budget
    if budget != "easyr1":
        names = ("micro_batch_size_per_device_for_update", "micro_batch_size_per_device_for_experience")
        reason = f"worker.actor.token_budget is {budget}, not easyr1"
        yield reason, tuple(f"worker.{role}.{name}" for role in ("actor", "critic") for name in names)
    for role in trained_roles(config):
        for part in ("vision", "projector"):
            if part in config.value(f"{role}.model").frozen_parts:
                yield f"{role}.model: the {part} part is frozen", (f"{role}.optim.lr_{part}",)
        if config.value(f"{role}.model.lora.adapter_path"):
            reason = "the adapter's own layers are trained; those of frozen parts are not"
            yield reason, (f"{role}.model.lora.target_modules", f"{role}.model.lora.exclude_modules")
        elif not config.value(f"{role}.model.lora.rank"):
            names = ("alpha", "target_modules")  # not exclude_modules, which EasyR1's own file sets in every run
            yield f"{role}.model.lora.rank is 0", tuple(f"{role}.model.lora.{name}" for name in names)
    if config.worker.actor.model.lora.rank:
        reason = "with LoRA the reference is the actor's own model as it was at the start"
        yield reason, ("worker.ref.fsdp.torch_dtype", "worker.ref.offload.offload_params")


def _no_effect_of_algorithms(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    algorithm, actor = config.algorithm, config.worker.actor
    if algorithm.adv_estimator in ADVANTAGE_ESTIMATORS and algorithm.adv_estimator != "gdpo":
        yield "adv_estimator=gdpo only", ("algorithm.reward_parts",)
    if algorithm.adv_estimator in ADVANTAGE_ESTIMATORS and not algorithm.uses_critic:
        yield "adv_estimator=gae only", ("algorithm.lam",)
        if not algorithm.adv_estimator.startswith("reinforce_plus_plus"):
            yield f"{algorithm.adv_estimator} looks at whole answers", ("algorithm.gamma",)
    if not algorithm.kl_in_reward:
        names = ("kl_type", "kl_horizon", "kl_target")
        yield "only the weight of a KL in the reward is adaptive", tuple(f"algorithm.{name}" for name in names)
    if not algorithm.online_filtering:
        yield "algorithm.online_filtering is false", ("algorithm.filter_", "trainer.max_try_make_batch")
    if actor.loss_type in POLICY_LOSSES and actor.loss_type != "sapo":
        yield "loss_type=sapo only", ("worker.actor.tau_",)
    if actor.loss_type in ("sapo", "policy_gradient"):
        yield f"{actor.loss_type} does not clip", ("worker.actor.clip_ratio_",)
    elif actor.loss_type == "cispo":
        yield "cispo has no dual clip", ("worker.actor.clip_ratio_dual",)
    if algorithm.correction == "none":
        yield "algorithm.correction is none", ("algorithm.correction_low", "algorithm.correction_high")
    elif algorithm.correction in ("tis", "tis_seq"):
        yield f"{algorithm.correction} has no lower bound", ("algorithm.correction_low",)
    if actor.loss_avg_mode != "seq_sum_norm":
        yield "loss_avg_mode=seq_sum_norm only", ("worker.actor.loss_sum_norm",)
    reward = config.worker.reward
    if not reward.functions:
        yield "worker.reward.functions is not set", ("worker.reward.route_by",)
    if not reward.overlong_buffer:
        yield "worker.reward.overlong_buffer is 0", ("worker.reward.overlong_penalty",)
    elif algorithm.adv_estimator == "gdpo" and not algorithm.reward_parts.keys() & {"overall", "overlong_penalty"}:
        yield "gdpo sums reward_parts, of which overlong_penalty is none", ("worker.reward.overlong_",)


def _is_set(config: Config, key: str) -> bool:
    return key in config.given and config.value(key) != known_keys()[key].default


def _masks(config: Config) -> Iterator[BrokenRule]:
    for name in masks(config.model_dump(mode="json")):
        yield BrokenRule(
            (name,),
            f"{name}: {MASK} stands for a secret that was left out when this configuration was written. Give it, best "
            "from an environment variable, as ${oc.env:MY_API_KEY}",
        )


def _data(config: Config) -> Iterator[BrokenRule]:
    data = config.data
    if data.min_pixels is not None and data.max_pixels is not None and data.min_pixels > data.max_pixels:
        yield BrokenRule(
            ("data.min_pixels", "data.max_pixels"),
            f"data.min_pixels: {data.min_pixels} is above data.max_pixels ({data.max_pixels}); "
            "lower the first or raise the second",
        )


def _reward(config: Config) -> Iterator[BrokenRule]:
    reward = config.worker.reward
    key = "worker.reward.functions"
    if reward.functions and (reward.reward_function or reward.reward_function_kwargs):
        yield BrokenRule(
            (key, "worker.reward.reward_function", "worker.reward.reward_function_kwargs"),
            f"{key}: given beside worker.reward.reward_function or its kwargs; make that function an entry of {key}",
        )
    if "overall" in reward.functions:
        yield BrokenRule((key,), f"{key}: a function is called overall, which is the name of their sum; rename it")
    routed = [name for name, one in reward.functions.items() if one.only_for]
    if routed and reward.route_by is None:
        yield BrokenRule(
            (key, "worker.reward.route_by"),
            f"{key}: {', '.join(routed)} with only_for, but no column decides; set worker.reward.route_by to one",
        )
    if reward.route_by is not None and not routed:
        yield BrokenRule(
            ("worker.reward.route_by", key),
            f"worker.reward.route_by: {reward.route_by} decides nothing, for no function has only_for; give it to one "
            f"of {key}, or leave route_by out",
        )


def _algorithm(config: Config) -> Iterator[BrokenRule]:
    algorithm = config.algorithm
    if algorithm.filter_low >= algorithm.filter_high:
        yield BrokenRule(
            ("algorithm.filter_low", "algorithm.filter_high"),
            f"algorithm.filter_low: {algorithm.filter_low:g} must be below algorithm.filter_high "
            f"({algorithm.filter_high:g}); no group could be kept",
        )


def _kl(config: Config) -> Iterator[BrokenRule]:
    algorithm = config.algorithm
    if algorithm.kl_penalty == "full" and algorithm.kl_in_reward:
        yield BrokenRule(
            ("algorithm.kl_penalty", "algorithm.use_kl_loss", "algorithm.disable_kl"),
            "algorithm.kl_penalty: full given, which is computed with the loss, but the KL is taken from the reward; "
            "set algorithm.use_kl_loss=true, or choose kl, abs, mse or low_var_kl",
        )


def _gdpo(config: Config) -> Iterator[BrokenRule]:
    algorithm = config.algorithm
    if algorithm.adv_estimator != "gdpo":
        return
    if not algorithm.reward_parts:
        yield BrokenRule(
            ("algorithm.reward_parts", "algorithm.adv_estimator"),
            "algorithm.reward_parts: nothing given, but algorithm.adv_estimator=gdpo sums parts of the reward; name "
            "numbers that the reward function returns, as algorithm.reward_parts={accuracy: 0.9, format: 0.1}",
        )
    if algorithm.kl_in_reward:
        yield BrokenRule(
            ("algorithm.use_kl_loss", "algorithm.disable_kl", "algorithm.adv_estimator"),
            "algorithm.use_kl_loss: false given, but algorithm.adv_estimator=gdpo normalises parts of the reward, "
            "which a KL is none of; set algorithm.use_kl_loss=true, or algorithm.disable_kl=true",
        )


def _correction(config: Config) -> Iterator[BrokenRule]:
    """The engine's log-probabilities are used only where they are those of the distribution that is trained."""
    algorithm, rollout = config.algorithm, config.worker.rollout
    low, high = algorithm.correction_bounds
    if low >= high and algorithm.correction in ("mis", "icepop"):
        yield BrokenRule(
            ("algorithm.correction_low", "algorithm.correction_high"),
            f"algorithm.correction_low: {low:g} must be below algorithm.correction_high ({high:g}); "
            "no token would keep a weight",
        )
    from_engine = algorithm.old_logprobs == "rollout"
    if from_engine and algorithm.correction != "none":
        yield BrokenRule(
            ("algorithm.old_logprobs", "algorithm.correction"),
            f"algorithm.correction: {algorithm.correction} given, but with algorithm.old_logprobs=rollout the loss "
            "compares with the engine's log-probabilities already; set algorithm.correction=none, or "
            "algorithm.old_logprobs=auto",
        )
    elif from_engine or algorithm.correction != "none":
        key = "algorithm.old_logprobs" if from_engine else "algorithm.correction"
        given = {"worker.rollout.top_p": rollout.top_p < 1, "worker.rollout.top_k": rollout.top_k > 0}
        for name in (name for name, cuts in given.items() if cuts):
            yield BrokenRule(
                (name, key),
                f"{key}: {config.value(key)} given, but with {name}={config.value(name)} the engine's "
                "log-probabilities are those of a cut distribution, not of the one that is trained; set "
                f"{name}={'1' if name.endswith('p') else '-1'}, or {key}={'auto' if from_engine else 'none'}",
            )


def _overlong(config: Config) -> Iterator[BrokenRule]:
    buffer, longest = config.worker.reward.overlong_buffer, config.data.max_response_length
    if buffer > longest:
        yield BrokenRule(
            ("worker.reward.overlong_buffer", "data.max_response_length"),
            f"worker.reward.overlong_buffer: {buffer} is above data.max_response_length ({longest}); "
            "every answer would be punished; lower it to that at most",
        )


def _module_patterns(config: Config) -> Iterator[BrokenRule]:
    for role, name in product(("actor", "critic"), ("target", "exclude")):
        key = f"worker.{role}.model.lora.{name}_modules"
        value = config.value(key)
        if isinstance(value, str):
            try:
                re.compile(value)
            except re.error as error:
                yield BrokenRule(
                    (key,), f"{key}: {value} given, which is no regular expression ({error}); or give a list of names"
                )


def _optimizers(config: Config) -> Iterator[BrokenRule]:
    for role in trained_roles(config):
        strategy, dtype = f"{role}.optim.strategy", f"{role}.fsdp.torch_dtype"
        if config.value(strategy) == "adamw_bf16" and config.value(dtype) == "fp32":
            yield BrokenRule(
                (dtype, strategy),
                f"{dtype}: fp32 given, but {strategy}=adamw_bf16 holds weights in bfloat16; set {dtype}=bf16 or null, "
                f"or {strategy}=adamw",
            )


def _all_frozen(config: Config) -> Iterator[BrokenRule]:
    model = config.worker.actor.model
    if len(model.frozen_parts) == 3:
        names = ("freeze_vision_tower", "freeze_projector", "freeze_language_model")
        keys = tuple(f"worker.actor.model.{name}" for name in names)
        yield BrokenRule(
            keys, f"{keys[2]}: true given, but then nothing is trained; set one of {', '.join(names)} to false"
        )


def _batches(config: Config) -> Iterator[BrokenRule]:
    """A step holds whole optimizer steps. Devices do not matter: groups are spread unevenly where they must be."""
    batch = config.data.rollout_batch_size
    for role in trained_roles(config):
        key = f"{role}.global_batch_size"
        part = config.value(key)
        if batch % part:
            below = batch // part * part
            choices = f"{below} or {below + part}" if below else f"{part}"
            yield BrokenRule(
                ("data.rollout_batch_size", key),
                f"data.rollout_batch_size: {batch} is not a multiple of {key} ({part}); set it to {choices}, "
                f"or {key} to a divisor of {batch}",
            )
    mini = config.data.mini_rollout_batch_size
    if mini is not None and mini > batch and not config.algorithm.online_filtering:
        yield BrokenRule(
            ("data.mini_rollout_batch_size", "data.rollout_batch_size", "algorithm.online_filtering"),
            f"data.mini_rollout_batch_size: {mini} is above data.rollout_batch_size ({batch}) and nothing is filtered; "
            f"set it to {batch} or less, or algorithm.online_filtering=true",
        )


def _sampling(config: Config) -> Iterator[BrokenRule]:
    rollout, estimator = config.worker.rollout, config.algorithm.adv_estimator
    if rollout.n == 1 and estimator in GROUP_ESTIMATORS:
        yield BrokenRule(
            ("worker.rollout.n", "algorithm.adv_estimator"),
            f"worker.rollout.n: 1 given, but algorithm.adv_estimator={estimator} compares the answers to one prompt; "
            "set worker.rollout.n to 2 or more, or choose reinforce_plus_plus",
        )
    if rollout.temperature == 0:
        yield BrokenRule(
            ("worker.rollout.temperature",),
            "worker.rollout.temperature: 0 given, but training needs different answers; set it above 0 "
            "(greedy validation: worker.rollout.val_override_config.temperature=0)",
        )


def _engine_limits(config: Config) -> Iterator[BrokenRule]:
    rollout, longest = config.worker.rollout, config.data.max_sequence_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield BrokenRule(
            ("worker.rollout.max_model_len", "data.max_prompt_length", "data.max_response_length"),
            f"worker.rollout.max_model_len: {rollout.max_model_len} is below data.max_prompt_length + "
            f"data.max_response_length ({longest}); set it to {longest} or more, or to null",
        )


def _val_sampling(config: Config) -> Iterator[BrokenRule]:
    for name, value in config.worker.rollout.val_override_config.items():
        given = f"worker.rollout.val_override_config.{name}"
        if ":" in name:
            yield BrokenRule(
                (given, "worker.rollout.val_override_config"),
                f"worker.rollout.val_override_config: {name!r} is a key without a value; write a space after the "
                "colon, as in '{n: 2, temperature: 0.7}', with quotes in a shell",
            )
        if name == "max_tokens" and (type(value) is not int or value < 1):
            yield BrokenRule(
                (given, "worker.rollout.val_override_config"), f"{given}: {value!r} given; allowed: an integer ≥ 1"
            )
        key = known_keys().get(f"worker.rollout.{name}")
        if key is not None and not key.accepts(value):
            shown: Any = "null" if value is None else value
            yield BrokenRule(
                (given, "worker.rollout.val_override_config"), f"{given}: {shown} given; allowed: {key.allowed}"
            )
