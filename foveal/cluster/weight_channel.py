"""Weights from the trainer's first process to the engines' processes: one broadcast a bucket, straight into memory.

Backends of torch.distributed are made directly, since trainers and engines have default groups of their own. Names,
shapes and types go ahead of each bucket as JSON through the store where the processes found each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from foveal.models.named_tensors import in_buckets
from foveal.rollout.engine import RolloutEngine

Bucket = list[tuple[str, torch.Tensor]]
_ALIGNMENT = 16
"""Bytes; a tensor begins at a multiple of it."""


class WeightChannel:
    """One end: rank 0 sends, all others receive the same.

    Args:
        address: host and port of a TCPStore that is there.
        rank, size: of this process, among those at the channel. All of them must build their end together.
        device: where sent tensors lie, and received ones shall.
        timeout: seconds that a bucket may take.
    """

    def __init__(self, address: tuple[str, int], rank: int, size: int, device: torch.device, timeout: float) -> None:
        wait = timedelta(seconds=timeout)
        self._device = device
        # A client of its own: a wait in it keeps nobody else from the store.
        store = dist.TCPStore(*address, size, is_master=False, wait_for_workers=False, timeout=wait)
        self._store = dist.PrefixStore("weights", store)
        meeting = dist.PrefixStore("weights/group", store)
        self._group: Any  # whose stubs lack their methods
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = wait  # NCCL looks at no other
            self._group = dist.ProcessGroupNCCL(meeting, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(meeting, rank, size, wait)
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._options.timeout = wait
        self._told = 0
        self._old: list[str] = []

    def tell(self, message: Any) -> None:
        """Sends something that JSON can hold."""
        key = str(self._told)
        self._store.set(key, json.dumps(message))
        self._old.append(key)
        self._told += 1

    def hear(self) -> Any:
        """Waits for the next thing that was told."""
        message = json.loads(self._store.get(str(self._told)))
        self._told += 1
        return message

    def forget(self) -> None:
        """Clears the store of what was told; once everybody has heard it."""
        for key in self._old:
            self._store.delete_key(key)
        self._old = []

    def send(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            entries = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in bucket]
            self.tell(entries)
            flat = torch.empty(_places(entries)[-1], dtype=torch.uint8, device=self._device)
            for view, (_, tensor) in zip(_views(flat, entries), bucket, strict=True):
                view.copy_(tensor)
            self._broadcast(flat)
        self.tell([])

    def receive(self) -> Iterator[Bucket]:
        """Yields what `send` is given; each bucket lies in memory of its own."""
        while entries := self.hear():
            flat = torch.empty(_places(entries)[-1], dtype=torch.uint8, device=self._device)
            self._broadcast(flat)
            yield [(entry[0], view) for entry, view in zip(entries, _views(flat, entries), strict=True)]

    def _broadcast(self, flat: torch.Tensor) -> None:
        if flat.numel():
            self._group.broadcast([flat], self._options).wait()


class WeightSender:
    """Takes weights in an engine's place, and sends them to the engines at the other ends.

    In the trainer's processes after the first nothing is sent, but weights must be gathered together.

    Args:
        channel: None in those processes.
        dtype, takes_adapters: the engines'.

    Attributes:
        has_base: whether the engines have the base weights already, which an adapter leaves as they are.
    """

    def __init__(self, channel: WeightChannel | None, dtype: torch.dtype | None, takes_adapters: bool) -> None:
        self.channel = channel
        self.dtype = dtype
        self.takes_adapters = takes_adapters
        self.has_base = False

    def begin(self) -> None:
        if self.channel is not None:
            self.channel.forget()

    def update_weights(self, buckets: Iterator[Bucket], version: int) -> None:
        self._send({"weights": version}, buckets)
        self.has_base = True

    def update_adapter(self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], version: int) -> None:
        self._send({"adapter": version, "config": dict(config)}, in_buckets(tensors.items()))

    def end(self) -> None:
        if self.channel is not None:
            self.channel.tell(None)

    def _send(self, message: dict[str, Any], buckets: Iterable[Bucket]) -> None:
        if self.channel is None:
            for _ in buckets:
                pass
            return
        self.channel.tell(message)
        self.channel.send(buckets)


def take_weights(channel: WeightChannel, engine: RolloutEngine) -> int:
    """Gives an engine what a `WeightSender` sends from `begin` to `end`; returns the version."""
    version = -1
    while (message := channel.hear()) is not None:
        buckets = channel.receive()
        if "adapter" in message:
            version = message["adapter"]
            engine.update_adapter(dict(chain.from_iterable(buckets)), message["config"], version)
        else:
            version = message["weights"]
            engine.update_weights(buckets, version)
            for _ in buckets:  # to the end, whatever the engine has left
                pass
    return version


def _places(entries: Sequence[Sequence[Any]]) -> list[int]:
    """Where each tensor begins in the flat buffer, and the buffer's size, in bytes."""
    places = [0]
    for _, shape, dtype in entries:
        size = math.prod(shape) * _dtype(dtype).itemsize
        places.append(places[-1] + math.ceil(size / _ALIGNMENT) * _ALIGNMENT)
    return places


def _views(flat: torch.Tensor, entries: Sequence[Sequence[Any]]) -> Iterator[torch.Tensor]:
    for place, (_, shape, name) in zip(_places(entries), entries, strict=False):
        dtype = _dtype(name)
        yield flat[place : place + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype
