"""The channel that weights come through, between two processes: every bit arrives, in types and shapes of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from foveal.cluster.weight_channel import Bucket, WeightChannel, WeightSender, take_weights
from foveal.models.loading import load_model
from foveal.models.named_tensors import in_buckets, named_tensors
from foveal.quickstart.tiny import build_tiny

CPU = torch.device("cpu")
SECONDS = 60.0
ROUNDS = 2
ODD = {
    "bytes": torch.arange(7, dtype=torch.uint8),
    "empty": torch.zeros(0, 3),
    "number": torch.tensor(2.5, dtype=torch.float64),
    "half": torch.tensor([float("nan"), -0.0, 1e-7], dtype=torch.bfloat16),
    "transposed": torch.arange(12.0).view(3, 4).T,
}
ADAPTER = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, 1)}
CONFIG = {"r": 1, "target_modules": ["q"]}


class Keeper:
    """An engine that keeps what it is given."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.versions: list[int] = []
        self.adapter: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None

    def update_weights(self, buckets: Iterator[Bucket], version: int) -> None:
        self.weights = {name: tensor.clone() for bucket in buckets for name, tensor in bucket}
        self.versions.append(version)

    def update_adapter(self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], version: int) -> None:
        self.adapter = ({name: tensor.clone() for name, tensor in tensors.items()}, dict(config))
        self.versions.append(version)


def receive(port: int, path: Path) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, 2, is_master=False, wait_for_workers=False)
    channel = WeightChannel(("localhost", port), 1, 2, CPU, SECONDS)
    keeper: Any = Keeper()
    kept = []
    for number in range(ROUNDS):
        version = take_weights(channel, keeper)
        kept.append((version, keeper.weights, keeper.adapter))
        store.set(f"taken {number}", "")  # as the call of an engine's process returns
    torch.save((kept, keeper.versions), path)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def test_every_bit_arrives(tmp_path: Path) -> None:
    model = load_model(str(build_tiny(tmp_path / "model", "qwen2_5_vl", tie=True)), dtype=torch.float32, device=CPU)
    store = dist.TCPStore("localhost", 0, 2, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))
    child = mp.get_context("spawn").Process(target=receive, args=(store.port, tmp_path / "got.pt"))
    child.start()
    try:
        channel = WeightChannel(("localhost", store.port), 0, 2, CPU, SECONDS)
        sender = WeightSender(channel, torch.bfloat16, takes_adapters=True)
        assert not sender.has_base
        sender.begin()
        sender.update_weights(named_tensors(model, dtype=sender.dtype, bucket_bytes=4096), 3)
        sender.update_adapter(ADAPTER, CONFIG, 3)
        sender.end()
        assert sender.has_base
        store.wait(["taken 0"], timedelta(seconds=SECONDS))
        told = store.num_keys()
        sender.begin()
        sender.update_weights(in_buckets(ODD.items(), 16), 4)
        sender.end()
        assert store.num_keys() < told  # what was heard is forgotten
        child.join(SECONDS)
        assert child.exitcode == 0
    finally:
        child.kill()
    kept, versions = torch.load(tmp_path / "got.pt", weights_only=False)
    assert versions == [3, 3, 4]
    (first, weights, adapter), (second, odd, _) = kept
    assert (first, second) == (3, 4)
    wanted = dict(pair for bucket in named_tensors(model, dtype=torch.bfloat16) for pair in bucket)
    for found, expected in ((weights, wanted), (odd, ODD), (adapter[0], ADAPTER)):
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
            assert bits(found[name]) == bits(tensor), name
    assert adapter[1] == CONFIG
    assert any("embed" in name for name in weights) and not any("lm_head" in name for name in weights)


def test_processes_after_the_first_gather_and_send_nothing() -> None:
    seen = []

    def buckets() -> Iterator[Bucket]:
        for name in "ab":
            seen.append(name)
            yield [(name, torch.zeros(1))]

    sender = WeightSender(None, torch.float32, takes_adapters=False)
    sender.begin()
    sender.update_weights(buckets(), 1)
    sender.end()
    assert seen == ["a", "b"]


def test_a_sender_that_never_comes_is_an_error() -> None:
    store = dist.TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False)
    channel = WeightChannel(("localhost", store.port), 0, 1, CPU, 0.2)
    with pytest.raises(dist.DistStoreError):
        channel.hear()
