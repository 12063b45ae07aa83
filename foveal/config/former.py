"""Keys of EasyR1's earlier releases (2025), which files and scripts of that time set, under their present names."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

_TRAINED = ("worker.actor", "worker.critic")
_KL_IN_LOSS = "algorithm.use_kl_loss"
_OF_KL_IN_LOSS = {"worker.actor.kl_loss_coef": "algorithm.kl_coef", "worker.actor.kl_loss_type": "algorithm.kl_penalty"}
"""Their releases had the present names too, for a KL in the reward, which the same files set and nothing read."""

RENAMED: dict[str, tuple[str, ...]] = {
    "trainer.total_episodes": ("trainer.total_epochs",),
    "trainer.test_freq": ("trainer.val_freq",),
    "trainer.val_generations_to_log_to_wandb": ("trainer.val_generations_to_log",),
    "worker.reward.score_function": ("worker.reward.reward_function",),
    "worker.reward.score_function_kwargs": ("worker.reward.reward_function_kwargs",),
    "worker.reward.compute_score": ("worker.reward.reward_function",),
    "worker.actor.clip_ratio": ("worker.actor.clip_ratio_low", "worker.actor.clip_ratio_high"),
    "worker.actor.entropy_coeff": ("worker.actor.entropy_coef",),
    **{f"{role}.ulysses_sequence_parallel_size": (f"{role}.ulysses_size",) for role in _TRAINED},
    **{f"{role}.optim.lr_warmup_steps_ratio": (f"{role}.optim.lr_warmup_ratio",) for role in _TRAINED},
    **{f"{role}.optim.warmup_style": (f"{role}.optim.lr_scheduler_type",) for role in _TRAINED},
    **{f"{role}.offload.param_offload": (f"{role}.offload.offload_params",) for role in (*_TRAINED, "worker.ref")},
    **{f"{role}.offload.optimizer_offload": (f"{role}.offload.offload_optimizer",) for role in _TRAINED},
    "worker.actor.use_kl_loss": (_KL_IN_LOSS,),
    **{former: (present,) for former, present in _OF_KL_IN_LOSS.items()},
}
DROPPED = {
    "trainer.remove_previous_ckpt": "trainer.save_limit says how many checkpoints are kept",
    "trainer.remove_ckpt_after_load": "trainer.save_limit says how many checkpoints are kept",
    "worker.rollout.free_cache_engine": "vLLM gives its memory back whenever the model is trained",
    "worker.rollout.max_num_seqs": "vLLM gets room for all answers that are sampled at a time",
}
_REWARDS = {
    "math": "foveal.rewards.math:compute_score",
    "r1v": "./examples/reward_function/r1v.py:compute_score",
}
"""Reward functions that had a name."""


def is_former(name: str) -> bool:
    """Whether `name` is a key of an earlier release."""
    return name in RENAMED or name in DROPPED


def take_over(values: dict[str, Any], typed: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Values under the present names of their keys.

    A former key gives way to the present one where the command line has that, or where both stand in the file (but for
    the weight and the estimator of a KL in the loss).

    Args:
        values: of the file and the command line together, by dotted key.
        typed: the keys of the command line.

    Returns:
        the values, and lines that say what was taken for what and what has no effect.
    """
    present = {name: value for name, value in values.items() if not is_former(name)}
    renamed: dict[str, str] = {}
    idle: dict[str, list[str]] = {}
    for former in (name for name in RENAMED if name in values):
        if former in _OF_KL_IN_LOSS and present.get(_KL_IN_LOSS) is not True:
            idle.setdefault(f"{_KL_IN_LOSS} is not true", []).append(former)
            continue
        wins = _is_typed(former, typed) or former in _OF_KL_IN_LOSS
        for name in RENAMED[former]:
            if _is_typed(name, typed) or (name in present and not wins):
                idle.setdefault(f"{name} is given", []).append(former)
            else:
                present[name] = _laid_over(present.get(name), _value(name, values[former]))
                renamed[former] = " and ".join(RENAMED[former])
    for former in (name for name in DROPPED if name in values):
        idle.setdefault(DROPPED[former], []).append(former)
    return present, list(_lines(renamed, idle))


def _is_typed(name: str, typed: Collection[str]) -> bool:
    return any(one == name or one.startswith(f"{name}.") for one in typed)


def _value(name: str, value: Any) -> Any:
    return _REWARDS.get(str(value), value) if name == "worker.reward.reward_function" else value


def _laid_over(old: Any, new: Any) -> Any:
    return {**old, **new} if isinstance(old, dict) and isinstance(new, dict) else new


def _lines(renamed: dict[str, str], idle: dict[str, list[str]]) -> Iterator[str]:
    if renamed:
        pairs = ", ".join(f"{former} (now {present})" for former, present in renamed.items())
        yield f"keys of an earlier EasyR1 are taken under their present names: {pairs}"
    for reason, keys in idle.items():
        yield f"no effect here: {', '.join(keys)} ({reason})"
