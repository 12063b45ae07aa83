"""A model spread over two processes trains as one process does: gradients, weights, metrics, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from foveal.config.schema_model import FsdpConfig
from foveal.errors import ConfigError, ModelError
from foveal.models.families import FAMILIES
from foveal.models.filling import fill_weights
from foveal.models.loading import empty_model, load_model
from foveal.models.named_tensors import named_tensors
from foveal.quickstart.tiny import build_tiny
from foveal.train.scorer import TokenScorer
from foveal.train.sharding import device_mesh, mixed_precision, shard
from foveal.train.state import Manifest, load_state, read_manifest, take_state, write_manifest, write_state
from tests.named_tensors_support import built
from tests.sharding_support import CPU, Case, Outcome, critic_trained, in_processes, policy_of, trained, weights

FAMILY_CASES = ("qwen2_5_vl", "qwen3_vl", "qwen2_5_vl in float32")
HUB = " of the hub"
LOADED = (*FAMILIES, "qwen3_vl_moe" + HUB)
OTHER_CASES = (
    "two copies",
    "weights gathered by layer",
    "weights not sharded",
    "weights in host memory",
    "frozen tower",
    "tower alone",
    "exact KL",
    "critic",
)


def cases_in(folder: Path) -> dict[str, Case]:
    qwen25, qwen3 = folder / "qwen2_5_vl", folder / "qwen3_vl"
    fsdp = "worker.actor.fsdp"
    return {
        "qwen2_5_vl": Case(qwen25),
        "qwen3_vl": Case(qwen3),
        "qwen2_5_vl in float32": Case(qwen25, torch.float32),
        "two copies": Case(qwen3, overrides=(f"{fsdp}.fsdp_size=1",)),
        "weights gathered by layer": Case(
            qwen3, overrides=(f"{fsdp}.gather_weights=layer", f"{fsdp}.gradient_sync=every")
        ),
        "weights not sharded": Case(
            qwen25, overrides=(f"{fsdp}.enable_full_shard=false", f"{fsdp}.gradient_sync=every")
        ),
        "weights in host memory": Case(
            qwen3,
            overrides=(f"{fsdp}.enable_cpu_offload=true", "worker.actor.model.enable_gradient_checkpointing=false"),
        ),
        "frozen tower": Case(qwen3, frozen_tower=True),
        # an optimizer step that ends with micro-batches of text, which have no backward pass, and one without any
        "tower alone": Case(
            qwen3,
            overrides=("worker.actor.model.enable_gradient_checkpointing=false",),
            tower_alone=True,
            pictures=[1, 0, 0, 0, 0],
            budget=12,
        ),
        "exact KL": Case(qwen25, overrides=("algorithm.kl_penalty=full",)),
        "bfloat16": Case(qwen3, torch.float32, half=True),
        "text in bfloat16": Case(qwen3, torch.float32, half=True, pictures=[0] * 5, budget=12),
        "adam": Case(qwen3, torch.float32, adam=True),
    }


@dataclass
class FromProcess:
    """What one of two processes found.

    Attributes:
        outcomes: by case.
        loaded: by model, names of weights and buffers that differ from plain loading, and the share of the weights
            that this process held.
        resumed: weights and moments read from a checkpoint of one process.
        failure: what an incomplete folder gave.
    """

    outcomes: dict[str, Outcome]
    loaded: dict[str, tuple[list[str], float]]
    resumed: dict[str, torch.Tensor]
    failure: str


def state_of(policy: Any) -> dict[str, torch.Tensor]:
    """Weights and AdamW's moments, whole."""
    found = weights(policy.model)
    for name, parameter in policy.model.named_parameters():
        for key, value in policy.optimizer.state[parameter].items():
            found[f"{name}.{key}"] = value.full_tensor() if isinstance(value, DTensor) else value
    return found


def load_into(policy: Any, folder: Path) -> dict[str, torch.Tensor]:
    manifest = read_manifest(folder, Manifest, what="a state", cure="")
    load_state(folder, manifest, policy.model, policy.optimizer)
    return state_of(policy)


def work(rank: int, folder: Path) -> FromProcess:
    outcomes = {}
    for name, case in cases_in(folder).items():
        policy = policy_of(case, sharded=True)
        outcomes[name] = trained(case, policy, rank)
        if name == "adam":
            manifest = write_state(folder / "from_two", take_state(policy.model, policy.optimizer))
            if rank == 0:
                write_manifest(folder / "from_two", manifest)
    outcomes["critic"] = critic_trained(folder / "qwen2_5_vl", rank)
    resumed = load_into(policy_of(cases_in(folder)["adam"], sharded=True), folder / "from_one")
    loaded = {name: differences(folder / "loading" / name) for name in LOADED}
    try:
        sharded_model(folder / "incomplete")
        failure = ""
    except ModelError as error:
        failure = str(error)
    return FromProcess(outcomes, loaded, resumed, failure)


def sharded_model(folder: Path) -> Any:
    fsdp = FsdpConfig()
    model = empty_model(str(folder), dtype=torch.float32, device=CPU)
    scorer = TokenScorer(model, forbidden_ids=[], temperature=1.0, autocast=None)
    shard(scorer, fsdp, device_mesh(fsdp, "cpu"), mixed_precision(fsdp, CPU))
    fill_weights(model, str(folder), device=CPU)
    return model


