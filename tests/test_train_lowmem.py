"""Optimizers with small states: what they learn, and that they are saved and loaded exactly."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torchao.optim import _AdamW

from foveal.config import load_config
from foveal.config.schema_model import OptimConfig
from foveal.errors import ConfigError
from foveal.train.lowmem import _bf16_adamw, check_torchao
from foveal.train.optim import build_optimizer, set_learning_rate, take_step
from foveal.train.state import load_state, take_state, write_state
from tests.sharding_support import in_processes

STRATEGIES = ("adamw_bf16", "adamw_8bit")


def make(strategy: str, dtype: torch.dtype, rate: float = 1e-2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 3)).to(dtype)  # the first weight is quantised
    return module, build_optimizer(module, OptimConfig(lr=rate, strategy=strategy, weight_decay=0.0))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        take_step(optimizer, 1.0)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def step_of(kind: Any, compiled: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two steps of an optimizer over weights of several shapes."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 3), nn.Conv2d(3, 4, 2), nn.Linear(9, 5)).bfloat16()
    optimizer = kind(module.parameters(), lr=1e-2, weight_decay=0.1, bf16_stochastic_round=True)
    with nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
        for _ in range(2):
            for parameter in module.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    return module, optimizer


def test_our_step_is_torchaos() -> None:
    (ours, our_states), (theirs, their_states) = step_of(_bf16_adamw(), False), step_of(_AdamW, False)
    assert same(ours, theirs)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(our_states.state[p]["exp_avg_sq"], their_states.state[q]["exp_avg_sq"])


@pytest.mark.slow
def test_weights_of_many_shapes_share_compiled_steps() -> None:
    """Eight shapes, of one, two and four dimensions."""
    torch._dynamo.reset()
    counters.clear()
    step_of(_bf16_adamw(), True)
    assert counters["stats"]["unique_graphs"] <= 3


def drift(strategy: str, rate: float, steps: int) -> float:
    """How far weights of 1 in bfloat16 have moved on the mean along a gradient that is always 1."""
    module = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(module.weight)
    optimizer = build_optimizer(module, OptimConfig(lr=rate, strategy=strategy, weight_decay=0.0))
    for _ in range(steps):
        module.weight.grad = torch.ones_like(module.weight)
        take_step(optimizer, 1e9)
    return float(1 - module.weight.detach().float().mean())


def test_stochastic_rounding_learns_where_rounding_to_nearest_stands_still() -> None:
    """A step of 1e-4 is a twentieth of what rounding to nearest keeps at 1."""
    assert drift("adamw", 1e-4, 100) == 0
    assert drift("adamw_bf16", 1e-4, 100) == pytest.approx(100 * 1e-4, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, strategy: str, dtype: torch.dtype) -> None:
    module, optimizer = make(strategy, dtype)
    train(module, optimizer, range(3))
    manifest = write_state(tmp_path, take_state(module, optimizer))
    train(module, optimizer, range(3, 6))

    resumed, fresh = make(strategy, dtype)
    torch.manual_seed(99)
    load_state(tmp_path, manifest, resumed, fresh)
    first = next(resumed.parameters())
    assert type(fresh.state[first]["exp_avg"]) is type(optimizer.state[next(module.parameters())]["exp_avg"])
    train(resumed, fresh, range(3, 6))
    assert same(resumed, module)


def resumed_shards(rank: int, folder: Path, strategy: str) -> bool:
    """Whether a process's shards go on as they would have without the checkpoint."""

    def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = fully_shard(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 3)).to(torch.bfloat16))
        return module, build_optimizer(module, OptimConfig(lr=1e-2, strategy=strategy))

    def steps(module: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
        for seed in seeds:
            generator = torch.Generator().manual_seed(10 * seed + rank)
            module(torch.randn(4, 64, generator=generator).to(torch.bfloat16)).float().square().sum().backward()
            take_step(optimizer, 1.0)

    module, optimizer = sharded()
    steps(module, optimizer, range(3))
    manifest = write_state(folder, take_state(module, optimizer))
    dist.barrier()
    resumed, fresh = sharded()
    load_state(folder, manifest, resumed, fresh)
    for pair in ((module, optimizer), (resumed, fresh)):
        steps(*pair, range(3, 6))
    return all(
        torch.equal(p.to_local(), q.to_local()) for p, q in zip(module.parameters(), resumed.parameters(), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shards_of_two_processes_are_resumed_too(tmp_path: Path, strategy: str) -> None:
    assert in_processes(resumed_shards, tmp_path, tmp_path / "state", strategy) == [True, True]


def test_moments_in_8_bits_take_a_byte_a_number() -> None:
    module, optimizer = make("adamw_8bit", torch.float32)
    train(module, optimizer, range(1))
    first, second = (optimizer.state[p]["exp_avg"] for p in (module[0].weight, module[1].weight))
    assert first.codes.nbytes == first.numel() and second.dtype == torch.float32


@pytest.mark.parametrize(("before", "after"), [("adamw", "adamw_8bit"), ("adamw_8bit", "adamw")])
def test_the_strategy_may_change_at_a_resume(tmp_path: Path, before: str, after: str) -> None:
    module, optimizer = make(before, torch.float32)
    train(module, optimizer, range(3))
    manifest = write_state(tmp_path, take_state(module, optimizer))
    resumed, other = make(after, torch.float32)
    load_state(tmp_path, manifest, resumed, other)
    found, expected = other.state[next(resumed.parameters())], optimizer.state[next(module.parameters())]
    assert int(found["step"]) == 3
    moments = [s["exp_avg"].dequantize() if hasattr(s["exp_avg"], "codes") else s["exp_avg"] for s in (found, expected)]
    torch.testing.assert_close(moments[0], moments[1], rtol=0.1, atol=1e-4)
    train(resumed, other, range(3, 4))


def test_rounding_takes_no_random_number_from_others() -> None:
    module, optimizer = make("adamw_bf16", torch.bfloat16)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(module, optimizer, range(2))
    assert torch.equal(torch.rand(3), expected)


def test_each_step_is_rounded_by_numbers_of_its_own() -> None:
    runs = []
    for start in (0, 7):
        module, optimizer = make("adamw_bf16", torch.bfloat16, rate=0.0)
        train(module, optimizer, range(start))
        before = [p.clone() for p in module.parameters()]
        set_learning_rate(optimizer, 1, 1, OptimConfig(lr=1e-3))
        for state in optimizer.state.values():  # the same moments, so that only the rounding differs
            state["exp_avg"].zero_(), state["exp_avg_sq"].zero_()
        train(module, optimizer, range(100, 101))
        runs.append([p.float() - q.float() for p, q in zip(module.parameters(), before, strict=True)])
    assert not torch.equal(runs[0][0], runs[1][0])


def test_the_schedule_reaches_the_compiled_optimizer() -> None:
    _, optimizer = make("adamw_bf16", torch.bfloat16)
    set_learning_rate(optimizer, 1, 10, OptimConfig(lr=1.0, lr_warmup_steps=4, strategy="adamw_bf16"))
    rate = optimizer.param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor) and float(rate) == 0.25


def test_a_missing_library_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_torchao(load_config(["worker.rollout.n=2"]))
    with pytest.raises(ConfigError, match=r"adamw_8bit given, which needs torchao.*foveal\[lowmem\]"):
        check_torchao(load_config(["worker.rollout.n=2", "worker.actor.optim.strategy=adamw_8bit"]))
