"""The vLLM engine's weights, caches and sleep: the next answers are always those of the weights handed over last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from foveal.errors import EngineError
from foveal.models.named_tensors import named_tensors
from foveal.types import Group, Prompt, Sampling
from tests.vllm_support import Side

pytestmark = pytest.mark.slow

CLOSE = 1e-4
SAMPLING = Sampling(n=3, max_tokens=8, seed=5)


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    side = Side(tmp_path_factory.mktemp("weights") / "model", "qwen2_5_vl")
    yield side
    side.engine.close()


def answer(side: Side, prompts: list[Prompt]) -> list[Group]:
    return side.engine.generate(prompts, SAMPLING, side.version)


def change(side: Side, part: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, weight in side.model.named_parameters():
        if part in name:
            weight += 0.05 * torch.randn(weight.shape, generator=generator)


def long_prompts(side: Side) -> list[Prompt]:
    """Of more tokens than a block of the prefix cache has."""
    prompts = [side.prompt(number, 1, "How many shapes are there in the picture? " * 4) for number in (51, 52)]
    assert all(len(prompt.expanded_ids) > side.engine.core.scheduler.block_size for prompt in prompts)
    return prompts


@pytest.mark.parametrize("part", ["visual.blocks", "visual.merger", "language_model", "lm_head"])
def test_changed_weights_are_seen_by_the_next_answers(side: Side, part: str) -> None:
    prompts = long_prompts(side)
    answer(side, prompts)  # fills the caches
    with side.other_weights():
        change(side, part)
        assert side.gap(answer(side, prompts)) > 100 * CLOSE, "the change is too small to be seen"
        side.hand_over()
        assert side.gap(answer(side, prompts)) < CLOSE


def test_without_a_reset_of_the_prefix_cache_answers_are_stale(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = long_prompts(side)
    answer(side, prompts)
    with side.other_weights(), monkeypatch.context() as patched:
        change(side, "visual")
        patched.setattr(side.engine.core, "reset_prefix_cache", lambda: True)
        side.hand_over()
        assert side.gap(answer(side, prompts)) > 100 * CLOSE
        patched.undo()


def test_without_a_reset_of_the_encoder_cache_answers_are_stale(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = side.prompts([1, 2])
    core = side.engine.core
    answer(side, prompts)
    with side.other_weights(), monkeypatch.context() as patched:
        change(side, "visual")
        patched.setattr(core, "reset_encoder_cache", lambda: None)
        runner = core.model_executor.driver_worker.worker.model_runner
        patched.setattr(runner, "reset_encoder_cache", lambda: None)  # vLLM's own, when weights are loaded
        side.hand_over()
        assert side.gap(answer(side, prompts)) > 100 * CLOSE
        patched.undo()


def test_the_cycle_of_a_training_step(side: Side) -> None:
    for _ in range(2):
        side.engine.sleep()
        side.engine.wake()
        side.hand_over()
        assert side.gap(answer(side, side.prompts([0, 1]))) < CLOSE
    side.engine.sleep()
    side.engine.sleep()  # nothing to do
    side.engine.wake()
    side.engine.wake()
    side.hand_over()
    assert side.gap(answer(side, side.prompts([0, 1]))) < CLOSE


def test_weights_and_memory_stay_while_answers_are_open(side: Side) -> None:
    side.engine.submit(side.prompts([1]), SAMPLING, side.version)
    with pytest.raises(EngineError, match="cannot change while 3 answers are open"):
        side.hand_over()
    with pytest.raises(EngineError, match="cannot sleep while 3 answers are open"):
        side.engine.sleep()
    assert side.gap(list(side.engine.collect())) < CLOSE


def test_a_weight_in_another_type_is_taken_over_in_the_engines_own(side: Side) -> None:
    with side.other_weights():
        for weight in side.model.parameters():
            weight.copy_(weight.bfloat16())
        side.engine.update_weights(named_tensors(side.model, dtype=torch.bfloat16), side.version)
        assert side.engine.dtype == torch.float32
        assert side.gap(answer(side, side.prompts([0, 1, 2]))) < CLOSE


def without(part: str) -> Any:
    return lambda name, tensor: None if part in name else (name, tensor)


def cut(part: str) -> Any:
    return lambda name, tensor: (name, tensor[:-1] if part in name else tensor)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (without("visual.blocks.1.norm1"), "visual.blocks.1.norm1"),
        (without("layers.1.mlp.down_proj"), "layers.1.mlp.down_proj"),
        (without(""), "layers"),
        (cut("layers.1.mlp.down_proj"), r"\(vllm/\S+\.py:\d+\)"),
    ],
    ids=["none of a layer", "none of a large layer", "none at all", "another shape"],
)
def test_weights_that_are_not_the_models_end_the_engine(
    side: Side, monkeypatch: pytest.MonkeyPatch, fault: Any, told: str
) -> None:
    def faulty() -> Iterator[list[tuple[str, torch.Tensor]]]:
        for bucket in named_tensors(side.model):
            yield [found for name, tensor in bucket if (found := fault(name, tensor)) is not None]

    with monkeypatch.context() as patched:
        patched.setattr(side.engine, "_died", None)  # and back, afterwards
        with pytest.raises(EngineError, match=told):
            side.engine.update_weights(faulty(), side.version)
        for call in (lambda: side.engine.submit(side.prompts([0]), SAMPLING, 0), side.hand_over):
            with pytest.raises(EngineError, match=told):
                call()
