"""Keys of the algorithms: what goes together, what has no effect, and what the trainer does not do yet."""

from __future__ import annotations

import pytest

from foveal.config import Config, load_config
from foveal.config.rules import no_effect, remarks
from foveal.config.schema_data import CORRECTION_BOUNDS
from foveal.errors import ConfigError

GDPO = ["algorithm.adv_estimator=gdpo", "algorithm.use_kl_loss=true"]


def load(*argv: str) -> Config:
    return load_config(["worker.rollout.n=2", "trainer.n_gpus_per_node=1", *argv])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["algorithm.kl_penalty=full"], "algorithm.kl_penalty: full given, which is computed with the loss"),
        (GDPO, "algorithm.reward_parts: nothing given, but algorithm.adv_estimator=gdpo"),
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.reward_parts={accuracy: 1}"],
            "algorithm.use_kl_loss: false given, but algorithm.adv_estimator=gdpo",
        ),
        (
            ["algorithm.correction=icepop", "algorithm.correction_low=5"],
            "algorithm.correction_low: 5 must be below algorithm.correction_high (5)",
        ),
        (
            ["algorithm.old_logprobs=rollout", "algorithm.correction=tis"],
            "algorithm.correction: tis given, but with algorithm.old_logprobs=rollout",
        ),
        (
            ["algorithm.old_logprobs=rollout", "worker.rollout.top_p=0.9"],
            "set worker.rollout.top_p=1, or algorithm.old_logprobs=auto",
        ),
        (
            ["algorithm.correction=mis", "worker.rollout.top_k=50"],
            "set worker.rollout.top_k=-1, or algorithm.correction",
        ),
        (["worker.reward.overlong_buffer=513"], "worker.reward.overlong_buffer: 513 is above data.max_response_length"),
    ],
)
def test_values_that_contradict_each_other_are_refused(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    assert "1 problem " in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize(
    "argv",
    [
        ["algorithm.kl_penalty=full", "algorithm.use_kl_loss=true"],
        ["algorithm.kl_penalty=full", "algorithm.disable_kl=true"],
        ["algorithm.kl_penalty=full", "trainer.val_only=true"],
        [*GDPO, "algorithm.reward_parts={accuracy: 0.9, format: 1}"],
        ["algorithm.correction=tis", "algorithm.correction_low=9"],
        ["algorithm.old_logprobs=recompute", "worker.rollout.top_p=0.9"],
        ["worker.reward.overlong_buffer=512"],
    ],
)
def test_values_that_go_together_are_accepted(argv: list[str]) -> None:
    load(*argv)


@pytest.mark.parametrize("kind", CORRECTION_BOUNDS)
def test_bounds_of_a_correction_are_its_papers_unless_given(kind: str) -> None:
    assert load(f"algorithm.correction={kind}").algorithm.correction_bounds == CORRECTION_BOUNDS[kind]
    given = load(f"algorithm.correction={kind}", "algorithm.correction_low=1", "algorithm.correction_high=3")
    assert given.algorithm.correction_bounds == (1.0, 3.0)


def test_weights_of_reward_parts_may_be_given_one_by_one() -> None:
    config = load(*GDPO, "algorithm.reward_parts.accuracy=1", "algorithm.reward_parts.format=0.5")
    assert config.algorithm.reward_parts == {"accuracy": 1.0, "format": 0.5}


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("algorithm.reward_parts={x: 1}", "adv_estimator=gdpo only"),
        ("algorithm.correction_high=3", "algorithm.correction is none"),
        ("worker.actor.loss_sum_norm=100", "loss_avg_mode=seq_sum_norm only"),
        ("worker.reward.overlong_penalty=2", "worker.reward.overlong_buffer is 0"),
        ("algorithm.filter_key=accuracy", "algorithm.online_filtering is false"),
        ("trainer.max_try_make_batch=3", "algorithm.online_filtering is false"),
        ("algorithm.gamma=0.9", "grpo looks at whole answers"),
        ("algorithm.lam=0.9", "adv_estimator=gae only"),
        ("worker.actor.tau_positive=2", "loss_type=sapo only"),
    ],
)
def test_keys_that_nothing_reads_are_named(argument: str, reason: str) -> None:
    key = argument.partition("=")[0]
    assert no_effect(load(argument), "transformers") == [f"no effect here: {key} ({reason})"]


@pytest.mark.parametrize("argument", ["algorithm.use_kl_loss=true", "algorithm.disable_kl=true"])
def test_an_adaptive_weight_of_a_kl_that_is_not_in_the_reward_is_named(argument: str) -> None:
    argv = ["algorithm.kl_type=adaptive", "algorithm.kl_target=0.2"]
    lines = no_effect(load(argument, *argv), "transformers")
    reason = "only the weight of a KL in the reward is adaptive"
    assert lines == [f"no effect here: algorithm.kl_type, algorithm.kl_target ({reason})"]
    assert no_effect(load(*argv), "transformers") == []


@pytest.mark.parametrize("loss", ["sapo", "policy_gradient", "cispo"])
def test_clips_that_a_loss_does_not_have_are_named(loss: str) -> None:
    (line,) = no_effect(load(f"worker.actor.loss_type={loss}", "worker.actor.clip_ratio_dual=9"), "transformers")
    assert line.startswith("no effect here: worker.actor.clip_ratio_dual (")


def test_a_kl_in_the_loss_that_holds_nothing_back_is_told() -> None:
    (line,) = remarks(load("algorithm.use_kl_loss=true"))
    assert line.startswith("algorithm.kl_penalty=kl with algorithm.use_kl_loss=true")
    for better in ("algorithm.kl_penalty=mse", "algorithm.use_kl_loss=false", "algorithm.disable_kl=true"):
        assert remarks(load("algorithm.use_kl_loss=true", better)) == []


def test_a_lower_bound_that_the_correction_does_not_have_is_named() -> None:
    lines = no_effect(load("algorithm.correction=tis", "algorithm.correction_low=0.1"), "transformers")
    assert lines == ["no effect here: algorithm.correction_low (tis has no lower bound)"]


def test_an_overlong_punishment_that_gdpo_does_not_sum_is_named() -> None:
    argv = [*GDPO, "worker.reward.overlong_buffer=4"]
    (line,) = no_effect(load(*argv, "algorithm.reward_parts={accuracy: 1}"), "transformers")
    assert line.startswith("no effect here: worker.reward.overlong_buffer (gdpo")
    assert no_effect(load(*argv, "algorithm.reward_parts={accuracy: 1, overlong_penalty: 1}"), "transformers") == []


def test_ones_own_estimator_may_read_reward_parts() -> None:
    assert no_effect(load("algorithm.adv_estimator=mine.py:f", "algorithm.reward_parts={x: 1}"), "transformers") == []


@pytest.mark.parametrize("argument", ["worker.actor.global_batch_size=128", "worker.actor.ppo_epochs=2"])
def test_policy_gradient_is_told_of_steps_off_policy(argument: str) -> None:
    argv = ["data.rollout_batch_size=256", "worker.actor.loss_type=policy_gradient"]
    (line,) = remarks(load(*argv, argument))
    assert "with 2 optimizer steps per batch" in line
    assert remarks(load(*argv)) == []
