"""Two processes that share each packed sequence compute what one does with the whole of it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from foveal.errors import ConfigError
from foveal.models.loading import load_model
from foveal.models.ulysses import Ulysses
from foveal.quickstart.tiny import build_tiny
from foveal.train.critic import ValueScorer
from foveal.train.layout import PromptLayouts
from foveal.train.packing import Pack, Part, build_pack, split_into_packs
from foveal.train.peers import Peers
from foveal.train.scorer import TokenScorer
from tests.double_precision import DoublePrecision
from tests.random_groups import random_groups
from tests.sharding_support import CPU, WORLD, Case, Outcome, in_processes, policy_of, trained

UNUSED = "deepstack_merger_list.1."  # added after the last decoder layer, to the pictures' tokens: no answer sees it
BUDGET = 25  # tokens of a micro-batch, so that there are several
PICTURES = {"qwen2_5_vl": [1, 0, 2, 0], "qwen3_vl": [1, 0, 2, 0], "qwen3": [0, 0, 0, 0], "split keys": [0, 0, 0, 0]}
CASES = [(name, dtype) for name in PICTURES for dtype in (torch.float64, torch.float32)]


@dataclass
class Found:
    """What one process has of all packs: losses, scores by kind, and its own gradients."""

    losses: torch.Tensor
    scores: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


def packs_of(model: Any, name: str) -> list[Pack]:
    """Some of odd and some of even length, and a last one that is too short to be shared, without answers."""
    layouts = PromptLayouts(model, lambda prompt: prompt.features or {})
    groups = random_groups(model, PICTURES[name])
    parts = split_into_packs(groups, BUDGET, True)
    idle = random_groups(model, [0])[0].prompt
    idle.expanded_ids = idle.expanded_ids[:1]
    packs = [build_pack(p, layouts=layouts, shared_prefix=True, device=CPU) for p in [*parts, [Part(idle, [])]]]
    assert {pack.token_ids.shape[1] % 2 for pack in packs[:-1]} == {0, 1}
    return packs


def scorer_of(folder: Path, name: str, dtype: torch.dtype, group: dist.ProcessGroup | None, seed: int = 0) -> Any:
    model: Any = load_model(str(folder / name), dtype=dtype, device=CPU)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    ulysses = Ulysses(group, model) if group else None
    return TokenScorer(model, forbidden_ids=[201, 202], temperature=0.8, autocast=None, ulysses=ulysses).train()


def scored(folder: Path, name: str, dtype: torch.dtype, group: dist.ProcessGroup | None = None) -> Found:
    """Log-probabilities, entropies and the exact KL to another model, and a loss that takes in all of them."""
    scorer, reference = scorer_of(folder, name, dtype, group), scorer_of(folder, name, dtype, group, seed=1)
    losses, kinds = [], ("logprobs", "entropy", "kl")
    scores: dict[str, list[torch.Tensor]] = {kind: [] for kind in kinds}
    with DoublePrecision() if dtype == torch.float64 else nullcontext():
        for pack in packs_of(scorer.model, name):
            result = scorer(pack, with_entropy=True, reference=reference.head(pack))
            loss = (result.logprobs.square() + result.entropy * result.kl).sum()
            loss.backward()
            losses.append(loss.detach())
            for kind in kinds:
                scores[kind].append(getattr(result, kind).detach())
    whole = {kind: torch.cat(values) for kind, values in scores.items()}
    return Found(torch.stack(losses), whole, gradients_of(scorer))


def valued(folder: Path, group: dist.ProcessGroup | None = None) -> Found:
    model: Any = load_model(str(folder / "qwen3_vl"), dtype=torch.float32, device=CPU)
    packs = packs_of(model, "qwen3_vl")
    scorer = ValueScorer(model, autocast=None, ulysses=Ulysses(group, model) if group else None)
    torch.manual_seed(0)
    nn.init.normal_(scorer.head.weight)
    values = torch.cat([scorer(pack) for pack in packs])
    loss = values.square().sum()
    loss.backward()
    return Found(loss.detach(), {"values": values.detach()}, gradients_of(scorer))


def gradients_of(scorer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in scorer.named_parameters() if p.grad is not None}


def updated(folder: Path, rank: int | None = None) -> Outcome:
    """Two optimizer steps; in two processes the weights are sharded too."""
    case = Case(folder / "qwen3_vl")
    policy = policy_of(case, sharded=rank is not None)
    if rank is not None:
        policy.scorer.ulysses = Ulysses(everyone(), policy.model)
        alone = [dist.new_group([number]) for number in range(WORLD)][rank]
        assert isinstance(alone, dist.ProcessGroup)
        policy.packer.peers = Peers(policy.scorer, CPU, sums_at_end=True, gathers_once=False, group=alone)
    return trained(case, policy)


def everyone() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def work(rank: int, folder: Path) -> dict[Any, Any]:
    group = everyone()
    found: dict[Any, Any] = {case: scored(folder, *case, group) for case in CASES}
    return {**found, "critic": valued(folder, group), "update": updated(folder, rank)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ulysses")
    for name in ("qwen2_5_vl", "qwen3_vl", "qwen3"):  # one key head for two query heads
        build_tiny(folder / name, name)
    build_tiny(folder / "split keys", "qwen3", size="quickstart")  # two for four
    return folder


@pytest.fixture(scope="module")
def together(folder: Path) -> list[dict[Any, Any]]:
    return in_processes(work, folder, folder)


def check(found: list[Found], expected: Found, limit: float) -> None:
    for process in found:
        assert (process.losses - expected.losses).norm() <= limit * expected.losses.norm()
        for kind, values in expected.scores.items():
            assert (process.scores[kind] - values).norm() <= limit * values.norm(), kind
        assert process.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        total = sum(process.gradients[name] for process in found)
        assert gradient.norm() > 0 or UNUSED in name, name
        assert (total - gradient).norm() <= limit * gradient.norm(), name


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_scores_loss_and_summed_gradients_are_those_of_one_process(
    folder: Path, together: list[dict[Any, Any]], name: str, dtype: torch.dtype
) -> None:
    limit = 1e-9 if dtype == torch.float64 else 1e-5
    check([process[name, dtype] for process in together], scored(folder, name, dtype), limit)


def test_both_processes_do_a_part_of_the_work(together: list[dict[Any, Any]]) -> None:
    for process in together:
        gradients = process["qwen3_vl", torch.float32].gradients
        assert all(gradient.norm() > 0 or UNUSED in name for name, gradient in gradients.items())
    first, second = (process["qwen3_vl", torch.float32].gradients["model.lm_head.weight"] for process in together)
    assert not torch.allclose(first, second)


def test_a_critic_shares_sequences_too(folder: Path, together: list[dict[Any, Any]]) -> None:
    check([process["critic"] for process in together], valued(folder), 1e-5)


def test_with_sharded_weights_the_update_is_that_of_one_process(folder: Path, together: list[dict[Any, Any]]) -> None:
    expected = updated(folder)
    for process in together:
        found: Outcome = process["update"]
        assert found.metrics == pytest.approx(expected.metrics, rel=2e-6)
        for name, before in expected.before.items():
            step = expected.after[name] - before
            assert (found.after[name] - found.before[name] - step).norm() <= 1e-9 * step.norm(), name


def test_heads_must_be_shared_evenly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = load_model(str(folder / "qwen3"), dtype=torch.float32, device=CPU)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    with pytest.raises(ConfigError, match=r"ulysses_size: 3 given, but the model's 2 attention heads .* divisor of 2"):
        Ulysses(Any, model)  # type: ignore[arg-type]
