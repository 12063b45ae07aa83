from __future__ import annotations

from pathlib import Path

import pytest

from foveal.cluster.room import check_room, count_parameters, held_bytes
from foveal.config import Config, load_config
from foveal.errors import ConfigError
from foveal.models.loading import load_model
from foveal.quickstart.tiny import build_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("room")
    build_tiny(folder, "qwen2_5_vl")
    return folder


def config_for(folder: Path, *overrides: str) -> Config:
    return load_config([f"worker.actor.model.model_path={folder}", "worker.rollout.n=4", *overrides])


def test_parameters_are_those_of_the_loaded_model(folder: Path) -> None:
    import torch

    model = load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    assert count_parameters(str(folder)) == sum(p.numel() for p in model.parameters())


def test_bytes_by_hand(folder: Path) -> None:
    """float32 weights and two moments take 12 bytes a weight, the bf16 reference 2."""
    count = count_parameters(str(folder))
    assert held_bytes(config_for(folder), train=True) == 14 * count
    assert held_bytes(config_for(folder, "algorithm.disable_kl=true"), train=True) == 12 * count
    assert held_bytes(config_for(folder, "worker.actor.fsdp.torch_dtype=bf16"), train=True) == 8 * count
    assert held_bytes(config_for(folder), train=False) == 4 * count


def test_what_waits_on_the_host_takes_no_room(folder: Path) -> None:
    count = count_parameters(str(folder))
    keys = ["worker.actor.offload.offload_params=true", "worker.actor.offload.offload_optimizer=true"]
    assert held_bytes(config_for(folder, keys[1]), train=True) == 6 * count
    assert held_bytes(config_for(folder, *keys, "worker.ref.offload.offload_params=true"), train=True) == 0
    assert held_bytes(config_for(folder, "worker.actor.optim.strategy=adamw_bf16"), train=True) == 8 * count


def test_refuses_what_does_not_fit_and_says_what_does(folder: Path) -> None:
    held = held_bytes(config_for(folder), train=True)
    check_room(config_for(folder, "worker.rollout.gpu_memory_utilization=0.46"), 2 * held, train=True)
    with pytest.raises(ConfigError, match=r"0\.6 given.*set it to 0\.47 or less"):
        check_room(config_for(folder), 2 * held, train=True)
    with pytest.raises(ConfigError, match=r"of it; move what waits to the host \(worker\.actor\.offload\."):
        check_room(config_for(folder), held, train=True)
