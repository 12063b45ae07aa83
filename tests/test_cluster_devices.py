"""How many devices a run takes where the configuration leaves it open, and what it says where there are fewer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foveal.cluster.devices import settle_devices
from foveal.config import load_config
from foveal.errors import ConfigError

ray: Any = pytest.importorskip("ray")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says how many GPUs torch shall see; no cluster runs."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def _gpus(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return _gpus


def settled(*overrides: str) -> int:
    config = load_config(["worker.rollout.n=2", *overrides])
    settle_devices(config)
    return config.trainer.devices


@pytest.mark.parametrize(("here", "taken"), [(0, 1), (1, 1), (4, 4)])
def test_every_gpu_of_one_machine_is_taken(here: int, taken: int, gpus: Any) -> None:
    gpus(here)
    assert settled() == taken


@pytest.mark.parametrize(("here", "given"), [(0, 3), (4, 2), (4, 4)])
def test_a_number_that_was_given_stays(here: int, given: int, gpus: Any) -> None:
    gpus(here)
    assert settled(f"trainer.n_gpus_per_node={given}") == given


@pytest.mark.parametrize(("here", "words"), [(1, "1 GPU"), (2, "2 GPUs")])
def test_more_than_are_here_is_refused_with_the_cure(here: int, words: str, gpus: Any) -> None:
    gpus(here)
    with pytest.raises(ConfigError) as caught:
        settled("trainer.n_gpus_per_node=8")
    told = f"trainer.n_gpus_per_node=8, but this machine has {words}: set trainer.n_gpus_per_node={here}"
    assert told in str(caught.value)


def test_gpus_that_are_hidden_are_named(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match=r"1 GPU \(CUDA_VISIBLE_DEVICES=3\)"):
        settled("trainer.n_gpus_per_node=2")


def test_several_machines_without_a_cluster_are_refused(gpus: Any) -> None:
    gpus(1)
    with pytest.raises(ConfigError, match=r"trainer\.nnodes=2 but no Ray cluster runs here: start it with `ray start"):
        settled("trainer.nnodes=2")


@pytest.mark.slow
def test_ray_says_how_many_the_machines_of_its_cluster_have(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.cluster_utils import Cluster

    gpus(1)  # of this process's machine, which several machines leave aside
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1, num_gpus=4)
        cluster.add_node(num_cpus=1, num_gpus=2)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        assert settled("trainer.nnodes=2") == 2 * 2
        assert settled("trainer.n_gpus_per_node=4") == 4  # the run may take them elsewhere in the cluster
        assert not ray.is_initialized()
    finally:
        cluster.shutdown()
