"""What the backward pass keeps, computes again or fetches changes no gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foveal.config.schema_model import Checkpointing
from foveal.models import recompute
from foveal.models.loading import load_model
from foveal.models.recompute import set_checkpointing
from foveal.quickstart.tiny import build_tiny
from foveal.train.layout import PromptLayouts
from foveal.train.packing import Pack
from foveal.train.scorer import TokenScorer
from foveal.train.scoring import Packer
from tests.random_groups import random_groups

CPU = torch.device("cpu")
CASES: list[tuple[Checkpointing, bool]] = [
    (False, False),
    ("selective", False),
    (True, False),
    (False, True),
    (True, True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model"), "qwen3_vl")


def scorer_and_pack(folder: Path, checkpointing: Checkpointing, offload: bool) -> tuple[TokenScorer, Pack]:
    model: Any = load_model(str(folder), dtype=torch.float64, device=CPU)
    set_checkpointing(model, checkpointing)
    scorer = TokenScorer(model, forbidden_ids=[201], temperature=0.8, autocast=None, offload=offload).train()
    layouts = PromptLayouts(model, lambda prompt: prompt.features or {})
    (pack,) = Packer(10**6, True, layouts, CPU).packs(random_groups(model, [1, 0]))
    return scorer, pack


def gradients(folder: Path, checkpointing: Checkpointing, offload: bool) -> dict[str, torch.Tensor]:
    scorer, pack = scorer_and_pack(folder, checkpointing, offload)
    scorer(pack, with_entropy=True).logprobs.square().sum().backward()
    return {name: p.grad for name, p in scorer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("checkpointing", "offload"), CASES[1:])
def test_gradients_are_those_of_the_plain_pass(
    folder: Path, checkpointing: Checkpointing, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients(folder, False, False)
    monkeypatch.setattr(recompute, "_SMALL", 0)
    moved = []
    monkeypatch.setattr(recompute, "_to_host", lambda t, real=recompute._to_host: moved.append(t.nbytes) or real(t))
    found = gradients(folder, checkpointing, offload)
    assert bool(moved) is offload
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) <= 1e-9 * float(gradient.norm()), name


def test_less_is_kept_the_more_is_computed_again(folder: Path) -> None:
    kept = {}
    for checkpointing in (False, "selective", True):
        scorer, pack = scorer_and_pack(folder, checkpointing, False)  # type: ignore[arg-type]
        storages: dict[int, int] = {}

        def keep(tensor: torch.Tensor, into: dict[int, int] = storages) -> torch.Tensor:
            into[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            scorer(pack)
        weights = {p.untyped_storage().data_ptr() for p in scorer.parameters()}
        kept[checkpointing] = sum(size for place, size in storages.items() if place not in weights)
    assert kept[True] < kept["selective"] < kept[False]


def test_weights_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "_SMALL", 0)
    weight = torch.nn.Parameter(torch.ones(4, 4))
    for tensor in (weight, weight.t()):
        assert recompute._to_host(tensor)[1] is tensor
    activation = torch.ones(4)
    assert recompute._to_host(activation)[1] is not activation
