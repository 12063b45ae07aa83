"""The numbers of a step, on answers small enough to check by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foveal.track.metrics import perf_metrics, rollout_metrics, timing_metrics, validation_metrics
from foveal.track.samples import Sample
from foveal.track.timing import timer
from foveal.types import Group, Media, Prompt, Response


def response(length: int, rewards: dict[str, float], **columns: list[float]) -> Response:
    return Response(
        token_ids=np.arange(length),
        logprobs=np.zeros(length, dtype=np.float32),
        finish_reason="stop",
        rewards=rewards,
        columns={name: np.array(values) for name, values in columns.items()},
    )


def group(prompt_length: int, *responses: Response) -> Group:
    return Group(Prompt("train-0-0", [1], [1] * prompt_length, [], {}, 0, "3"), list(responses))


def test_a_reward_is_averaged_over_the_answers_that_have_it() -> None:
    metrics = rollout_metrics([group(3, response(2, {"overall": 1.0, "x": 0.5}), response(2, {"overall": 0.0}))], 9)
    assert metrics["reward/overall"] == 0.5
    assert metrics["reward/x"] == 0.5


def test_answers_that_are_left_out_count_nowhere() -> None:
    bad = response(100, {"overall": math.nan}, advantages=[math.nan] * 100)
    bad.role = "left_out"
    bad.finish_reason = "length"
    metrics = rollout_metrics([group(3, response(2, {"overall": 1.0}, advantages=[1.0, 1.0]), bad)], 9)
    assert metrics["critic/score/mean"] == 1.0
    assert metrics["response_length/max"] == 2
    assert metrics["response_length/clip_ratio"] == 0.0
    assert all(map(math.isfinite, metrics.values()))


def test_score_is_per_answer_and_advantages_are_per_token() -> None:
    long = response(3, {"overall": 1.0}, token_rewards=[0, 0, 0.9], advantages=[2, 2, 2], returns=[2, 2, 2])
    short = response(1, {"overall": 0.0}, token_rewards=[-0.1], advantages=[-2], returns=[-2])
    metrics = rollout_metrics([group(3, long, short)], 9)
    assert metrics["critic/score/mean"] == 0.5
    assert metrics["critic/rewards/mean"] == pytest.approx(0.4)
    assert metrics["critic/advantages/mean"] == 1.0
    assert (metrics["critic/advantages/min"], metrics["critic/returns/max"]) == (-2, 2)


def test_tokens_that_the_model_did_not_write_are_not_counted() -> None:
    metrics = rollout_metrics([group(3, response(2, {}, advantages=[5.0, 1.0], mask=[0, 1]))], 9)
    assert metrics["critic/advantages/max"] == 1.0


def test_lengths_and_what_was_cut() -> None:
    cut = response(4, {})
    cut.finish_reason = "length"
    metrics = rollout_metrics([group(9, cut), group(3, response(2, {}))], 9)
    assert metrics["response_length/mean"] == 3 and metrics["response_length/clip_ratio"] == 0.5
    assert metrics["prompt_length/mean"] == 6 and metrics["prompt_length/clip_ratio"] == 0.5


def test_a_critic_that_knows_the_returns_explains_them() -> None:
    known = response(2, {}, returns=[0.0, 10.0], values=[0.0, 10.0])
    assert rollout_metrics([group(3, known)], 9)["critic/vf_explained_var"] == pytest.approx(1.0)


def test_no_answers_give_no_metrics() -> None:
    assert rollout_metrics([], 9) == validation_metrics([]) == {}


def test_validation_names() -> None:
    metrics = validation_metrics([group(3, response(2, {"overall": 0.5, "accuracy": 1.0}))])
    assert metrics == {
        "val/reward_score": 0.5,
        "val/overall_reward": 0.5,
        "val/accuracy_reward": 1.0,
        "val_response_length/mean": 2.0,
        "val_response_length/max": 2.0,
        "val_response_length/min": 2.0,
        "val_response_length/clip_ratio": 0.0,
    }


def test_generation_is_timed_per_answer_token_and_passes_per_token() -> None:
    metrics = timing_metrics({"gen": 1.0, "update_actor": 1.0, "step": 3.0}, response_tokens=100, total_tokens=400)
    assert metrics == {
        "timing_s/gen": 1.0,
        "timing_s/update_actor": 1.0,
        "timing_s/step": 3.0,
        "timing_per_token_ms/gen": 10.0,
        "timing_per_token_ms/update_actor": 2.5,
    }


def test_throughput_is_per_second_and_device() -> None:
    metrics = perf_metrics(800, 4.0, n_devices=2)
    assert metrics["perf/throughput"] == 100
    assert 0 < metrics["perf/cpu_memory_used_gb"] < 1e5


def test_a_timer_adds_up_also_when_the_inside_raises() -> None:
    timings = {"gen": 1.0}
    with pytest.raises(KeyError), timer(timings, "gen"):
        raise KeyError
    assert timings["gen"] > 1.0


def test_a_sample_shows_the_prompt_with_its_placeholders() -> None:
    class Letters:
        def decode(self, token_ids: list[int]) -> str:
            return "".join(map(chr, token_ids))

    prompt = Prompt("val-0-7", [60, 105, 62], [60, 105, 105, 62], [Media("image", b"", "a.png")], {}, 7, 3)
    sample = Sample.of(prompt, response(1, {"overall": 0.5}), 5, Letters())
    assert (sample.prompt, sample.answer, sample.images, sample.rewards) == ("<i>", "3", ["a.png"], {"overall": 0.5})
