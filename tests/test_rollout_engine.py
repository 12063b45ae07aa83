"""The choice of an engine, and the transformers engine's contract with its consumer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from foveal.config import load_config
from foveal.errors import ConfigError, ModelError
from foveal.rollout import transformers_engine
from foveal.rollout.engine import choose_engine
from foveal.types import Group, Prompt, Sampling
from tests.rollout_models import FORBIDDEN, VOCAB, image_prompt, text_prompt, tiny_engine, tiny_model

SOME_ENDS = list(range(20, 28))  # about one token in eight ends an answer, so answers differ in length
LONG = Sampling(n=3, max_tokens=24, seed=5)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("qwen3")


def prompts(count: int) -> list[Prompt]:
    return [text_prompt(f"row-{k}", 3 + k) for k in range(count)]


def answers(groups: list[Group]) -> dict[str, list[list[int]]]:
    return {group.prompt.uid: [r.token_ids.tolist() for r in group.responses] for group in groups}


@pytest.fixture
def choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str | None], tuple[str, list[str]]]:
    """Chooses an engine on a CPU with this version of vLLM; returns it with what was said."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "head_dim": 64}')

    def choose(name: str, version: str | None) -> tuple[str, list[str]]:
        for module in ("engine", "vllm_available"):
            monkeypatch.setattr(f"foveal.rollout.{module}.vllm_version", lambda: version)
        lines: list[str] = []
        keys = [f"worker.rollout.name={name}", f"worker.actor.model.model_path={tmp_path}", "worker.rollout.n=2"]
        return choose_engine(load_config(keys), lines.append), lines

    return choose


def test_auto_takes_vllm_where_it_runs_and_says_so(choose: Any) -> None:
    assert choose("auto", "0.32.0+cpu") == ("vllm", ["rollout engine: vLLM 0.32.0+cpu (worker.rollout.name=auto)"])


def test_auto_takes_transformers_elsewhere_and_says_why(choose: Any) -> None:
    engine, (line,) = choose("auto", None)
    assert engine == "transformers" and "vLLM is not installed" in line


def test_an_engine_that_was_named_is_taken_without_a_word(choose: Any) -> None:
    assert choose("vllm", "0.32.0+cpu") == ("vllm", [])
    assert choose("transformers", "0.32.0+cpu") == ("transformers", [])


def test_vllm_where_it_cannot_run_is_refused_with_the_cure(choose: Any) -> None:
    with pytest.raises(ConfigError, match=r"worker.rollout.name=vllm: .*pip install 'foveal\[vllm\]'.*transformers"):
        choose("vllm", None)


def test_an_unknown_sampling_parameter_is_refused_by_name(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"min_p.*stop_token_ids"):
        tiny_engine(model).submit(prompts(1), Sampling(extra={"min_p": 0.1}), 0)


def test_generate_returns_groups_in_order_with_arrays_of_the_contract(model: nn.Module) -> None:
    given = prompts(3)
    groups = tiny_engine(model).generate(given, Sampling(n=2, max_tokens=4), weight_version=7)
    assert [group.prompt for group in groups] == given
    for response in (r for group in groups for r in group.responses):
        assert response.token_ids.dtype == np.int64 and response.logprobs.dtype == np.float32
        assert response.token_ids.shape == response.logprobs.shape
        assert response.weight_spans == [(0, 7)]
        assert response.text == ""
    assert [len(group.responses) for group in groups] == [2, 2, 2]


def test_an_end_token_ends_the_answer_and_belongs_to_it(model: nn.Module) -> None:
    for group in tiny_engine(model, eos_ids=SOME_ENDS).generate(prompts(4), LONG, 0):
        for response in group.responses:
            *before, last = response.token_ids.tolist()
            assert not set(before) & set(SOME_ENDS)
            assert response.finish_reason == ("stop" if last in SOME_ENDS else "length")
            assert response.finish_reason == "stop" or len(response.token_ids) == LONG.max_tokens


def test_ignore_eos_goes_on_to_the_limit(model: nn.Module) -> None:
    sampling = Sampling(n=3, max_tokens=24, seed=5, ignore_eos=True)
    groups = tiny_engine(model, eos_ids=SOME_ENDS).generate(prompts(2), sampling, 0)
    reached = [(len(r.token_ids), r.finish_reason) for group in groups for r in group.responses]
    assert reached == [(24, "length")] * 6


def test_stop_token_ids_end_answers_too(model: nn.Module) -> None:
    sampling = Sampling(n=3, max_tokens=24, seed=5, extra={"stop_token_ids": SOME_ENDS})
    as_stop_ids = tiny_engine(model).generate(prompts(3), sampling, 0)
    assert answers(as_stop_ids) == answers(tiny_engine(model, eos_ids=[1, *SOME_ENDS]).generate(prompts(3), LONG, 0))


def test_a_flat_distribution_never_gives_a_forbidden_id() -> None:
    flat: Any = tiny_model("qwen3")
    nn.init.zeros_(flat.lm_head.weight)
    groups = tiny_engine(flat).generate(prompts(4), Sampling(n=8, max_tokens=32, ignore_eos=True), 0)
    drawn = np.concatenate([r.token_ids for group in groups for r in group.responses])
    logprobs = np.concatenate([r.logprobs for group in groups for r in group.responses])
    assert set(drawn.tolist()) == set(range(VOCAB)) - set(FORBIDDEN)
    np.testing.assert_allclose(logprobs, -np.log(VOCAB - len(FORBIDDEN)), rtol=1e-5)


