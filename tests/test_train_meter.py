"""What is counted of a phase: the work that is done, and the work that a trainer without shared prompts would do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from foveal.models.flops import FlopCounter, Work
from foveal.train.layout import PromptLayouts
from foveal.train.meter import Meter, peer_work
from foveal.train.scorer import TokenScorer
from foveal.train.scoring import Packer, write_logprobs
from foveal.types import Group, Prompt, Response
from tests.rollout_models import IMAGE, PATCH, VISION_END, VISION_START, tiny_model

CPU = torch.device("cpu")
GRID = (1, 4, 4)


def group(*lengths: int) -> Group:
    """A prompt of 9 tokens, 4 of them visual, and responses of these lengths."""
    torch.manual_seed(0)
    ids = [7, VISION_START, *[IMAGE] * 4, VISION_END, 9, 8]
    features = {"pixel_values": torch.rand(16, 3 * 2 * PATCH["qwen3_vl"] ** 2), "image_grid_thw": torch.tensor([GRID])}
    prompt = Prompt("train-0-0", ids, ids, [], {}, 0, "", features)
    responses = [Response(np.arange(10, 10 + n), np.zeros(n, np.float32), "stop") for n in lengths]
    return Group(prompt, responses)


class Bench:
    """A tiny model that is measured on a device of 1 FLOP/s."""

    def __init__(self, *, shared_prefix: bool) -> None:
        model: Any = tiny_model("qwen3_vl")
        layouts = PromptLayouts(model, lambda prompt: prompt.features or {})
        self.model = model
        self.scorer = TokenScorer(model, forbidden_ids=[], temperature=1.0, autocast=None)
        self.packer = Packer(budget=10_000, shared_prefix=shared_prefix, layouts=layouts, device=CPU)
        self.meter = Meter(CPU, lambda prompt: [picture.grid for picture in layouts(prompt).pictures])
        self.meter._peak_rate = 1.0
        self.meter.watch(self.scorer)
        self.counter = FlopCounter(model)

    def score(self, groups: list[Group], name: str = "old") -> dict[str, float]:
        with self.meter.phase(name, self.scorer, groups):
            write_logprobs(self.scorer, self.packer, groups, "old_logprobs")
        return self.meter.metrics({name: 2.0})

    def update(self, groups: list[Group], passes: int = 1) -> dict[str, float]:
        with self.meter.phase("update_actor", self.scorer, groups, passes=passes):
            for _ in range(passes):
                for pack in self.packer.packs(groups):
                    self.scorer(pack).logprobs.sum().backward()
        return self.meter.metrics({"update_actor": 2.0})


def test_a_shared_prompt_counts_once_for_us_and_for_each_answer_of_a_peer() -> None:
    bench = Bench(shared_prefix=True)
    rates = bench.score([group(4, 2)])
    ours = Work(tokens=9 + 3 + 1, pairs=45 + (3 * 9 + 6) + (9 + 1), scored=6, grids=(GRID,))
    peers = Work(tokens=12 + 10, pairs=12 * 13 // 2 + 10 * 11 // 2, scored=6, grids=(GRID, GRID))
    assert rates == {
        "perf/tokens_per_s/old": 13 / 2,
        "perf/peer_tokens_per_s/old": 22 / 2,
        "perf/mfu_old": bench.counter.forward(ours) / 2,
        "perf/effective_mfu_old": bench.counter.forward(peers) / 2,
    }


def test_an_update_counts_forward_and_backward_each_time_it_goes_through_the_groups() -> None:
    bench = Bench(shared_prefix=True)
    once, twice = bench.update([group(4, 2)]), bench.update([group(4, 2)], passes=2)
    ours = Work(tokens=13, pairs=45 + 33 + 10, scored=6, grids=(GRID,))
    assert once["perf/mfu_actor"] == bench.counter.training(ours) / 2
    assert twice == {name: pytest.approx(2 * value) for name, value in once.items()}
    assert once["perf/effective_mfu_actor"] > once["perf/mfu_actor"]


def test_without_a_shared_prompt_we_do_the_work_of_a_peer() -> None:
    rates = Bench(shared_prefix=False).update([group(4, 2)])
    assert rates["perf/mfu_actor"] == rates["perf/effective_mfu_actor"]
    assert rates["perf/tokens_per_s/update_actor"] == rates["perf/peer_tokens_per_s/update_actor"]


def test_checkpointing_does_not_count_as_work() -> None:
    bench = Bench(shared_prefix=True)
    plain = bench.update([group(4, 2)])
    bench.model.train().gradient_checkpointing_enable({"use_reentrant": False})
    assert bench.update([group(4, 2)]) == plain


def test_answers_are_counted_while_they_are_sampled() -> None:
    bench = Bench(shared_prefix=True)
    with bench.meter.generation() as count:
        count(group(4, 2))
        count(group(3))
    assert bench.meter.metrics({"gen": 3.0}) == {"perf/tokens_per_s/gen": 3.0}


def test_what_was_reported_is_forgotten_and_what_has_no_time_is_left_out() -> None:
    bench = Bench(shared_prefix=True)
    bench.score([group(4)])
    assert bench.meter.metrics({"old": 1.0}) == {}
    with bench.meter.generation() as count:
        count(group(4))
    assert bench.meter.metrics({"update_actor": 1.0}) == {}


def test_answers_that_are_not_trained_on_cost_a_peer_nothing() -> None:
    some = group(4, 2)
    some.responses[0].role = "baseline"
    assert peer_work(some, (GRID,)) == Work(10, 55, 2, (GRID,))
