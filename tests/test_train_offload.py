"""Memory that is moved to the host comes back as it was, under the same tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from foveal.train.offload import Parking, states_of, weights_of

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Two layers that share one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale.sum()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def held(tensors: list[torch.Tensor]) -> int:
    """Bytes under some tensors."""
    return sum(t.untyped_storage().nbytes() for t in tensors)


def test_memory_is_given_back_and_returns_bit_for_bit() -> None:
    model = Tied()
    before = copy.deepcopy(model.state_dict())
    parking = Parking(lambda: weights_of(model), CPU)
    parking.away()
    assert parking.is_away and held(list(weights_of(model))) == 0
    parking.back()
    assert not parking.is_away
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_training_goes_on_as_if_nothing_had_moved() -> None:
    models = [Tied(), Tied()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    moved = [Parking(lambda: weights_of(models[0]), CPU), Parking(lambda: states_of(optimizers[0]), CPU)]
    for _ in range(3):
        for parking in moved:
            parking.away()
        for parking in moved:
            parking.back()
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)
    assert models[0].first.weight is models[0].second.weight


def test_both_ways_are_idempotent() -> None:
    model = Tied()
    value = model.first.weight.detach().clone()
    parking = Parking(lambda: weights_of(model), CPU)
    parking.back()
    parking.away()
    parking.away()
    parking.back()
    parking.back()
    assert torch.equal(model.first.weight, value)


def test_an_optimizer_that_has_not_stepped_has_nothing_to_move() -> None:
    optimizer = torch.optim.AdamW(Tied().parameters())
    parking = Parking(lambda: states_of(optimizer), CPU)
    parking.away()
    assert not parking.is_away


def test_memory_larger_than_a_chunk_of_the_host_is_cut() -> None:
    tensors = [torch.rand(100), torch.rand(300), torch.rand(7)]
    before = [t.clone() for t in tensors]
    parking = Parking(lambda: tensors, CPU, chunk_bytes=512)
    parking.away()
    parking.back()
    assert all(map(torch.equal, tensors, before))


def test_host_memory_is_kept_as_far_as_it_is_needed() -> None:
    tensors = [torch.rand(128), torch.rand(128)]
    parking = Parking(lambda: tensors, CPU, chunk_bytes=512)
    parking.away()
    first = parking._chunks[0].data_ptr()
    parking.back()
    tensors.pop()
    parking.away()
    assert [chunk.data_ptr() for chunk in parking._chunks] == [first]


def test_what_lies_on_another_device_stays() -> None:
    weight = torch.rand(4)
    parking = Parking(lambda: [weight], torch.device("meta"))
    parking.away()
    assert not parking.is_away and held([weight]) == 16


def test_the_shard_of_a_distributed_tensor_moves() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model: Any = nn.Linear(6, 6)
        value = model.weight.detach().clone()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step(model, optimizer)
        parkings = [Parking(lambda: weights_of(model), CPU), Parking(lambda: states_of(optimizer), CPU)]
        moments: Any = next(iter(optimizer.state.values()))["exp_avg"]
        before = moments.full_tensor().clone()
        for parking in parkings:
            parking.away()
        assert held([moments._local_tensor, model.weight._local_tensor]) == 0
        for parking in parkings:
            parking.back()
        assert torch.equal(moments.full_tensor(), before)
        step(model, optimizer)
        assert not torch.equal(model.weight.full_tensor(), value)
    finally:
        dist.destroy_process_group()
