"""The engine's log-probabilities are those of a plain forward over prompt and answer, pictures and padding included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from foveal.types import Group, Sampling
from tests.rollout_models import full_logprobs, image_prompt, text_prompt, tiny_engine, tiny_model

VLMS = ["qwen3_vl", "qwen2_5_vl", "qwen2_vl"]


def largest_difference(model: nn.Module, groups: list[Group], temperature: float) -> float:
    return max(
        (torch.from_numpy(r.logprobs) - full_logprobs(model, group.prompt, r, temperature)).abs().max().item()
        for group in groups
        for r in group.responses
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_text(temperature: float) -> None:
    model = tiny_model("qwen3")
    prompts = [text_prompt("a", 4), text_prompt("b", 11), text_prompt("c", 7)]
    groups = tiny_engine(model).generate(prompts, Sampling(n=3, max_tokens=10, temperature=temperature), 0)
    assert largest_difference(model, groups, temperature) < 1e-5


@pytest.mark.parametrize("family", VLMS)
@pytest.mark.parametrize("grids", [[], [(4, 6)], [(4, 4), (6, 2)]], ids=["no picture", "one picture", "two pictures"])
def test_one_prompt_of_a_vlm(family: str, grids: list[tuple[int, int]]) -> None:
    model = tiny_model(family)
    prompt = image_prompt("a", model, *grids) if grids else text_prompt("a")
    groups = tiny_engine(model).generate([prompt], Sampling(n=2, max_tokens=8), 0)
    assert largest_difference(model, groups, 1.0) < 1e-5


@pytest.mark.parametrize("family", VLMS)
def test_text_and_pictures_of_different_lengths_in_one_batch(family: str) -> None:
    model = tiny_model(family)
    prompts = [
        image_prompt("a", model, (4, 6), length=2),
        text_prompt("b", 9),
        image_prompt("c", model, (6, 6), (4, 4)),
        text_prompt("d", 3),
        image_prompt("e", model, (2, 2), length=6),
    ]
    # Several end tokens, so that rows are dropped on the way.
    engine = tiny_engine(model, eos_ids=list(range(20, 26)))
    groups = engine.generate(prompts, Sampling(n=3, max_tokens=16, temperature=1.3), 0)
    assert len({len(r.token_ids) for group in groups for r in group.responses}) > 3
    assert largest_difference(model, groups, 1.3) < 1e-5


def test_deltas_left_on_the_module_by_another_forward_play_no_part() -> None:
    model: Any = tiny_model("qwen3_vl")
    prompt = image_prompt("a", model, (4, 6))
    model.model.rope_deltas = torch.tensor([[17]])
    groups = tiny_engine(model).generate([prompt], Sampling(n=2, max_tokens=6), 0)
    assert largest_difference(model, groups, 1.0) < 1e-5


def test_answers_of_a_prompt_share_its_prefill_and_its_pictures() -> None:
    model: Any = tiny_model("qwen3_vl")
    shapes: list[tuple[int, ...]] = []
    pictures: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    model.model.visual.register_forward_hook(lambda module, args, output: pictures.append(1))
    prompts = [image_prompt("a", model, (4, 4)), image_prompt("b", model, (4, 4))]
    tiny_engine(model, eos_ids=[]).generate(prompts, Sampling(n=4, max_tokens=5), 0)
    assert shapes == [(2, len(prompts[0].expanded_ids))] + [(8, 1)] * 4
    assert len(pictures) == 1


def test_autocast_keeps_the_cache_in_its_dtype_and_agrees_to_its_precision() -> None:
    model = tiny_model("qwen3")
    engine = tiny_engine(model, autocast_dtype=torch.bfloat16)
    groups = engine.generate([text_prompt("a", 6), text_prompt("b", 4)], Sampling(n=2, max_tokens=8), 0)
    assert engine.cache_dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        difference = largest_difference(model, groups, 1.0)
    assert difference < 0.1
