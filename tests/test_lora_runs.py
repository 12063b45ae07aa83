"""Whole runs with adapters through the command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from foveal.cli import main
from foveal.cluster.room import count_parameters, held_bytes
from foveal.config import load_config
from foveal.errors import CheckpointError
from foveal.models.loading import load_model
from foveal.models.lora import is_factor
from foveal.models.lora_setup import empty_adapted
from foveal.quickstart.tiny import build_tiny
from foveal.train.checkpoint import check_actor, load_actor, load_trained
from foveal.train.shards import ShardReader
from tests.lora_support import CPU, adapted, write_adapter
from tests.small_run import read_log, small_run

LORA = "worker.actor.model.lora"
RANK = f"{LORA}.rank=4"


def factors(run: Path, step: int) -> dict[str, torch.Tensor]:
    state = load_trained(run / f"global_step_{step}", dtype=torch.float32).state_dict()
    return {name: tensor for name, tensor in state.items() if is_factor(name)}


def test_a_run_trains_adapters_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = small_run(tmp_path, "qwen3_vl", RANK, "trainer.max_steps=3", "algorithm.kl_penalty=full")
    assert main(["train", *argv]) == 0
    model = tmp_path / "model_qwen3_vl"
    records = [record["actor"] for record in read_log(tmp_path / "run")]
    assert records[0]["kl_loss"] == 0 and records[2]["kl_loss"] > 0  # the reference stays where the policy began
    assert all(record["grad_norm"] > 0 for record in records)
    assert "LoRA of rank 4 on" in capsys.readouterr().out
    actor = tmp_path / "run" / "global_step_3" / "actor"
    weights = {name.removeprefix("model.") for name in ShardReader(actor).index if name.startswith("model.")}
    assert weights and all(map(is_factor, weights))
    info = check_actor(actor)
    assert info.source == str(model)
    assert info.lora is not None and info.lora["r"] == 4 and info.lora["lora_alpha"] == 64
    idle = {name for name, t in factors(tmp_path / "run", 3).items() if name.endswith("lora_B") and not t.any()}
    # which nothing reads: in a model of two layers these features come in after the last attention
    assert all("deepstack_merger_list.1" in name for name in idle)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    common = [RANK, "trainer.save_freq=1", "data.rollout_batch_size=4", "worker.actor.ppo_epochs=2"]
    whole = small_run(tmp_path, "qwen3_vl", *common, "trainer.max_steps=3")
    assert main(["train", *whole]) == 0
    parts = [*whole, f"trainer.save_checkpoint_path={tmp_path / 'parts'}"]
    assert main(["train", *parts, "trainer.max_steps=1"]) == 0
    assert main(["train", *parts]) == 0
    expected, found = factors(tmp_path / "run", 3), factors(tmp_path / "parts", 3)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    losses = [[r["actor"]["pg_loss"] for r in read_log(tmp_path / run)] for run in ("run", "parts")]
    assert losses[0] == losses[1]


def test_a_run_goes_on_from_an_adapter_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = small_run(tmp_path, "qwen3_vl")
    base = tmp_path / "model_qwen3_vl"
    adapter = write_adapter(adapted(base, exclude_modules=".*visual.*"), tmp_path / "adapter", base)
    assert main(["train", *argv, f"worker.actor.model.model_path={adapter}", "trainer.max_steps=2"]) == 0
    assert f"going on from the adapter {adapter}, of {base}: rank 4, alpha 8" in capsys.readouterr().out
    records = [record["actor"] for record in read_log(tmp_path / "run")]
    assert records[0]["kl_loss"] == pytest.approx(0, abs=1e-6) and records[1]["kl_loss"] > 1e-6
    info = check_actor(tmp_path / "run" / "global_step_2" / "actor")
    assert info.source == str(base) and info.lora is not None and info.lora["lora_alpha"] == 8


def test_an_adapter_whose_model_has_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = small_run(tmp_path, "qwen3_vl")
    base = tmp_path / "model_qwen3_vl"
    adapter = write_adapter(adapted(base), tmp_path / "adapter", tmp_path / "before")
    assert main(["train", *argv, f"worker.actor.model.model_path={adapter}"]) != 0
    assert f"is an adapter of the model {tmp_path / 'before'}, which is not there" in capsys.readouterr().err
    assert main(["train", *argv, f"{LORA}.adapter_path={adapter}"]) == 0
    assert f"of {base} (its adapter_config.json names {tmp_path / 'before'}): rank 4" in capsys.readouterr().out


def test_a_line_says_what_is_excluded_and_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = small_run(tmp_path, "qwen3_vl", RANK)
    assert main(["train", *argv, f"{LORA}.exclude_modules=[visual, qkv]"]) == 0
    assert f"{LORA}.exclude_modules: no linear layer is meant by visual\n" in capsys.readouterr().out


def test_evaluation_scores_an_adapter_and_a_checkpoint(tmp_path: Path) -> None:
    """Whatever the configuration says of adapters that are to be trained."""
    argv = small_run(tmp_path, "qwen3_vl", RANK, f"{LORA}.alpha=16")
    assert main(["train", *argv]) == 0
    assert main(["eval", str(tmp_path / "run" / "global_step_1"), *argv]) == 0
    adapter = write_adapter(adapted(tmp_path / "model_qwen3_vl"), tmp_path / "adapter", tmp_path / "model_qwen3_vl")
    assert main(["eval", str(adapter), *argv]) == 0
    assert main(["eval", str(tmp_path / "run" / "global_step_1"), *argv, f"{LORA}.rank=8"]) == 0
    frozen = [f"worker.actor.model.freeze_{part}=true" for part in ("vision_tower", "language_model")]
    assert main(["eval", str(tmp_path / "run" / "global_step_1"), *argv, *frozen]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([f"{LORA}.rank=8"], f"{LORA}.rank: 8 given, but the adapter .* has rank 4"),
        ([f"{LORA}.alpha=16"], f"{LORA}.alpha: 16 given, but the adapter .* has alpha 8"),
        ([f"{LORA}.adapter_path=/nowhere"], "names another"),
        (["trainer.load_checkpoint_path={adapter}"], f"is an adapter and no checkpoint.* {LORA}.adapter_path="),
    ],
)
def test_what_an_adapter_says_is_not_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], message: str
) -> None:
    argv = small_run(tmp_path, "qwen3_vl")
    base = tmp_path / "model_qwen3_vl"
    adapter = write_adapter(adapted(base), tmp_path / "adapter", base)
    change = [text.format(adapter=adapter) for text in change]
    assert main(["train", *argv, f"worker.actor.model.model_path={adapter}", *change]) != 0
    found = capsys.readouterr()
    assert re.search(message, " ".join((found.out + found.err).split()))


def test_going_on_with_another_rank_or_without_adapters_is_refused(tmp_path: Path) -> None:
    argv = small_run(tmp_path, "qwen3_vl", RANK)
    assert main(["train", *argv]) == 0
    step = tmp_path / "run" / "global_step_1"
    base = tmp_path / "model_qwen3_vl"
    with pytest.raises(CheckpointError, match=r"trained with lora.rank=4, this run has 8"):
        load_actor(step, adapted(base, rank=8), None)
    with pytest.raises(CheckpointError, match=r"trained with lora.alpha=64, this run has 8"):
        load_actor(step, adapted(base), None)
    with pytest.raises(
        CheckpointError, match=r"has adapters on attn.proj, .* this run on q_proj; set lora.target_modules"
    ):
        load_actor(step, adapted(base, alpha=64, target_modules=["q_proj"]), None)
    with pytest.raises(CheckpointError, match=r"trained with lora.rank=4, this run has 0"):
        load_actor(step, load_model(str(base), dtype=torch.float32, device=CPU), None)


def test_adapters_of_bfloat16_weights_are_trained_in_float32(tmp_path: Path) -> None:
    keys = [RANK, "worker.actor.optim.strategy=adamw_bf16", "trainer.max_steps=2"]
    assert main(["train", *small_run(tmp_path, "qwen3_vl", *keys)]) == 0
    index = ShardReader(tmp_path / "run" / "global_step_2" / "actor").index
    dtypes = {entry.properties.dtype for name, entry in index.items() if name.endswith(("lora_B", "exp_avg"))}
    assert dtypes == {torch.float32}


def test_weights_under_the_adapters_are_those_of_the_model_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = small_run(tmp_path, "qwen3_vl", RANK)
    model = tmp_path / "model_qwen3_vl"
    assert main(["train", *argv, f"trainer.load_checkpoint_path={model}"]) != 0
    assert f"Set worker.actor.model.model_path to {model}" in " ".join(capsys.readouterr().err.split())


def test_a_critic_trains_adapters_too(tmp_path: Path) -> None:
    argv = small_run(
        tmp_path,
        "qwen3_vl",
        RANK,
        "worker.critic.model.lora.rank=2",
        "worker.critic.global_batch_size=4",
        "worker.critic.optim.lr=1.0e-3",
        "algorithm.adv_estimator=gae",
        "trainer.max_steps=2",
    )
    assert main(["train", *argv]) == 0
    assert main(["train", *argv, "trainer.max_steps=3"]) == 0  # resumes
    index = ShardReader(tmp_path / "run" / "global_step_3" / "critic").index
    weights = {name for name in index if name.startswith("model.")}
    assert {name for name in weights if not is_factor(name)} == {"model.head.weight", "model.head.bias"}


def test_memory_counts_adapters_and_no_reference(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path, "qwen3_vl")
    keys = [f"worker.actor.model.model_path={folder}", RANK, "algorithm.use_kl_loss=true", "worker.rollout.n=2"]
    config = load_config(keys)
    weights = count_parameters(str(folder))
    empty = empty_adapted(config.worker.actor.model, str(folder))
    adapters = sum(p.numel() for name, p in empty.named_parameters() if is_factor(name))
    assert held_bytes(config, train=True) == 2 * weights + 12 * adapters
    offloaded = load_config([*keys, "worker.actor.offload.offload_optimizer=true"])
    assert held_bytes(offloaded, train=True) == 2 * weights + 4 * adapters
