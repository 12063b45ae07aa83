"""The vLLM engine against the contract of `RolloutEngine`, live, on the CPU and in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from foveal.errors import ConfigError, EngineError
from foveal.models.positions import prompt_positions
from foveal.rollout.sampler import _keep_top_k, _keep_top_p
from foveal.types import Group, Prompt, Response, Sampling
from tests.vllm_support import Side

pytestmark = pytest.mark.slow

CLOSE = 1e-4
SHORT = Sampling(n=3, max_tokens=12, seed=5)


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    side = Side(tmp_path_factory.mktemp("engine") / "model", "qwen3_vl")
    yield side
    side.engine.close()


def tokens(groups: list[Group]) -> dict[str, list[list[int]]]:
    return {group.prompt.uid: [r.token_ids.tolist() for r in group.responses] for group in groups}


def responses(groups: list[Group]) -> list[Response]:
    return [response for group in groups for response in group.responses]


@torch.no_grad()
def next_logits(side: Side, prompt: Prompt, response: Response, *, masked: bool = True) -> torch.Tensor:
    """(L, V): what a plain forward says before each token of the answer; `masked`: without forbidden ids."""
    start, count = len(prompt.expanded_ids), len(response.token_ids)
    places = prompt_positions(side.model, prompt.expanded_ids, prompt.features)
    positions = torch.cat([places[:, :-1], places[:, -1:] + torch.arange(count)], dim=1).unsqueeze(1)
    ids = torch.tensor([prompt.expanded_ids + response.token_ids.tolist()])
    output = side.model(input_ids=ids, position_ids=positions, use_cache=False, **(prompt.features or {}))
    logits: torch.Tensor = output.logits[0, start - 1 : -1]
    if masked:
        logits[:, side.processing.forbidden_ids] = -torch.inf
    return logits


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("pictures", [[0, 0], [1, 1], [2], [0, 1, 2, 1, 0]])
def test_logprobs_are_the_trainers(side: Side, temperature: float, pictures: list[int]) -> None:
    sampling = replace(SHORT, temperature=temperature)
    groups = side.engine.generate(side.prompts(pictures), sampling, side.version)
    assert side.gap(groups, temperature) < CLOSE


def test_greedy_answers_are_the_most_probable_ones_with_logprobs_at_temperature_1(side: Side) -> None:
    groups = side.engine.generate(side.prompts([0, 1, 2]), replace(SHORT, n=2, temperature=0.0), side.version)
    assert side.gap(groups) < CLOSE
    for group in groups:
        for response in group.responses:
            logits = next_logits(side, group.prompt, response)
            assert logits.argmax(-1).tolist() == response.token_ids.tolist()


def test_groups_come_with_arrays_of_the_contract(side: Side) -> None:
    given = side.prompts([1, 0, 2])
    groups = side.engine.generate(given, SHORT, weight_version=7)
    assert [group.prompt for group in groups] == given
    for response in responses(groups):
        assert response.token_ids.dtype == np.int64 and response.logprobs.dtype == np.float32
        assert response.token_ids.shape == response.logprobs.shape
        assert response.weight_spans == [(0, 7)]
        assert response.text == "" and response.rewards == {}
    assert [len(group.responses) for group in groups] == [3, 3, 3]


def test_the_same_seed_gives_the_same_answers_and_another_one_others(side: Side) -> None:
    first, again, other = (
        tokens(side.engine.generate(side.prompts([1, 0, 2]), SHORT.with_seed(seed), side.version)) for seed in (5, 5, 6)
    )
    assert first == again != other
    assert len({tuple(answer) for answers in first.values() for answer in answers}) == 9


def test_an_answer_ends_with_an_end_token_or_at_the_limit(side: Side) -> None:
    ends = set(side.processing.eos_ids)
    groups = side.engine.generate(side.prompts([0] * 8), Sampling(n=5, max_tokens=100, seed=1), side.version)
    for response in responses(groups):
        *before, last = response.token_ids.tolist()
        assert not ends & set(before)
        assert response.finish_reason == ("stop" if last in ends else "length")
        assert response.finish_reason == "stop" or len(response.token_ids) == 100
    assert {r.finish_reason for r in responses(groups)} == {"stop", "length"}


def test_ignore_eos_goes_on_to_the_limit(side: Side) -> None:
    sampling = Sampling(n=5, max_tokens=100, seed=1, ignore_eos=True)
    groups = side.engine.generate(side.prompts([0] * 8), sampling, side.version)
    assert {(len(r.token_ids), r.finish_reason) for r in responses(groups)} == {(100, "length")}
    written = set(np.concatenate([r.token_ids for r in responses(groups)]).tolist())
    assert written & set(side.processing.eos_ids), "no end token was written, so nothing was ignored"


def test_stop_token_ids_end_answers_too(side: Side) -> None:
    stops = list(range(100, 130))
    sampling = Sampling(n=5, max_tokens=100, seed=1, extra={"stop_token_ids": stops})
    for response in responses(side.engine.generate(side.prompts([0, 1]), sampling, side.version)):
        *before, last = response.token_ids.tolist()
        ends = {*stops, *side.processing.eos_ids}
        assert not ends & set(before)
        assert (last in ends) == (response.finish_reason == "stop")


def test_forbidden_ids_never_come_even_where_they_are_the_most_probable(side: Side) -> None:
    forbidden, head = side.processing.forbidden_ids, side.model.lm_head.weight
    direction = 2 * torch.randn(head.shape[1], generator=torch.Generator().manual_seed(0))
    with side.other_weights():  # whichever side of it a hidden state lies on, one of the two is far ahead
        head[forbidden[0]] = direction
        head[forbidden[1:]] = -direction
        side.hand_over()
        sampling = Sampling(n=5, max_tokens=40, seed=1, ignore_eos=True)
        groups = side.engine.generate(side.prompts([0, 1, 2]), sampling, side.version)
        best = torch.cat([next_logits(side, g.prompt, g.responses[0], masked=False).argmax(-1) for g in groups])
        assert np.isin(best.numpy(), forbidden).mean() > 0.8, "others are more probable: nothing is shown"
        drawn = np.concatenate([r.token_ids for r in responses(groups)])
        assert not set(drawn.tolist()) & set(forbidden)
        assert side.gap(groups) < CLOSE


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 5), (0.5, -1), (0.8, 6)])
def test_answers_stay_inside_the_cut_and_logprobs_are_those_of_what_is_left(
    side: Side, top_p: float, top_k: int
) -> None:
    sampling = Sampling(n=2, max_tokens=12, temperature=0.7, top_p=top_p, top_k=top_k, seed=3, ignore_eos=True)
    for group in side.engine.generate(side.prompts([0, 1]), sampling, side.version):
        for response in group.responses:
            scores = next_logits(side, group.prompt, response) / 0.7
            if top_k > 0:
                _keep_top_k(scores, top_k)
            if top_p < 1:
                _keep_top_p(scores, top_p)
            ids = torch.from_numpy(response.token_ids)[:, None]
            wanted = scores.log_softmax(-1).gather(-1, ids)[:, 0]
            np.testing.assert_allclose(response.logprobs, wanted.numpy(), atol=CLOSE)


def test_answers_to_a_prompt_share_its_prefill(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = side.engine.core.scheduler
    schedule, scheduled = scheduler.schedule, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        scheduled.append(output.total_num_scheduled_tokens)
        return output

    monkeypatch.setattr(scheduler, "schedule", noted)
    prompt = side.prompt(301, 1, "How many shapes are there in the picture? " * 4)
    length, block = len(prompt.expanded_ids), scheduler.block_size
    assert length > block, "too short to be shared"
    side.engine.generate([prompt], Sampling(n=5, max_tokens=4, seed=1, ignore_eos=True), side.version)
    assert scheduled[:4] == [length + 4 * (length % block), 5, 5, 5]


def test_each_distinct_picture_goes_through_the_vision_tower_once(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = side.engine.core.model_executor.driver_worker.worker.model_runner.model.visual
    forward, pictures = tower.forward, []

    def noted(*args: Any, grid_thw: Any, **kwargs: Any) -> Any:
        pictures.append(len(grid_thw))
        return forward(*args, grid_thw=grid_thw, **kwargs)

    monkeypatch.setattr(tower, "forward", noted)
    one, two = side.prompt(401, 1), side.prompt(402, 2)
    same = replace(side.prompt(401, 1, "And this?"), uid="another")
    assert same.media[0].data == one.media[0].data
    groups = side.engine.generate([one, two, same], Sampling(n=5, max_tokens=6, seed=1), side.version)
    assert sum(pictures) == 3
    assert side.gap(groups) < CLOSE


def test_finished_groups_leave_while_others_run(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = side.engine.core.step_fn, []
    monkeypatch.setattr(side.engine.core, "step_fn", lambda: (steps.append(1), step())[1])
    quick, slow = side.prompts([1, 0])
    side.engine.submit([slow], Sampling(n=3, max_tokens=120, ignore_eos=True), side.version)
    side.engine.submit([quick], Sampling(n=3, max_tokens=4, ignore_eos=True), side.version)
    arrivals = [(group.prompt.uid, len(steps)) for group in side.engine.collect()]
    assert [uid for uid, _ in arrivals] == [quick.uid, slow.uid]
    assert arrivals[0][1] < 12 and arrivals[1][1] >= 120


def test_prompts_submitted_while_collecting_are_answered_too(side: Side) -> None:
    given = side.prompts([0, 1, 2, 1])
    side.engine.submit(given[:2], replace(SHORT, max_tokens=40, ignore_eos=True), 0)
    groups: list[Group] = []
    for group in side.engine.collect():
        if not groups:
            side.engine.submit(given[2:], replace(SHORT, max_tokens=7), 1)
        groups.append(group)
    assert {group.prompt.uid for group in groups} == {prompt.uid for prompt in given}
    assert side.gap(groups) < CLOSE
    versions = {group.prompt.uid: group.responses[0].weight_spans[0][1] for group in groups}
    assert [versions[prompt.uid] for prompt in given] == [0, 0, 1, 1]


def test_new_prompts_do_not_wait_for_long_answers(side: Side) -> None:
    quick, late, slow = side.prompts([0, 0, 0])
    side.engine.submit([slow], Sampling(n=2, max_tokens=250, ignore_eos=True), 0)
    side.engine.submit([quick], Sampling(n=2, max_tokens=2, ignore_eos=True), 0)
    order = []
    for group in side.engine.collect():
        if not order:
            side.engine.submit([late], Sampling(n=2, max_tokens=2, ignore_eos=True), 0)
        order.append(group.prompt.uid)
    assert order == [quick.uid, late.uid, slow.uid]


def test_what_a_consumer_left_is_yielded_by_the_next_collect(side: Side) -> None:
    given = side.prompts([1, 0, 2, 0])
    sampling = replace(SHORT, max_tokens=60)
    whole = tokens(side.engine.generate(given, sampling, side.version))
    side.engine.submit(given, sampling, side.version)
    first = next(side.engine.collect())
    rest = list(side.engine.collect())
    assert len(rest) == 3 and tokens([first, *rest]) == whole


def test_an_abort_yields_what_was_written_soon_and_the_others_go_on(side: Side) -> None:
    quick, doomed, whole, too = side.prompts([0, 1, 2, 1])
    sampling = Sampling(n=3, max_tokens=150, seed=2, ignore_eos=True)
    side.engine.submit([doomed, whole, too], sampling, side.version)
    side.engine.submit([quick], replace(sampling, max_tokens=20), side.version)
    groups: list[Group] = []
    for group in side.engine.collect():
        if not groups:
            side.engine.abort([doomed.uid, too.uid, "not there"])
        groups.append(group)
    assert [group.prompt.uid for group in groups] == [quick.uid, doomed.uid, too.uid, whole.uid]
    for response in responses(groups[1:3]):
        assert response.finish_reason == "abort" and 10 < len(response.token_ids) < 40
    assert [(len(r.token_ids), r.finish_reason) for r in groups[3].responses] == [(150, "length")] * 3
    assert side.gap(groups) < CLOSE


def test_an_abort_before_collecting_yields_empty_answers(side: Side) -> None:
    first, second = side.prompts([1, 1])
    side.engine.submit([first, second], SHORT, side.version)
    side.engine.abort([first.uid])
    groups = {group.prompt.uid: group for group in side.engine.collect()}
    assert [(len(r.token_ids), r.finish_reason) for r in groups[first.uid].responses] == [(0, "abort")] * 3
    assert all(r.finish_reason in ("stop", "length") for r in groups[second.uid].responses)


def test_an_abort_keeps_answers_that_had_ended(side: Side) -> None:
    prompt, other = side.prompts([0, 0])
    often = {"stop_token_ids": list(range(100, 160))}  # about one token in four ends an answer
    side.engine.submit([prompt], Sampling(n=10, max_tokens=100, seed=1, extra=often), side.version)
    side.engine.submit([other], Sampling(n=1, max_tokens=4, ignore_eos=True), side.version)
    groups: list[Group] = []
    for group in side.engine.collect():
        side.engine.abort([prompt.uid])
        groups.append(group)
    assert groups[1].prompt is prompt
    ends = {response.finish_reason: response.token_ids[-1] for response in groups[1].responses}
    assert ends.keys() == {"stop", "abort"} and ends["stop"] in often["stop_token_ids"] + side.processing.eos_ids
    assert side.gap(groups) < CLOSE


def test_a_prompt_may_be_open_twice(side: Side) -> None:
    (prompt,) = side.prompts([1])
    greedy = replace(SHORT, n=1, temperature=0.0)
    (alone,) = side.engine.generate([prompt], greedy, side.version)
    side.engine.submit([prompt], greedy, side.version)
    side.engine.submit([prompt], SHORT, side.version)
    groups = sorted(side.engine.collect(), key=lambda group: len(group.responses))
    assert [len(group.responses) for group in groups] == [1, 3]
    assert tokens(groups[:1]) == tokens([alone])


def test_answers_never_outgrow_the_engine(side: Side) -> None:
    (prompt,) = side.prompts([0])
    (group,) = side.engine.generate([prompt], Sampling(n=1, max_tokens=9999, ignore_eos=True), side.version)
    assert len(group.responses[0].token_ids) == 512 - len(prompt.expanded_ids)


def test_a_prompt_that_leaves_no_room_is_refused(side: Side) -> None:
    prompt = side.prompt(1, 0, "What? " * 100)
    with pytest.raises(EngineError, match=rf"{prompt.uid}: \d+ tokens, but the engine takes sequences of 512"):
        side.engine.submit([prompt], SHORT, side.version)
    assert list(side.engine.collect()) == []


def test_prompts_of_more_pictures_than_a_step_computes_do_not_wait_for_an_empty_engine(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture_tokens = 6
    monkeypatch.setattr(side.engine.core.scheduler, "max_num_encoder_input_tokens", 2 * picture_tokens - 1)
    quick, many, slow = side.prompts([0, 2, 0])
    side.engine.submit([slow], Sampling(n=2, max_tokens=200, ignore_eos=True), side.version)
    side.engine.submit([quick], Sampling(n=1, max_tokens=2, ignore_eos=True), side.version)
    groups: list[Group] = []
    for group in side.engine.collect():
        if not groups:
            side.engine.submit([many], SHORT, side.version)
        groups.append(group)
    assert [group.prompt.uid for group in groups] == [quick.uid, many.uid, slow.uid]
    assert side.gap(groups) < CLOSE


def test_no_finished_request_is_held_until_the_next_rollout(side: Side) -> None:
    (prompt,) = side.prompts([1])
    side.engine.generate([prompt], Sampling(n=3, max_tokens=100, ignore_eos=True), side.version)
    scheduler = side.engine.core.scheduler
    assert scheduler.burst is None and not scheduler.requests and not side.engine._open


def test_more_least_tokens_than_there_is_room_for_fill_the_room(side: Side) -> None:
    (prompt,) = side.prompts([0])
    sampling = Sampling(n=1, max_tokens=9999, extra={"min_tokens": 9000})
    (group,) = side.engine.generate([prompt], sampling, side.version)
    assert len(group.responses[0].token_ids) == 512 - len(prompt.expanded_ids)


@pytest.mark.parametrize("extra", [{"stop_token_ids": [5, 99999]}, {"logit_bias": {99999: 1.0}}])
def test_ids_that_the_model_does_not_have_are_refused(side: Side, extra: dict[str, Any]) -> None:
    (name,) = extra
    with pytest.raises(ConfigError, match=rf"{name}: token id 99999 given; the model has ids 0 to \d+"):
        side.engine.submit(side.prompts([0]), replace(SHORT, extra=extra), side.version)
    assert list(side.engine.collect()) == []


def test_nothing_to_answer_is_answered_at_once(side: Side) -> None:
    assert side.engine.generate([], SHORT, side.version) == []
