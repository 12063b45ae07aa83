from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foveal.cluster.room import BESIDE_SHARE, PLAINLY, check_room, count_parameters, held_bytes, needless_spread
from foveal.config import Config, load_config
from foveal.data.processing import load_processing
from foveal.errors import ConfigError, EngineError
from foveal.models.loading import load_model
from foveal.quickstart.tiny import build_tiny
from foveal.rollout import vllm_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("room")
    build_tiny(folder, "qwen2_5_vl")
    return folder


def config_for(folder: Path, *overrides: str) -> Config:
    return load_config([f"worker.actor.model.model_path={folder}", "worker.rollout.n=4", *overrides])


def test_parameters_are_those_of_the_loaded_model(folder: Path) -> None:
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
    taken = held_bytes(config_for(folder), train=True) + int(BESIDE_SHARE)
    check_room(config_for(folder, "worker.rollout.gpu_memory_utilization=0.46"), 2 * taken, train=True)
    with pytest.raises(ConfigError, match=r"0\.6 given.*set it to 0\.47 or less"):
        check_room(config_for(folder), 2 * taken, train=True)
    with pytest.raises(ConfigError, match=r"graphs 1\.5 GiB; move what waits to the host \(worker\.actor\.offload\."):
        check_room(config_for(folder), taken, train=True)


def test_an_engine_over_several_devices_is_remarked_on_where_the_weights_plainly_fit_on_one(folder: Path) -> None:
    weights = 2 * count_parameters(str(folder))
    largest = int(weights / PLAINLY / 0.6)  # the share is 0.6 by default, the size 2
    several = "trainer.n_gpus_per_node=4"
    line = needless_spread(config_for(folder, several), 2 * largest)
    assert line is not None and "worker.rollout.tensor_parallel_size=2: the model's weights take 10% of the" in line
    assert needless_spread(config_for(folder, several), largest - 10) is None
    assert needless_spread(config_for(folder, several, "worker.rollout.dtype=fp32"), 2 * largest - 20) is None
    assert needless_spread(config_for(folder, several, "worker.rollout.tensor_parallel_size=1"), 2 * largest) is None


def test_engines_of_one_device_each_are_not_remarked_on(folder: Path) -> None:
    assert needless_spread(config_for(folder, "trainer.n_gpus_per_node=1"), 2**40) is None
    apart = ["trainer.n_gpus_per_node=4", "cluster.rollout_devices=1"]
    assert needless_spread(config_for(folder, *apart), 2**40) is None
    apart[1] = "cluster.rollout_devices=2"
    assert needless_spread(config_for(folder, *apart), 2**40) is not None


def test_the_remark_is_one_line_before_the_engine_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_gpu(*_: Any, **__: Any) -> None:
        raise EngineError("no GPU")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**40))
    monkeypatch.setattr(vllm_engine, "VllmEngine", no_gpu)
    processing = load_processing(str(folder))
    for devices in (4, 1):
        config = config_for(folder, f"trainer.n_gpus_per_node={devices}")
        with pytest.raises(EngineError, match="no GPU"):
            vllm_engine.start_engine(config, processing, device=torch.device("cuda"), images=0)
    said = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == ["worker.rollout.tensor_parallel_size=2", "starting vLLM", "starting vLLM"]
