"""Two processes save together, in the foreground and behind; what one wrote two go on with, and the other way round."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from foveal.errors import CheckpointError
from foveal.quickstart.tiny import build_tiny
from foveal.train.checkpoint import check_actor
from foveal.train.retention import Checkpoints
from foveal.train.rng import KEY, load_rng, take_rng
from foveal.train.snapshot import Snapshot
from foveal.train.staging import Staging
from foveal.train.state import load_state, take_state
from tests.checkpoint_crashes import DESCRIPTION
from tests.sharding_support import Case, groups_of, in_processes, policy_of, weights

pytestmark = pytest.mark.slow
OWNERS = [0, 1, 0, 1, 1]
SIZES = [[2, 0], [1, 2]]


@dataclass
class Found:
    """What one of two processes found.

    Attributes:
        weights: after the third step.
        drawn: random numbers right after saving, and after loading.
        failures: what a full disk in one of the processes raised, at once and behind.
        left: names of the checkpoints after that.
    """

    weights: dict[str, torch.Tensor]
    drawn: list[torch.Tensor]
    failures: list[str]
    left: list[str]


def case_in(folder: Path) -> Case:
    # in float64 two processes add up to the same as one, and AdamW doesn't blow up a difference
    return Case(folder / "model", torch.float64, adam=True)


def update(policy: Any, case: Case, number: int, rank: int | None) -> None:
    groups = groups_of(case, policy)
    sizes = None
    if rank is not None:
        groups = [group for group, owner in zip(groups, OWNERS, strict=True) if owner == rank]
        sizes = SIZES[rank]
    policy.update(groups, step=number, total_steps=3, kl_coef=0.5, sizes=sizes)


def snapshot(policy: Any, staging: Staging | None) -> Snapshot:
    state = take_state(policy.model, policy.optimizer) | {KEY: take_rng()}
    if staging is not None:
        assert staging.fits(state)
        state = staging.copy(state)
    return Snapshot(state, None, DESCRIPTION, staging is not None)


def load(policy: Any, checkpoints: Checkpoints) -> None:
    folder = checkpoints.latest(contents=True)
    assert folder is not None
    load_state(folder / "actor", check_actor(folder / "actor"), policy.model, policy.optimizer)
    load_rng(folder / "actor")


def first_step(rank: int, folder: Path) -> None:
    """Two processes: trains step 1, and goes on while it is written."""
    case = case_in(folder)
    policy = policy_of(case, sharded=True)
    update(policy, case, 1, rank)
    checkpoints = Checkpoints(folder / "run", 1)
    checkpoints.save(1, snapshot(policy, Staging()).write, None, background=True)
    update(policy, case, 2, rank)  # talks over the other group meanwhile
    checkpoints.wait()


def second_step(folder: Path) -> None:
    """One process."""
    case = case_in(folder)
    policy = policy_of(case, sharded=False)
    checkpoints = Checkpoints(folder / "run", 1)
    load(policy, checkpoints)
    update(policy, case, 2, None)
    checkpoints.save(2, snapshot(policy, None).write, None)


def third_step(rank: int, folder: Path) -> Found:
    """Two processes again."""
    case = case_in(folder)
    policy = policy_of(case, sharded=True)
    checkpoints = Checkpoints(folder / "run", 1)
    load(policy, checkpoints)
    update(policy, case, 3, rank)
    torch.manual_seed(rank)
    checkpoints.save(3, snapshot(policy, None).write, None)
    drawn = [torch.rand(3)]
    load(policy, checkpoints)
    drawn.append(torch.rand(3))
    trained = weights(policy.model)
    failures = [failure(checkpoints, policy, rank, background) for background in (False, True)]
    dist.barrier()
    left = sorted(path.name for path in (folder / "run").glob("global_step_*"))
    return Found(trained, drawn, failures, left)


def failure(checkpoints: Checkpoints, policy: Any, rank: int, background: bool) -> str:
    taken = snapshot(policy, Staging() if background else None)

    def write(folder: Path) -> None:
        if rank == 1:
            (folder / "actor").mkdir(parents=True, exist_ok=True)
            (folder / "actor" / "__1_0.distcp").mkdir()  # where this process wants to write its file
        taken.write(folder)

    try:
        checkpoints.save(4, write, None, background=background)
        checkpoints.wait()
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    build_tiny(folder / "model", "qwen2_5_vl")
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[Found]:
    for part in ("first", "third"):
        (folder / part).mkdir()
    in_processes(first_step, folder / "first", folder)
    second_step(folder)
    results: list[Found] = in_processes(third_step, folder / "third", folder)
    return results


def test_two_then_one_then_two_processes_train_as_one_does(found: list[Found], folder: Path) -> None:
    case = case_in(folder)
    policy = policy_of(case, sharded=False)
    before = weights(policy.model)
    for number in (1, 2, 3):
        update(policy, case, number, None)
    expected = weights(policy.model)
    for process in found:
        for name in expected:
            assert torch.allclose(process.weights[name], expected[name], rtol=0, atol=1e-6), name
    assert any((expected[name] - before[name]).abs().max() > 1e-3 for name in expected)


def test_each_process_draws_the_random_numbers_it_would_have_drawn(found: list[Found]) -> None:
    for process in found:
        assert torch.equal(process.drawn[0], process.drawn[1])
    assert not torch.equal(found[0].drawn[0], found[1].drawn[0])


@pytest.mark.parametrize("background", [False, True])
def test_a_process_that_cannot_write_fails_the_save_of_all(found: list[Found], background: bool) -> None:
    for process in found:
        assert "cannot write the checkpoint of step 4" in process.failures[background]
    assert all(process.left == ["global_step_3"] for process in found)
