"""Whole runs whose answers come from vLLM: what they log, how they go on, and how a checkpoint is scored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from foveal.cli import main
from foveal.train.checkpoint import load_trained
from tests.small_run import read_log, small_run

pytestmark = pytest.mark.slow

STEPS = 3


def arguments(root: Path, *overrides: str) -> list[str]:
    return small_run(
        root,
        "qwen3_vl",
        "worker.rollout.name=vllm",
        "worker.rollout.val_override_config={temperature: 0.0}",
        "worker.actor.ppo_epochs=2",
        "algorithm.adv_estimator=remax",
        "data.shuffle=true",
        f"trainer.max_steps={STEPS}",
        "trainer.save_freq=1",
        "trainer.val_freq=1",
        *overrides,
    )


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_trained(run / f"global_step_{step}", dtype=torch.float32).state_dict()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an uninterrupted run in its folder `run`."""
    root = tmp_path_factory.mktemp("runs")
    assert main(["train", *arguments(root)]) == 0
    return root


def test_engine_and_trainer_agree_in_every_step_while_weights_move(root: Path) -> None:
    records = [record for record in read_log(root / "run") if "actor" in record]
    assert len(records) == STEPS
    for record in records:
        assert 0 <= record["rollout"]["logprob_gap"]["max"] < 1e-4
        assert record["actor"]["grad_norm"] > 0
    first, last = weights(root / "run", 1), weights(root / "run", STEPS)
    towers = [name for name in first if "visual" in name]
    assert any(not torch.allclose(first[name], last[name], atol=1e-3) for name in towers)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(root: Path) -> None:
    parts = arguments(root, f"trainer.save_checkpoint_path={root / 'parts'}")
    assert main(["train", *parts, f"trainer.max_steps={STEPS - 1}"]) == 0
    assert main(["train", *parts]) == 0
    expected, found = weights(root / "run", STEPS), weights(root / "parts", STEPS)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    whole, resumed = (
        [record["response_length"] for record in read_log(root / folder) if "response_length" in record]
        for folder in ("run", "parts")
    )
    assert whole == resumed and len(whole) == STEPS


def test_eval_of_a_checkpoint_samples_what_validation_sampled(root: Path) -> None:
    out = root / "scored"
    checkpoint = root / "run" / f"global_step_{STEPS}"
    assert main(["eval", str(checkpoint), *arguments(root, f"trainer.save_checkpoint_path={out}")]) == 0
    (folder,) = (out / "eval").iterdir()
    (scored,) = read_log(folder)
    trained = [record for record in read_log(root / "run") if "val" in record][-1]
    assert scored["val_response_length"] == trained["val_response_length"]
    assert scored["val"]["reward_score"] == trained["val"]["reward_score"]
