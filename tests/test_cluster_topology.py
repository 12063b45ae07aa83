"""What keeps devices from working together is said before any of them is taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foveal.cluster.topology import topology_problems
from foveal.config import load_config


def problems(*overrides: str, engine: str = "transformers") -> list[str]:
    base = ["worker.rollout.n=2", "worker.rollout.tensor_parallel_size=1", "trainer.n_gpus_per_node=8"]
    return topology_problems(load_config([*base, *overrides]), engine)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "engine"),
    [
        (["trainer.n_gpus_per_node=1"], "vllm"),
        (["trainer.n_gpus_per_node=3"], "vllm"),
        (["trainer.nnodes=2", "worker.actor.fsdp.fsdp_size=8", "worker.ref.fsdp.fsdp_size=4"], "vllm"),
        (["trainer.nnodes=2", "worker.actor.ulysses_size=4", "worker.rollout.tensor_parallel_size=2"], "vllm"),
        (["trainer.n_gpus_per_node=3", "worker.rollout.tensor_parallel_size=2"], "transformers"),
        (["trainer.n_gpus_per_node=1", "worker.rollout.tensor_parallel_size=2"], "vllm"),
        (["trainer.n_gpus_per_node=2", "trainer.nnodes=2", "worker.rollout.tensor_parallel_size=4"], "vllm"),
    ],
)
def test_what_divides_passes(overrides: list[str], engine: str) -> None:
    assert problems(*overrides, engine=engine) == []


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["trainer.n_gpus_per_node=6", "worker.actor.ulysses_size=4"],
            "worker.actor.ulysses_size=4: 6 devices do not fall into groups of 4; set it to 1, 2, 3, 6",
        ),
        (
            ["trainer.n_gpus_per_node=1", "worker.actor.ulysses_size=2"],
            "worker.actor.ulysses_size=2: 1 devices do not fall into groups of 2; set it to 1",
        ),
        (
            ["trainer.n_gpus_per_node=6", "worker.actor.fsdp.fsdp_size=4"],
            "worker.actor.fsdp.fsdp_size=4: 6 devices do not fall into groups of 4; set it to 1, 2, 3, 6, or -1 for "
            "one group of all",
        ),
        (
            ["trainer.n_gpus_per_node=3", "worker.rollout.tensor_parallel_size=2"],
            "worker.rollout.tensor_parallel_size=2: 3 devices do not fall into groups of 2; set it to 1, 3",
        ),
        (
            ["trainer.nnodes=2", "trainer.n_gpus_per_node=3", "worker.rollout.tensor_parallel_size=2"],
            "worker.rollout.tensor_parallel_size=2: an engine would lie across machines of 3 devices; set it to 1, 3",
        ),
        (
            ["trainer.n_gpus_per_node=2", "worker.actor.ulysses_size=2", "algorithm.adv_estimator=gae"],
            "worker.critic.ulysses_size=1: actor and critic train on the same share of the answers, so it must be "
            "worker.actor.ulysses_size; set it to 2",
        ),
    ],
)
def test_what_does_not_is_named_with_the_cure(overrides: list[str], line: str) -> None:
    assert problems(*overrides, engine="vllm") == [line]


def test_attention_heads_are_shared_evenly(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_attention_heads": 6}))
    model = f"worker.actor.model.model_path={tmp_path}"
    [line] = problems("trainer.n_gpus_per_node=4", "worker.actor.ulysses_size=4", model)
    assert "6 attention heads" in line and line.endswith("set it to 1, 2, 3, 6")


def test_several_devices_need_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foveal.cluster.topology.find_spec", lambda name: None)
    [line] = problems("trainer.n_gpus_per_node=2")
    assert "pip install 'foveal[ray]'" in line
    assert problems("trainer.n_gpus_per_node=1") == []


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["trainer.n_gpus_per_node=1", "trainer.async_rollout=true"],
            "trainer.async_rollout=true: answers are sampled beside training, but cluster.rollout_devices is 0; have 2 "
            "or more, and set it to some",
        ),
        (
            ["trainer.n_gpus_per_node=4", "trainer.async_rollout=true"],
            "trainer.async_rollout=true: answers are sampled beside training, but cluster.rollout_devices is 0; set it "
            "to some of the 4 devices",
        ),
        (
            ["trainer.n_gpus_per_node=4", "cluster.rollout_devices=4"],
            "cluster.rollout_devices=4: of 4 devices none is left to train; set it to 3 at most",
        ),
        (
            ["trainer.n_gpus_per_node=1", "cluster.rollout_devices=1"],
            "cluster.rollout_devices=1: of 1 device none is left to train; set it to 0, or have more devices",
        ),
        (
            ["trainer.n_gpus_per_node=6", "cluster.rollout_devices=3", "worker.rollout.tensor_parallel_size=2"],
            "worker.rollout.tensor_parallel_size=2: 3 devices do not fall into groups of 2; set it to 1, 3",
        ),
        (
            [
                "trainer.nnodes=2",
                "trainer.n_gpus_per_node=4",
                "cluster.rollout_devices=6",
                "worker.rollout.tensor_parallel_size=3",
            ],
            "worker.rollout.tensor_parallel_size=3: an engine would lie across machines of 4 devices; set it to 1, 2, "
            "4",
        ),
        (
            ["trainer.n_gpus_per_node=6", "cluster.rollout_devices=2", "worker.actor.ulysses_size=3"],
            "worker.actor.ulysses_size=3: 4 devices do not fall into groups of 3; set it to 1, 2, 4",
        ),
    ],
)
def test_engines_need_devices_of_their_own(overrides: list[str], line: str) -> None:
    assert problems(*overrides, engine="vllm") == [line]


def test_the_transformers_engine_stays_with_the_trainer() -> None:
    [line] = problems("trainer.n_gpus_per_node=2", "cluster.rollout_devices=1")
    assert line == (
        "cluster.rollout_devices=1: the transformers engine samples with the trainer's own module, on the trainer's "
        "own devices; set it to 0, or use vLLM (worker.rollout.name=vllm)"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.n_gpus_per_node=8", "cluster.rollout_devices=3", "trainer.async_rollout=true"],
        ["trainer.nnodes=2", "cluster.rollout_devices=8", "worker.rollout.tensor_parallel_size=4"],
        ["trainer.n_gpus_per_node=2", "cluster.rollout_devices=1", "worker.rollout.tensor_parallel_size=2"],
    ],
)
def test_engines_apart_divide_their_own_devices(overrides: list[str]) -> None:
    assert problems("trainer.n_gpus_per_node=8", *overrides, engine="vllm") == []
