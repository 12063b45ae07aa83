"""Out of memory in a pass: it begins again with half the tokens and the same results, or says what to change."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from foveal.errors import DeviceMemoryError
from foveal.quickstart.tiny import build_tiny
from foveal.train.policy import Policy
from tests.test_train_critic import make_critic
from tests.test_train_critic import prepared_groups as groups_with_returns
from tests.test_train_policy import furthest, make_policy, prepared_groups, step_taken

OPTIONS = ("algorithm.disable_kl=true", "worker.actor.token_budget=60")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model"), "qwen3_vl")


def full_above(policy: Any, tokens: int, *, backward: bool = False, after: int = 0) -> Callable[[], int]:
    """Lets memory run out in passes above so many tokens, the first `after` ones left out; returns how often it did."""
    ran_out, passes = [], []

    def fail(*_: Any) -> None:
        ran_out.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def look(module: Any, args: Any, output: Any) -> None:
        passes.append(1)
        if args[0].token_ids.numel() > tokens and len(passes) > after:
            values = getattr(output, "logprobs", output)
            values.register_hook(fail) if backward else fail()

    policy.scorer.register_forward_hook(look)
    return lambda: len(ran_out)


@pytest.mark.parametrize("backward", [False, True])
def test_an_update_begins_again_with_half_the_budget_and_the_same_gradient(
    folder: Path, backward: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    expected_policy = make_policy(folder, *OPTIONS)
    groups = prepared_groups(expected_policy)
    expected = step_taken(expected_policy, groups)
    policy = make_policy(folder, *OPTIONS, budget=60)
    sizes = [pack.token_ids.numel() for pack in policy.packer.packs(groups)]
    limit = max(sizes) - 1
    assert sizes.index(max(sizes)) > 0  # gradients are there when it happens
    count = full_above(policy, limit, backward=backward)
    assert furthest(step_taken(policy, groups), expected) < 1e-5
    assert count() == 1 and policy.packer.budget < limit
    warning = capsys.readouterr().err
    assert "out of memory in the policy's update: a pass of" in warning
    assert "largest row" in warning and f"worker.actor.token_budget={policy.packer.budget}" in warning


def test_metrics_of_an_interrupted_step_are_counted_once(folder: Path) -> None:
    results = []
    for interrupted in (False, True):
        policy = make_policy(folder, *OPTIONS, budget=60)
        groups = prepared_groups(policy)
        if interrupted:
            full_above(policy, 30, after=1)
        results.append(policy.update(groups, step=1, total_steps=1, kl_coef=0.0))
    assert results[0].keys() == results[1].keys()
    assert results[1] == pytest.approx(results[0], rel=1e-4, abs=1e-6)


def test_a_pass_without_gradient_begins_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = make_policy(folder, *OPTIONS)
    groups = prepared_groups(policy)
    for response in (r for g in groups for r in g.responses):
        del response.columns["old_logprobs"]
    policy.logprobs(groups)
    expected = [r.columns.pop("old_logprobs") for g in groups for r in g.responses]
    count = full_above(policy, 60)
    policy.logprobs(groups)
    found = [r.columns["old_logprobs"] for g in groups for r in g.responses]
    assert count() == 1 and all(np.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))
    assert "out of memory in the pass for old_logprobs" in capsys.readouterr().err


def test_the_critic_begins_again_too(folder: Path) -> None:
    critic = make_critic(folder)
    groups = groups_with_returns(critic, [1, 0, 2, 0])
    for response in (r for g in groups for r in g.responses):
        del response.columns["values"]
    count = full_above(critic, 60)
    critic.values(groups)
    critic.update(groups, step=1, total_steps=1)
    assert count() == 2 and all("values" in r.columns for g in groups for r in g.responses)


def test_random_numbers_begin_again(folder: Path) -> None:
    """Dropout of adapters, say, must not depend on what happened before."""
    policy = make_policy(folder, *OPTIONS)
    groups = prepared_groups(policy)
    drawn: list[float] = []
    policy.scorer.register_forward_pre_hook(lambda *_: drawn.append(float(torch.rand(()))))
    full_above(policy, 60)
    policy.logprobs(groups)
    assert drawn[0] == drawn[1]


def failure(policy: Policy, groups: list[Any]) -> str:
    return str(error_of(policy, groups))


def error_of(policy: Policy, groups: list[Any]) -> DeviceMemoryError:
    """As it comes from another process."""
    with pytest.raises(DeviceMemoryError) as caught:
        policy.update(groups, step=1, total_steps=1, kl_coef=0.0)
    found: DeviceMemoryError = pickle.loads(pickle.dumps(caught.value))
    return found


def test_memory_that_runs_out_again_names_phase_row_and_key(folder: Path) -> None:
    policy = make_policy(folder, *OPTIONS)
    groups = prepared_groups(policy)
    weights = [p.clone() for p in policy.model.parameters()]
    count = full_above(policy, 0)
    text = failure(policy, groups)
    assert count() == 2
    assert "out of memory in the policy's update" in text and "(train-0-" in text and "Tried to allocate" in text
    assert f"worker.actor.token_budget={policy.packer.budget // 2}" in text or "max_response_length" in text
    assert all(torch.equal(a, b) for a, b in zip(weights, policy.model.parameters(), strict=True))


def test_a_single_answer_that_does_not_fit_is_not_tried_again(folder: Path) -> None:
    policy = make_policy(folder, *OPTIONS, budget=1)
    groups = prepared_groups(policy)
    count = full_above(policy, 0)
    error = error_of(policy, groups)
    assert count() == 1 and "data.max_response_length" in str(error) and "token_budget" not in str(error)
    assert error.smaller is None


def test_one_process_of_several_does_not_begin_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(folder, *OPTIONS)
    groups = prepared_groups(policy)
    count = full_above(policy, 0)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    error = error_of(policy, groups)
    assert count() == 1 and f"Set worker.actor.token_budget={error.smaller} or less" in str(error)


def test_the_process_group_that_vllm_makes_of_one_process_is_no_hindrance(folder: Path) -> None:
    policy = make_policy(folder, *OPTIONS, budget=60)
    groups = prepared_groups(policy)
    limit = max(pack.token_ids.numel() for pack in policy.packer.packs(groups)) - 1
    count = full_above(policy, limit)
    with group_of_one():
        policy.update(groups, 1, 10, 0.0)
    assert count() == 1 and policy.packer.budget < limit


def test_the_critic_of_a_single_process_is_not_sharded_either(folder: Path) -> None:
    with group_of_one():
        critic = make_critic(folder)
    assert critic.packer.peers is None
    assert not any(isinstance(parameter, DTensor) for parameter in critic.scorer.parameters())


@contextmanager
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
