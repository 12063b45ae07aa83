"""Every algorithm through the ordinary trainer: it runs, its numbers are finite, and it moves the weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from foveal.cli import main
from foveal.models.loading import load_model
from foveal.train.checkpoint import load_trained
from foveal.train.shards import ShardReader
from tests.small_run import read_log, small_run

ALGORITHMS: dict[str, list[str]] = {
    "rloo": ["algorithm.adv_estimator=rloo"],
    "grpo_passk": ["algorithm.adv_estimator=grpo_passk"],
    "dr_grpo": ["algorithm.adv_estimator=dr_grpo", "worker.actor.loss_avg_mode=seq_sum_norm"],
    "reinforce_plus_plus": [
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.use_kl_loss=false",
        "algorithm.kl_penalty=kl",
        "algorithm.kl_coef=1.0e-3",
    ],
    "reinforce_plus_plus_baseline": ["algorithm.adv_estimator=reinforce_plus_plus_baseline"],
    "gae": [
        "algorithm.adv_estimator=gae",
        "worker.rollout.n=1",
        "worker.critic.global_batch_size=4",
        "worker.critic.optim.lr=1.0e-3",
    ],
    "remax": ["algorithm.adv_estimator=remax", "worker.rollout.n=1"],
    "opo": ["algorithm.adv_estimator=opo"],
    "maxrl": ["algorithm.adv_estimator=maxrl"],
    "gdpo": ["algorithm.adv_estimator=gdpo", "algorithm.reward_parts={accuracy: 0.9, overall: 0.1}"],
    "gspo": ["worker.actor.loss_type=gspo", "worker.actor.loss_avg_mode=seq"],
    "gspo_token": ["worker.actor.loss_type=gspo_token", "worker.actor.loss_avg_mode=seq"],
    "cispo": ["worker.actor.loss_type=cispo", "worker.actor.clip_ratio_high=4"],
    "sapo": ["worker.actor.loss_type=sapo"],
    "policy_gradient": ["worker.actor.loss_type=policy_gradient"],
    "dapo": [
        "algorithm.disable_kl=true",
        "algorithm.online_filtering=true",
        "worker.actor.clip_ratio_high=0.28",
        "worker.reward.overlong_buffer=4",
        "data.mini_rollout_batch_size=3",
    ],
    "exact KL": ["algorithm.kl_penalty=full"],
    "adaptive KL in the reward": ["algorithm.use_kl_loss=false", "algorithm.kl_type=adaptive"],
    "entropy bonus": ["worker.actor.entropy_coef=0.01"],
    "the sampler's log-probabilities": ["algorithm.old_logprobs=rollout", "worker.actor.ppo_epochs=2"],
    "a separate pass": ["algorithm.old_logprobs=recompute"],
    "truncated importance sampling": ["algorithm.correction=tis"],
    "masked importance sampling": ["algorithm.correction=mis"],
    "icepop": ["algorithm.correction=icepop"],
}


def finite(record: object) -> bool:
    if isinstance(record, dict):
        return all(finite(value) for value in record.values())
    return record is not None and math.isfinite(record)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_runs_and_learns_something(tmp_path: Path, name: str) -> None:
    changes = ["trainer.max_steps=2", "worker.actor.global_batch_size=2", *ALGORITHMS[name]]
    assert main(["train", *small_run(tmp_path, "qwen2_5_vl", *changes)]) == 0
    steps = [r for r in read_log(tmp_path / "run") if "actor" in r]
    assert len(steps) == 2 and all(finite(r) for r in steps)
    assert all(r["actor"]["grad_norm"] > 0 and r["actor"]["entropy"] > 0 for r in steps)
    if name == "exact KL":  # of the policy to itself before the first update, and not after it
        assert "ref" not in steps[0]["timing_s"] and steps[1]["actor"]["kl_loss"] > 1e-5
    if name == "remax":
        assert steps[0]["response_length"]["mean"] > 0 and steps[0]["critic"]["advantages"]["max"] != 0
    if name == "dapo":
        assert "overlong_penalty" in steps[0]["reward"] and 0 < steps[0]["filter"]["kept_share"] <= 1
    if name == "the sampler's log-probabilities":
        assert "old" not in steps[0]["timing_s"] and abs(steps[0]["actor"]["ppo_kl"]) > 0
        assert steps[0]["rollout"]["logprob_gap"]["max"] < 1e-4
    if name == "truncated importance sampling":
        assert steps[0]["actor"]["is_weight"] == pytest.approx(1.0, abs=1e-3)


def test_an_estimator_of_the_users_own(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(
        "import torch\nfrom foveal.algorithm import Advantages\n\n\n"
        "def nothing(batch, config):\n"
        "    zeros = torch.zeros_like(batch.token_rewards)\n"
        "    return Advantages(zeros, zeros)\n"
    )
    changes = [f"algorithm.adv_estimator={own}:nothing", "algorithm.disable_kl=true"]
    assert main(["train", *small_run(tmp_path, "qwen2_5_vl", *changes)]) == 0
    (step,) = (r for r in read_log(tmp_path / "run") if "actor" in r)
    assert step["critic"]["advantages"]["max"] == 0 and step["actor"]["grad_norm"] == 0


GAE = [
    "algorithm.adv_estimator=gae",
    "worker.critic.global_batch_size=4",
    "worker.critic.optim.lr=1.0e-3",
    "algorithm.use_kl_loss=false",
    "algorithm.kl_penalty=kl",
    "trainer.critic_warmup=1",
    "trainer.save_freq=1",
]


def critic_tensors(step: Path) -> dict[str, torch.Tensor]:
    reader = ShardReader(step / "critic")
    found = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in reader.index.items()}  # type: ignore[union-attr]
    reader.fill(found)
    return found


def test_a_checkpoint_without_a_critic_is_refused_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["train", *small_run(tmp_path, "qwen2_5_vl")]) == 0
    monkeypatch.setattr("foveal.trainer.start_workers", None)
    capsys.readouterr()
    assert main(["train", *small_run(tmp_path, "qwen2_5_vl", *GAE, "trainer.max_steps=2")]) == 1
    assert "foveal merge" in capsys.readouterr().err


def test_a_warm_up_to_the_end_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *small_run(tmp_path, "qwen2_5_vl", *GAE)]) == 0
    assert "trainer.critic_warmup=1: all 1 steps train the critic alone" in capsys.readouterr().err


@pytest.mark.slow
def test_ppo_with_a_critic_warms_up_saves_and_resumes(tmp_path: Path) -> None:
    arguments = small_run(tmp_path, "qwen2_5_vl", *GAE, "trainer.max_steps=3")
    assert main(["train", *arguments]) == 0
    run = tmp_path / "run"
    records = read_log(run)
    assert "lr" not in records[0]["actor"] and "lr" in records[1]["actor"]  # the critic alone in the first step
    assert all(r["critic"]["vf_loss"] > 0 and r["critic"]["grad_norm"] > 0 for r in records)
    assert {"values", "update_critic"} <= records[0]["timing_s"].keys()
    first, second = (load_trained(run / f"global_step_{n}", dtype=torch.float32).state_dict() for n in (1, 2))
    start = load_model(str(tmp_path / "model_qwen2_5_vl"), dtype=torch.float32, device=torch.device("cpu")).state_dict()
    assert all(torch.equal(first[k], start[k]) for k in start)
    assert any(not torch.equal(first[k], second[k]) for k in start)

    again = tmp_path / "again"
    changes = [f"trainer.save_checkpoint_path={again}", f"trainer.load_checkpoint_path={run / 'global_step_2'}"]
    assert main(["train", *arguments, *changes]) == 0
    expected, found = critic_tensors(run / "global_step_3"), critic_tensors(again / "global_step_3")
    assert expected.keys() == found.keys() and all(torch.equal(expected[k], found[k]) for k in expected)
