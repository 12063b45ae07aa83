"""Files and scripts that were written for EasyR1's earlier releases load, with the effect that they had there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foveal.config import Config, load_config
from foveal.config.former import DROPPED, RENAMED
from foveal.config.keys import known_keys
from foveal.config.rules import remarks
from foveal.errors import ConfigError

OF_SPRING = """
data: {train_files: rows@train, rollout_batch_size: 512}
algorithm: {adv_estimator: grpo, kl_coef: 0.0}
worker:
  actor:
    global_batch_size: 128
    entropy_coeff: 1.0e-3
    use_kl_loss: true
    kl_loss_coef: 1.0e-2
    kl_loss_type: low_var_kl
    ulysses_sequence_parallel_size: 1
    offload: {param_offload: true, optimizer_offload: true}
  rollout: {n: 5}
  reward: {reward_type: function, compute_score: math}
trainer: {total_episodes: 15, test_freq: 5, remove_previous_ckpt: false, remove_ckpt_after_load: false}
"""
OF_SUMMER = """
algorithm: {use_kl_loss: true, kl_coef: 1.0e-2}
worker:
  actor: {ulysses_sequence_parallel_size: 1, optim: {warmup_style: cosine}}
  rollout: {n: 5}
  reward:
    reward_type: batch
    score_function: ./rewards/mine.py:score
    score_function_kwargs: {format_weight: 0.5}
trainer: {total_epochs: 3}
"""


def load(folder: Path, text: str, *argv: str) -> Config:
    file = folder / "run.yaml"
    file.write_text(text)
    return load_config([f"config={file}", *argv])


def values(config: Config, *keys: str) -> list[Any]:
    return [config.value(key) for key in keys]


def test_a_file_of_the_first_releases_has_the_effect_that_it_had(tmp_path: Path) -> None:
    config = load(tmp_path, OF_SPRING)
    assert values(config, "trainer.total_epochs", "trainer.val_freq", "worker.actor.entropy_coef") == [15, 5, 1e-3]
    assert config.algorithm.kl_in_loss
    assert values(config, "algorithm.kl_coef", "algorithm.kl_penalty") == [1e-2, "low_var_kl"]
    assert values(config, "worker.actor.offload.offload_params", "worker.actor.offload.offload_optimizer") == [True] * 2
    assert config.worker.reward.reward_function == "foveal.rewards.math:compute_score"
    assert config.worker.reward.reward_type == "sequential"


def test_without_a_kl_in_the_loss_its_weight_is_that_of_the_reward(tmp_path: Path) -> None:
    config = load(tmp_path, OF_SPRING, "worker.actor.use_kl_loss=false")
    assert config.algorithm.kl_in_reward and config.algorithm.kl_coef == 0.0
    assert any(
        line.startswith("no effect here: worker.actor.kl_loss_coef, worker.actor.kl_loss_type (")
        for line in remarks(config)
    )


def test_a_file_of_the_releases_before_0_3_loads(tmp_path: Path) -> None:
    config = load(tmp_path, OF_SUMMER, "worker.reward.score_function_kwargs.strict=true")
    assert config.worker.reward.reward_function == "./rewards/mine.py:score"
    assert config.worker.reward.reward_function_kwargs == {"format_weight": 0.5, "strict": True}
    assert config.worker.actor.optim.lr_scheduler_type == "cosine"


def test_lines_at_the_start_say_what_was_taken_for_what(tmp_path: Path) -> None:
    renamed, *idle = load(tmp_path, OF_SPRING).notes
    assert "trainer.total_episodes (now trainer.total_epochs)" in renamed
    assert idle == [
        "no effect here: trainer.remove_previous_ckpt, trainer.remove_ckpt_after_load "
        "(trainer.save_limit says how many checkpoints are kept)"
    ]
    assert load(tmp_path, "worker: {rollout: {n: 5}}").notes == ()


@pytest.mark.parametrize(
    ("text", "argument", "epochs"),
    [
        ("trainer: {total_epochs: 4}", "trainer.total_episodes=2", 2),
        ("trainer: {total_episodes: 4}", "trainer.total_epochs=2", 2),
        ("trainer: {total_episodes: 4, total_epochs: 2}", "data.seed=1", 2),
        ("trainer: {total_episodes: 2}", "data.seed=1", 2),
    ],
)
def test_the_command_line_wins_and_else_the_present_name(tmp_path: Path, text: str, argument: str, epochs: int) -> None:
    assert load(tmp_path, f"{text}\nworker: {{rollout: {{n: 5}}}}", argument).trainer.total_epochs == epochs


def test_a_shared_mapping_is_taken_over_in_each_of_its_places(tmp_path: Path) -> None:
    text = "worker:\n  rollout: {n: 5}\n  actor: &shared {ulysses_sequence_parallel_size: 2}\n  critic: *shared\n"
    assert values(load(tmp_path, text), "worker.actor.ulysses_size", "worker.critic.ulysses_size") == [2, 2]


def test_one_clip_ratio_becomes_both(tmp_path: Path) -> None:
    config = load(tmp_path, "worker: {rollout: {n: 5}, actor: {clip_ratio: 0.1}}")
    assert values(config, "worker.actor.clip_ratio_low", "worker.actor.clip_ratio_high") == [0.1, 0.1]


def test_a_wrong_value_of_a_former_key_names_the_present_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.total_epochs: none given; allowed: an integer ≥ 1"):
        load(tmp_path, "trainer: {total_episodes: none}\nworker: {rollout: {n: 5}}")


def test_former_keys_are_none_of_the_present_and_lead_to_those() -> None:
    assert not (RENAMED.keys() | DROPPED.keys()) & known_keys().keys()
    assert {name for names in RENAMED.values() for name in names} <= known_keys().keys()


@pytest.mark.parametrize(
    ("argument", "kwargs"),
    [("{}", {"a": 1}), ("{b: 2}", {"a": 1, "b": 2}), ("null", {}), ("", {})],
)
def test_a_mapping_is_laid_over_the_files_and_null_empties_it(
    tmp_path: Path, argument: str, kwargs: dict[str, Any]
) -> None:
    text = "worker: {rollout: {n: 5}, reward: {reward_function_kwargs: {a: 1}}}"
    config = load(tmp_path, text, f"worker.reward.reward_function_kwargs={argument}")
    assert config.worker.reward.reward_function_kwargs == kwargs
