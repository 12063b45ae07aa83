"""Device memory that nothing uses for a while, moved to the host and back.

What moves is the memory under the tensors, not the tensors: parameters, shards of FSDP2 and optimizer states keep their
identity, so optimizers, hooks and tied weights never notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from foveal.config import Config

Part: TypeAlias = Literal["actor", "actor optimizer", "reference", "critic", "critic optimizer"]
_ALIGNMENT = 512  # bytes, as the CUDA allocator's own


class Parking:
    """Moves the memory of some tensors to the host and back, exactly; both ways are idempotent.

    While the memory is away the tensors keep their shapes and must not be read or written. Only what lies on `device`
    moves; memory that several tensors share moves once. The host memory (pinned for a GPU) is kept for the next time.

    Args:
        tensors: which; asked anew each time, because optimizer states come into being at the first step.
        device: where they lie when they are in use.
        chunk_bytes: size of a piece of host memory. PyTorch pins powers of two: a buffer for each tensor would take up
            to twice the room.
    """

    def __init__(
        self, tensors: Callable[[], Iterable[torch.Tensor]], device: torch.device, chunk_bytes: int = 1 << 28
    ) -> None:
        self._tensors = tensors
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._chunks: list[torch.Tensor] = []
        self._parked: list[tuple[torch.UntypedStorage, int, int]] = []  # storage, place in the host memory, bytes

    @property
    def is_away(self) -> bool:
        return bool(self._parked)

    @torch.no_grad()
    def away(self) -> None:
        """Copies the memory to the host and gives it back to the device."""
        if self._parked:
            return
        place = 0
        for storage in self._storages():
            size = storage.nbytes()
            for host, piece in self._pieces(storage, place, size):
                host.copy_(piece, non_blocking=True)
            self._parked.append((storage, place, size))
            place += -(-size // _ALIGNMENT) * _ALIGNMENT
        del self._chunks[-(-place // self._chunk_bytes) :]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for storage, _, _ in self._parked:
            storage.resize_(0)
        if self._device.type == "cuda" and self._parked:
            torch.cuda.empty_cache()  # another user of the device, as vLLM is, takes memory from the driver

    @torch.no_grad()
    def back(self) -> None:
        """Takes device memory again and copies everything back, in the order of the current stream."""
        if self._device.type == "cuda" and self._parked:
            torch.cuda.empty_cache()  # or what stays would lie in the middle of free blocks, and split them
        while self._parked:
            storage, place, size = self._parked[-1]
            storage.resize_(size)
            for host, piece in self._pieces(storage, place, size):
                piece.copy_(host, non_blocking=True)
            self._parked.pop()  # last, so that a signal in between loses nothing

    def _storages(self) -> list[torch.UntypedStorage]:
        """The distinct storages to move."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors():
            for plain in plain_tensors(tensor):
                storage = plain.untyped_storage()
                if storage.device.type == self._device.type and storage.nbytes() and storage.resizable():
                    found[storage._cdata] = storage
        return list(found.values())

    def _pieces(
        self, storage: torch.UntypedStorage, place: int, size: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields (host, device) byte tensors that belong together."""
        device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        done = 0
        while done < size:
            number, start = divmod(place + done, self._chunk_bytes)
            while number >= len(self._chunks):
                pinned = self._device.type == "cuda"
                self._chunks.append(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=pinned))
            length = min(size - done, self._chunk_bytes - start)
            yield self._chunks[number][start : start + length], device[done : done + length]
            done += length


def phase_parkings(
    config: Config,
    device: torch.device,
    *,
    actor: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    reference: nn.Module | None,
    critic: nn.Module | None,
    critic_optimizer: torch.optim.Optimizer | None,
) -> dict[Part, Parking]:
    """What waits in host memory while answers are sampled, by the keys `worker.{actor,critic,ref}.offload`.

    Of the arguments, None stands for what is not there or must stay.
    """
    worker = config.worker
    modules: dict[Part, tuple[bool, nn.Module | None]] = {
        "actor": (worker.actor.offload.offload_params, actor),
        "reference": (worker.ref.offload.offload_params, reference),
        "critic": (worker.critic.offload.offload_params, critic),
    }
    optimizers: dict[Part, tuple[bool, torch.optim.Optimizer | None]] = {
        "actor optimizer": (worker.actor.offload.offload_optimizer, optimizer),
        "critic optimizer": (worker.critic.offload.offload_optimizer, critic_optimizer),
    }
    parked: dict[Part, Parking] = {}
    for name, (wanted, module) in modules.items():
        if wanted and module is not None:
            parked[name] = Parking(partial(weights_of, module), device)
    for name, (wanted, states) in optimizers.items():
        if wanted and states is not None:
            parked[name] = Parking(partial(states_of, states), device)
    return parked


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold a tensor's memory: its local shard, its quantised parts, or the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, torch.Tensor):  # a DTensor names its mesh too
            yield from plain_tensors(part)


def weights_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers."""
    yield from module.parameters()
    yield from module.buffers()


def states_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Moments, step counters and whatever else an optimizer holds for its parameters."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
