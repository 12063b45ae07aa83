"""The vLLM engine with a low-rank adapter of its own: answers are always those of the adapter handed over last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from foveal.errors import EngineError
from foveal.models.lora import adapter_config, adapter_tensors
from foveal.models.named_tensors import named_tensors
from foveal.rollout.vllm_lora import complete_packing
from foveal.types import Group, Prompt, Sampling
from tests.vllm_support import Side

pytestmark = pytest.mark.slow

CLOSE = 1e-4
SAMPLING = Sampling(n=3, max_tokens=8, seed=5)
RANK = ("worker.actor.model.lora.rank=6", "worker.actor.model.lora.alpha=3")


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def side(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    side = Side(tmp_path_factory.mktemp("lora") / "model", request.param, *RANK)
    side.change_adapter()
    side.hand_over()
    yield side
    side.engine.close()


def answer(side: Side, prompts: list[Prompt], sampling: Sampling = SAMPLING) -> list[Group]:
    return side.engine.generate(prompts, sampling, side.version)


def test_the_engine_applies_the_adapter(side: Side) -> None:
    assert side.engine.takes_adapters
    assert side.gap(answer(side, side.prompts([0, 1, 2, 1, 0]))) < CLOSE


@pytest.mark.parametrize("part", ["visual.blocks", "visual.merger", "language_model"])
def test_a_changed_adapter_is_seen_by_the_next_answers(side: Side, part: str) -> None:
    prompts = [side.prompt(number, 1, "How many shapes are there in the picture? " * 4) for number in (51, 52)]
    answer(side, prompts)  # fills the caches
    side.version += 1
    side.change_adapter(part)
    assert side.gap(answer(side, prompts)) > 100 * CLOSE, "the change is too small to be seen"
    side.hand_over_adapter()
    assert side.gap(answer(side, prompts)) < CLOSE


def test_what_a_deep_sleep_leaves_does_no_harm(side: Side) -> None:
    """Level 2 leaves arbitrary numbers in all memory that was allocated with the model."""
    prompts, one_step = side.prompts([0, 0]), replace(SAMPLING, max_tokens=1)
    before = answer(side, prompts, one_step)
    with side.other_weights():
        generator = torch.Generator().manual_seed(0)
        for name, weight in side.model.named_parameters():
            if name.endswith("proj.weight"):
                weight += 0.05 * torch.randn(weight.shape, generator=generator)
        worker = side.engine.core.model_executor.driver_worker.worker
        manager = worker.model_runner.lora_manager._adapter_manager
        for layer in manager.modules.values():
            for buffer in (*layer.lora_a_stacked, *layer.lora_b_stacked):
                buffer.fill_(torch.nan)
        for wrapper in manager.punica_wrapper_mapping.values():
            for tensor in vars(wrapper).values():
                if isinstance(tensor, torch.Tensor):
                    tensor.fill_(-1)
        side.hand_over()
        # the same tokens for the adapter as in the step before the sleep
        assert side.gap(answer(side, prompts, one_step)) < CLOSE
        assert side.gap(before) > 100 * CLOSE, "the change is too small to be seen"
        assert side.gap(answer(side, side.prompts([1, 2]))) < CLOSE


def test_decoding_goes_in_bursts(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = side.engine.core.scheduler
    begin = scheduler._begin_burst
    bursts: list[int] = []

    def begin_and_note(steps: int) -> Any:
        bursts.append(steps)
        return begin(steps)

    monkeypatch.setattr(scheduler, "_begin_burst", begin_and_note)
    groups = answer(side, side.prompts([1, 0, 1]), Sampling(n=2, max_tokens=40, seed=1, ignore_eos=True))
    assert bursts
    assert side.gap(groups) < CLOSE


def test_greedy_answers_beside_sampled_ones(side: Side) -> None:
    """As for greedy baselines, and with parameters of validation."""
    greedy = replace(SAMPLING, n=1, temperature=0.0)
    cut = replace(SAMPLING, temperature=0.7, extra={"min_tokens": 4, "logit_bias": {5: 0.0}})
    for sampling in (greedy, SAMPLING, cut):
        side.engine.submit(side.prompts([0, 1]), sampling, side.version)
    found: dict[int, list[Group]] = {1: [], 3: []}
    for group in side.engine.collect():
        found[len(group.responses)].append(group)
    assert side.gap(found[1]) < CLOSE
    assert len(found[3]) == 4
    again = answer(side, side.prompts([0, 1]), greedy)
    first = {group.prompt.uid: group.responses[0].token_ids for group in found[1]}
    assert all(np.array_equal(group.responses[0].token_ids, first[group.prompt.uid]) for group in again)


def test_weights_without_an_adapter_are_not_enough(side: Side) -> None:
    side.engine.update_weights(named_tensors(side.model, merge=False), side.version)
    with pytest.raises(EngineError, match="no adapter yet"):
        answer(side, side.prompts([0]))
    side.hand_over_adapter()
    assert side.gap(answer(side, side.prompts([0, 1]))) < CLOSE


def test_an_adapter_of_other_modules_is_refused(side: Side) -> None:
    tensors = adapter_tensors(side.model)
    other = {name.replace(".layers.1.", ".layers.7."): tensor for name, tensor in tensors.items()}
    with pytest.raises(EngineError, match=r"not started for adapters .*layers\.7\."):
        side.engine.update_adapter(other, adapter_config(side.model), side.version)
    side.hand_over_adapter()
    assert side.gap(answer(side, side.prompts([1]))) < CLOSE


def test_an_adapter_does_not_change_while_answers_are_open(side: Side) -> None:
    side.engine.submit(side.prompts([1]), SAMPLING, side.version)
    with pytest.raises(EngineError, match="cannot change while 3 answers are open"):
        side.hand_over_adapter()
    assert side.gap(list(side.engine.collect())) < CLOSE


@pytest.mark.parametrize(
    ("targets", "room", "told"),
    [("[lm_head,q_proj]", True, "vLLM applies none to lm_head"), ("[q_proj]", False, "has none for some_module")],
    ids=["known before", "found at the start"],
)
def test_where_vllm_has_no_adapters_it_gets_merged_weights(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    targets: str,
    room: bool,
    told: str,
) -> None:
    if not room:
        monkeypatch.setattr("foveal.rollout.vllm_engine.lacking_modules", lambda worker, modules: ["some_module"])
    side = Side(tmp_path / "model", "qwen3", *RANK, f"worker.actor.model.lora.target_modules={targets}")
    try:
        assert not side.engine.takes_adapters
        assert told in capfd.readouterr().out
        side.change_adapter()
        side.hand_over()
        assert side.gap(answer(side, side.prompts([0, 0]))) < CLOSE
    finally:
        side.engine.close()


def test_the_packed_layer_of_the_mixtures_tower_takes_adapters_too() -> None:
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration as Dense
    from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration as Mixture

    complete_packing()
    assert Mixture.packed_modules_mapping["qkv"] == Dense.packed_modules_mapping["qkv"]
