"""Packed log-probabilities and gradients equal the plain forward of one sequence per answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from foveal.models.loading import load_model
from foveal.quickstart.tiny import build_tiny
from foveal.train.layout import PromptLayouts
from foveal.train.packing import Pack, Part, build_pack, split_into_packs, store
from foveal.train.scorer import TokenScorer
from foveal.types import Group
from tests.random_groups import naive_logprobs, random_groups

CPU = torch.device("cpu")
FORBIDDEN = [201, 202]
TEMPERATURE = 0.8
FAMILIES = {
    "qwen2_vl": [1, 0, 2],
    "qwen2_5_vl": [1, 0, 2],
    "qwen3_vl": [1, 0, 2],
    "qwen3": [0, 0],
    "llama": [0, 0],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: build_tiny(root / family, family, tie=family == "qwen3") for family in FAMILIES}  # type: ignore[arg-type]


def packs_of(model: Any, groups: list[Group], *, shared: bool, budget: int) -> list[Pack]:
    return [
        build_pack(
            parts,
            layouts=PromptLayouts(model, lambda p: p.features or {}),
            shared_prefix=shared,
            device=CPU,
        )
        for parts in split_into_packs(groups, budget, shared)
    ]


def packed(
    model: Any, groups: list[Group], *, shared: bool, budget: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of all answers, and the gradient of their mean of squares."""
    scorer = TokenScorer(model, forbidden_ids=FORBIDDEN, temperature=TEMPERATURE, autocast=None)
    model.zero_grad()
    for pack in packs_of(model, groups, shared=shared, budget=budget):
        logprobs = scorer(pack).logprobs
        store(pack.responses, "logprobs", logprobs)
        logprobs.square().sum().backward()
    flat = np.concatenate([r.columns["logprobs"] for g in groups for r in g.responses])
    return torch.from_numpy(flat), gradients(model)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def furthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[k] - expected[k]).norm() / expected[k].norm().clamp(min=1e-12)) for k in expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("shared", "budget"), [(True, 10**6), (True, 25), (False, 10**6), (False, 30)])
def test_packing_equals_the_plain_forward(folders: dict[str, Path], family: str, shared: bool, budget: int) -> None:
    auto = AutoModelForImageTextToText if "vl" in family else AutoModelForCausalLM
    plain = auto.from_pretrained(folders[family], dtype=torch.float32, attn_implementation="sdpa")
    groups = random_groups(plain, FAMILIES[family])
    expected = [naive_logprobs(plain, g, r, FORBIDDEN, TEMPERATURE) for g in groups for r in g.responses]
    torch.cat(expected).square().sum().backward()

    model = load_model(str(folders[family]), dtype=torch.float32, device=CPU)
    found, grads = packed(model, groups, shared=shared, budget=budget)

    assert (found - torch.cat(expected)).abs().max() < 5e-6
    assert furthest(grads, gradients(plain)) < 1e-5


def test_gradient_checkpointing_changes_nothing(folders: dict[str, Path]) -> None:
    model = load_model(str(folders["qwen3_vl"]), dtype=torch.float32, device=CPU)
    groups = random_groups(model, [1, 0, 2])
    _, expected = packed(model, groups, shared=True, budget=10**6)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    _, found = packed(model, groups, shared=True, budget=10**6)
    assert furthest(found, expected) < 1e-5


def test_a_shared_prompt_is_laid_out_once(folders: dict[str, Path]) -> None:
    model = load_model(str(folders["qwen3_vl"]), dtype=torch.float32, device=CPU)
    groups = random_groups(model, [2], answers=5)
    shared, repeated = (packs_of(model, groups, shared=s, budget=10**6)[0] for s in (True, False))
    prompt = len(groups[0].prompt.expanded_ids)
    assert repeated.token_ids.shape[1] - shared.token_ids.shape[1] == 4 * prompt
    assert len(repeated.pictures) == 5 * len(shared.pictures)


def test_packs_keep_to_the_budget_and_lose_nothing(folders: dict[str, Path]) -> None:
    model = load_model(str(folders["qwen3"]), dtype=torch.float32, device=CPU)
    groups = random_groups(model, [0] * 6, answers=4, longest=9)
    packs = packs_of(model, groups, shared=True, budget=20)
    assert [r for p in packs for r in p.responses] == [r for g in groups for r in g.responses]
    assert all(p.token_ids.shape[1] <= 20 for p in packs)
    assert len(packs) > 3


def test_answers_that_are_left_out_or_empty_are_not_packed(folders: dict[str, Path]) -> None:
    model = load_model(str(folders["qwen3"]), dtype=torch.float32, device=CPU)
    groups = random_groups(model, [0], answers=4)
    groups[0].responses[1].role = "left_out"
    groups[0].responses[2].token_ids = np.zeros(0, np.int64)
    (pack,) = packs_of(model, groups, shared=True, budget=100)
    assert pack.responses == [groups[0].responses[0], groups[0].responses[3]]


def test_a_padded_batch_is_still_masked(folders: dict[str, Path]) -> None:
    """The engine sends left-padded batches through the same model; without a mask function they'd go unmasked."""
    model = load_model(str(folders["qwen3"]), dtype=torch.float32, device=CPU)
    ids = torch.tensor([[5, 6, 7, 8]])
    padded = torch.tensor([[0, 0, 5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 0, 0, 1, 2, 3]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits[0, -1]
        found = model(input_ids=padded, attention_mask=mask, position_ids=positions).logits[0, -1]
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_prompt_without_answers_has_the_form_of_all_packs(folders: dict[str, Path]) -> None:
    model: Any = load_model(str(folders["qwen3"]), dtype=torch.float32, device=CPU)
    prompt = random_groups(model, [0])[0].prompt
    prompt.expanded_ids = prompt.expanded_ids[:1]
    layouts = PromptLayouts(model, lambda p: p.features or {})
    pack = build_pack([Part(prompt, [])], layouts=layouts, shared_prefix=True, device=CPU)
    assert pack.segments.key_index is not None and pack.segments.max_q > 1  # or layers would be compiled anew
    assert pack.token_ids.shape[1] == pack.position_ids.shape[-1] == sum(pack.segments.lengths)
    assert not len(pack.source) and not len(pack.targets)
