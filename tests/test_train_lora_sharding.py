"""Adapters spread over two processes train as in one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foveal.models.lora import adapter_tensors, lora_layers
from foveal.models.named_tensors import named_tensors
from foveal.quickstart.tiny import build_tiny
from foveal.train.state import Manifest, load_state, read_manifest, take_state, write_manifest, write_state
from tests.sharding_support import Case, Outcome, in_processes, policy_of, trained

OFFLOAD = ("worker.actor.fsdp.enable_cpu_offload=true", "worker.actor.model.enable_gradient_checkpointing=false")
CASES = ("exact", "exact KL", "frozen tower", "in host memory")


def cases_in(folder: Path) -> dict[str, Case]:
    qwen25, qwen3 = folder / "qwen2_5_vl", folder / "qwen3_vl"
    return {
        "exact": Case(qwen25, lora=True),
        "exact KL": Case(qwen3, lora=True, overrides=("algorithm.kl_penalty=full",)),
        "frozen tower": Case(qwen3, lora=True, frozen_tower=True),
        "in host memory": Case(qwen3, lora=True, overrides=OFFLOAD),
        "bfloat16 weights": Case(qwen3, torch.bfloat16, lora=True, adam=True),
    }


def work(rank: int, folder: Path) -> tuple[dict[str, Outcome], dict[str, torch.Tensor], set[torch.dtype]]:
    """Outcomes by case; merged weights of the last, which goes into a checkpoint; and the types of its weights."""
    outcomes = {}
    for name, case in cases_in(folder).items():
        policy = policy_of(case, sharded=True)
        outcomes[name] = trained(case, policy, rank)
    manifest = write_state(folder / "from_two", take_state(policy.model, policy.optimizer))
    if rank == 0:
        write_manifest(folder / "from_two", manifest)
    merged = {name: tensor.clone() for bucket in named_tensors(policy.model) for name, tensor in bucket}
    return outcomes, merged, {parameter.dtype for parameter in policy.model.parameters() if parameter.requires_grad}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharding")
    for name in ("qwen2_5_vl", "qwen3_vl"):
        build_tiny(folder / name, name)
    return folder


@pytest.fixture(scope="module")
def together(folder: Path) -> list[tuple[dict[str, Outcome], dict[str, torch.Tensor], set[torch.dtype]]]:
    return in_processes(work, folder, folder)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_take_the_steps_of_one(folder: Path, together: list, case: str) -> None:
    expected = trained(cases_in(folder)[case], policy_of(cases_in(folder)[case], sharded=False))
    moved = 0
    for outcomes, *_ in together:
        found = outcomes[case]
        assert found.metrics == pytest.approx(expected.metrics, rel=2e-6)
        for name, before in expected.before.items():
            step = expected.after[name] - before
            assert (found.after[name] - found.before[name] - step).norm() <= 1e-9 * step.norm(), name
            moved += bool(step.any())
            assert "lora_" in name or not step.any(), name
    assert moved


def test_float32_adapters_of_sharded_bfloat16_weights_move(folder: Path, together: list) -> None:
    """And one process reads what two wrote."""
    case = cases_in(folder)["bfloat16 weights"]
    outcome, merged, dtypes = together[0][0]["bfloat16 weights"], together[0][1], together[0][2]
    assert dtypes == {torch.float32}
    alone = policy_of(case, sharded=False)
    load_state(
        folder / "from_two",
        read_manifest(folder / "from_two", Manifest, what="a state", cure=""),
        alone.model,
        alone.optimizer,
    )
    for name, layer in lora_layers(alone.model).items():
        assert torch.equal(layer.lora_B, outcome.after[f"{name}.lora_B"])
        assert not torch.equal(outcome.before[f"{name}.lora_B"], outcome.after[f"{name}.lora_B"])
    found = {name: tensor for bucket in named_tensors(alone.model) for name, tensor in bucket}
    assert found.keys() == merged.keys() and all(torch.equal(found[name], merged[name]) for name in found)
    assert all(tensor.dtype == torch.float32 for tensor in adapter_tensors(alone.model).values())