def test_answers_do_not_depend_on_the_rest_of_the_batch(model: nn.Module) -> None:
    engine = tiny_engine(model, eos_ids=SOME_ENDS)
    together = answers(engine.generate(prompts(5), LONG, 0))
    alone = answers([engine.generate([prompt], LONG, 0)[0] for prompt in prompts(5)])
    assert together == alone


def test_little_memory_means_one_prompt_at_a_time_and_the_same_answers(model: nn.Module) -> None:
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    sampling = Sampling(n=2, max_tokens=2, seed=1)
    whole = answers(tiny_engine(model).generate(prompts(3), sampling, 0))
    assert sizes == [3, 6]
    sizes.clear()
    split = answers(tiny_engine(model, kv_memory_bytes=1).generate(prompts(3), sampling, 0))
    hook.remove()
    assert sizes == [1, 2] * 3
    assert split == whole


@pytest.mark.parametrize("share", [0.0, 2.0])
def test_dropping_finished_rows_changes_nothing(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    engine = tiny_engine(model, eos_ids=SOME_ENDS)
    usual = engine.generate(prompts(5), LONG, 0)
    monkeypatch.setattr(transformers_engine, "_COMPACT_AT", share)
    other = engine.generate(prompts(5), LONG, 0)
    assert answers(other) == answers(usual)
    for a, b in zip(usual, other, strict=True):
        for x, y in zip(a.responses, b.responses, strict=True):
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-5)


def test_another_seed_gives_other_answers(model: nn.Module) -> None:
    engine = tiny_engine(model)
    assert answers(engine.generate(prompts(2), LONG, 0)) == answers(engine.generate(prompts(2), LONG, 0))
    assert answers(engine.generate(prompts(2), LONG, 0)) != answers(engine.generate(prompts(2), LONG.with_seed(6), 0))


def test_groups_are_yielded_as_they_finish(model: nn.Module) -> None:
    engine = tiny_engine(model, eos_ids=SOME_ENDS)
    engine.submit(prompts(8), LONG, 0)
    finished = [max(len(r.token_ids) for r in group.responses) for group in engine.collect()]
    assert finished == sorted(finished)
    assert finished[0] < finished[-1]


def test_prompts_sampled_differently_can_be_open_together(model: nn.Module) -> None:
    engine = tiny_engine(model)
    engine.submit(prompts(2), Sampling(n=3, max_tokens=4), 0)
    engine.submit(prompts(2), Sampling(n=1, max_tokens=6, temperature=0.0), 1)
    shapes = [[len(r.token_ids) for r in group.responses] for group in engine.collect()]
    assert shapes == [[4, 4, 4], [4, 4, 4], [6], [6]]


def test_abort_before_collect_yields_empty_answers(model: nn.Module) -> None:
    engine = tiny_engine(model)
    engine.submit(prompts(3), LONG, 0)
    engine.abort(["row-1", "not there"])
    groups = {group.prompt.uid: group for group in engine.collect()}
    assert [(len(r.token_ids), r.finish_reason) for r in groups["row-1"].responses] == [(0, "abort")] * 3
    assert {r.finish_reason for uid in ("row-0", "row-2") for r in groups[uid].responses} <= {"stop", "length"}


def test_abort_while_collecting_keeps_what_was_written(model: nn.Module) -> None:
    engine = tiny_engine(model, eos_ids=SOME_ENDS)
    whole = answers(engine.generate(prompts(8), LONG, 0))
    engine.submit(prompts(8), LONG, 0)
    groups: list[Group] = []
    for group in engine.collect():
        groups.append(group)
        engine.abort([f"row-{k}" for k in range(8)])
    assert len(groups) == 8
    reasons = {r.finish_reason for group in groups for r in group.responses}
    assert "abort" in reasons
    for uid, cut in answers(groups).items():
        for written, full in zip(cut, whole[uid], strict=True):
            assert written == full[: len(written)]


def test_what_a_consumer_left_is_yielded_by_the_next_collect(model: nn.Module) -> None:
    engine = tiny_engine(model, eos_ids=SOME_ENDS)
    whole = answers(engine.generate(prompts(4), LONG, 0))
    engine.submit(prompts(4), LONG, 0)
    first = next(engine.collect())
    rest = list(engine.collect())
    assert answers([first, *rest]) == whole
    assert len(rest) == 3


def test_training_state_is_restored_and_checkpointing_does_not_interfere() -> None:
    model: Any = tiny_model("qwen3_vl")
    prompt = image_prompt("a", model, (4, 4))
    engine = tiny_engine(model)
    expected = answers(engine.generate([prompt], LONG, 0))
    model.gradient_checkpointing_enable()
    model.train()
    model.model.visual.eval()
    engine.submit([prompt], LONG, 0)
    for group in engine.collect():
        assert torch.is_grad_enabled()
        assert answers([group]) == expected
    assert model.training and model.model.language_model.training and not model.model.visual.training


def test_probabilities_that_are_not_numbers_stop_the_run() -> None:
    model: Any = tiny_model("qwen3")
    nn.init.constant_(model.lm_head.weight, float("nan"))
    with pytest.raises(ModelError, match="not finite"):
        tiny_engine(model).generate(prompts(1), LONG, 0)