def differences(folder: Path) -> tuple[list[str], float]:
    plain: Any = load_model(str(folder), dtype=torch.float32, device=CPU)
    model = sharded_model(folder)
    held = sum(p.to_local().numel() for p in model.parameters()) / sum(p.numel() for p in plain.parameters())
    found, expected = weights(model), weights(plain)
    found |= dict(model.named_buffers())
    expected |= dict(plain.named_buffers())
    names = [name for name in expected if not (name in found and torch.equal(found[name], expected[name]))]
    sent = {name: tensor.clone() for bucket in named_tensors(model) for name, tensor in bucket}
    as_saved = {name: tensor for bucket in named_tensors(plain) for name, tensor in bucket}
    names += [name for name in as_saved if not (name in sent and torch.equal(sent[name], as_saved[name]))]
    return names + sorted(found.keys() - expected.keys()) + sorted(sent.keys() - as_saved.keys()), held


def turn_experts(path: Path) -> None:
    """The layout of Qwen3-VL-MoE's experts on the hub; `save_pretrained` writes the module's own."""
    tensors = load_file(path)
    turned = {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in tensors.items()}
    save_file(turned, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharding")
    for name in ("qwen2_5_vl", "qwen3_vl"):
        build_tiny(folder / name, name)
    for index, name in enumerate(LOADED):
        model = built(name.removesuffix(HUB), tie=index % 2 == 1)
        model.save_pretrained(folder / "loading" / name)
        if name.endswith(HUB):
            turn_experts(folder / "loading" / name / "model.safetensors")
    model = built("qwen3")
    kept = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(folder / "incomplete", state_dict=kept)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Outcome]:
    """What one process does with each case; the last leaves a checkpoint."""
    outcomes = {}
    for name, case in cases_in(folder).items():
        policy = policy_of(case, sharded=False)
        outcomes[name] = trained(case, policy)
        if name == "adam":
            write_manifest(
                folder / "from_one", write_state(folder / "from_one", take_state(policy.model, policy.optimizer))
            )
    outcomes["critic"] = critic_trained(folder / "qwen2_5_vl")
    return outcomes


@pytest.fixture(scope="module")
def together(folder: Path, alone: dict[str, Outcome]) -> list[FromProcess]:
    return in_processes(work, folder, folder)


@pytest.mark.parametrize("case", FAMILY_CASES + OTHER_CASES)
def test_two_processes_take_the_steps_of_one(together: list[FromProcess], alone: dict[str, Outcome], case: str) -> None:
    """Pictures in one process only, another number of micro-batches in each, one step without groups in the first."""
    expected = alone[case]
    limit = 1e-9 if any(after.dtype == torch.float64 for after in expected.after.values()) else 1e-5
    for process in together:
        found = process.outcomes[case]
        for name, before in expected.before.items():
            step = expected.after[name] - before
            taken = found.after[name] - found.before[name]
            assert (taken - step).norm() <= limit * step.norm(), name


@pytest.mark.parametrize("case", FAMILY_CASES + OTHER_CASES)
def test_both_processes_report_the_metrics_of_one(
    together: list[FromProcess], alone: dict[str, Outcome], case: str
) -> None:
    """Among them the gradient's norm before clipping, and the loss."""
    for process in together:
        found = process.outcomes[case].metrics
        assert found == pytest.approx(alone[case].metrics, rel=2e-6)  # sums of float32 numbers in another order


def test_log_probabilities_after_it_are_those_of_one_process(
    together: list[FromProcess], alone: dict[str, Outcome]
) -> None:
    expected = alone["qwen3_vl"].logprobs
    found = {index: values for process in together for index, values in process.outcomes["qwen3_vl"].logprobs.items()}
    assert found.keys() == expected.keys()
    assert all(np.allclose(found[index], expected[index], rtol=0, atol=1e-6) for index in expected)


@pytest.mark.parametrize("case", ["bfloat16", "text in bfloat16"])
def test_bfloat16_in_computation_leaves_float32_weights_and_much_the_same_steps(
    together: list[FromProcess], alone: dict[str, Outcome], case: str
) -> None:
    found, expected = together[0].outcomes[case], alone[case]
    for name, after in found.after.items():
        assert after.dtype == torch.float32
        if "visual" not in name:
            step = expected.after[name] - expected.before[name]
            assert (after - found.before[name] - step).norm() <= 0.1 * step.norm(), name
    assert any(not torch.equal(found.after[name], found.after[name].bfloat16().float()) for name in found.after)


@pytest.mark.parametrize("name", LOADED)
def test_each_process_reads_its_part_of_the_files(together: list[FromProcess], name: str) -> None:
    for process in together:
        differing, share = process.loaded[name]
        assert differing == []
        assert share == pytest.approx(0.5, abs=0.05)


def test_an_incomplete_folder_is_refused_by_every_process(together: list[FromProcess]) -> None:
    assert all("1 weights are missing (model.layers.1.mlp.up_proj.weight)" in p.failure for p in together)


def test_two_processes_read_what_one_wrote(folder: Path, together: list[FromProcess]) -> None:
    policy = policy_of(cases_in(folder)["adam"], sharded=False)
    expected = load_into(policy, folder / "from_one")
    for process in together:
        assert process.resumed.keys() == expected.keys()
        assert all(torch.equal(process.resumed[name], expected[name]) for name in expected)


def test_one_process_reads_what_two_wrote(folder: Path, together: list[FromProcess]) -> None:
    found = load_into(policy_of(cases_in(folder)["adam"], sharded=False), folder / "from_two")
    trained_weights = together[0].outcomes["adam"].after
    assert all(torch.equal(found[name], trained_weights[name]) for name in trained_weights)
    assert found["lm_head.weight.exp_avg"].norm() > 0


def test_groups_of_devices_must_come_out_even(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    fsdp = FsdpConfig(fsdp_size=3)
    with pytest.raises(ConfigError, match=r"fsdp_size: 3 given, but 8 devices .* divisor of 8"):
        device_mesh(fsdp, "cpu")
