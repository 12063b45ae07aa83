"""What travels between the trainer and its workers: everything they need, nothing twice, nothing token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foveal.cluster.delivery import Inbox
from foveal.cluster.dispatch import Dispatch
from foveal.cluster.transport import (
    pack_groups,
    pack_prompts,
    pack_responses,
    unpack_groups,
    unpack_prompts,
    unpack_responses,
)
from foveal.types import Group, Media, Prompt, Response

rng = np.random.default_rng(0)


def prompt(number: int, pictures: list[bytes], tokens: int = 20) -> Prompt:
    ids = rng.integers(0, 150_000, tokens).tolist()
    media = [Media("image", data, f"row {number}, image {i}") for i, data in enumerate(pictures)]
    return Prompt(f"train-0-{number}", ids[:10], ids, media, {"long": "x" * 1000}, number, "the answer")


def response(length: int, role: Any = "trained") -> Response:
    tokens, logprobs = rng.integers(0, 150_000, length), rng.normal(size=length).astype(np.float32)
    return Response(tokens, logprobs, "length", "text", {"overall": 1.0}, [(0, 3)], role)


def bytes_of(value: Any) -> int:
    """As Ray would send it: what is in the pickle, and the arrays beside it."""
    ray = pytest.importorskip("ray")
    buffers: list[Any] = []
    pickled = ray.cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(pickled) + sum(buffer.raw().nbytes for buffer in buffers)


def test_prompts_arrive_without_what_only_the_trainer_needs() -> None:
    sent = [prompt(0, [b"one", b"two"]), prompt(1, []), prompt(2, [b"two"])]
    got = unpack_prompts(pack_prompts(sent))
    assert [p.uid for p in got] == [p.uid for p in sent]
    assert [p.media for p in got] == [p.media for p in sent]
    assert [(p.token_ids, p.expanded_ids, p.row_index) for p in got] == [
        (p.token_ids, p.expanded_ids, p.row_index) for p in sent
    ]
    assert all(p.row == {} and p.answer is None and p.features is None for p in got)
    assert all(type(token) is int for p in got for token in p.expanded_ids)


def test_a_picture_of_several_prompts_travels_once() -> None:
    picture = bytes(100_000)
    packed = pack_prompts([prompt(i, [bytes(picture)]) for i in range(10)])
    assert bytes_of(packed) < 110_000


def test_responses_arrive_as_they_were_but_for_texts_and_rewards() -> None:
    sent = [response(4), response(0), response(7, role="baseline")]
    sent[0].weight_spans = [(0, 3), (2, 4)]
    for got, was in zip(unpack_responses(pack_responses(sent)), sent, strict=True):
        assert np.array_equal(got.token_ids, was.token_ids) and got.token_ids.dtype == np.int64
        assert np.array_equal(got.logprobs, was.logprobs)
        assert (got.finish_reason, got.role, got.weight_spans) == (was.finish_reason, was.role, was.weight_spans)
    assert not len(unpack_responses(pack_responses(sent, logprobs=False))[0].logprobs)


def test_groups_find_the_prompts_that_are_there() -> None:
    prompts = {p.uid: p for p in (prompt(0, []), prompt(1, []))}
    sent = [Group(p, [response(3), response(2)]) for p in prompts.values()]
    got = unpack_groups(pack_groups(sent, logprobs=False), prompts)
    assert [g.prompt for g in got] == list(prompts.values())
    assert [len(r.token_ids) for g in got for r in g.responses] == [3, 2, 3, 2]
    assert got[0].prompt is prompts["train-0-0"]


class Step:
    """A trainer and its workers' inboxes, with all that passes between them counted."""

    def __init__(self, workers: int, **options: Any) -> None:
        defaults: dict[str, Any] = {"team_size": 1, "engine_size": 1, "batch_size": 1000, "with_logprobs": False}
        self.dispatch = Dispatch(
            workers, cost=lambda g: sum(len(r.token_ids) for r in g.responses), **{**defaults, **options}
        )
        self.inboxes = [Inbox() for _ in range(workers)]
        self.moved = 0

    def sample(self, prompts: list[Prompt], longest: int, n: int) -> list[Group]:
        groups = []
        for rank, own in enumerate(self.dispatch.share_prompts(prompts)):
            self._deliver(rank, self.dispatch.to_sample(rank, own))
            assert all(p.uid in self.inboxes[rank].prompts for p in own)
            for one in own:
                packed = pack_responses([response(int(rng.integers(1, longest))) for _ in range(n)])
                self.moved += bytes_of((0, packed))
                groups.append(Group(one, unpack_responses(packed)))
        return groups

    def run(self, groups: list[Group], needed: set[str], fills: str | None = None) -> None:
        for rank, delivery in enumerate(self.dispatch.to_train(groups, needed)):
            self._deliver(rank, delivery)
        for inbox in self.inboxes:
            for r in (r for g in inbox.groups for r in g.responses if fills):
                r.columns.setdefault(str(fills), np.full(len(r.token_ids), len(r.token_ids), np.float32))
        found = [inbox.new_columns() for inbox in self.inboxes]
        self.moved += bytes_of(found)
        self.dispatch.take_columns(found)

    def _deliver(self, rank: int, delivery: Any) -> None:
        self.moved += bytes_of(delivery)
        self.inboxes[rank].take(delivery)


def test_a_step_of_2560_responses_moves_less_than_a_fifth_more_than_its_bytes() -> None:
    step = Step(8)
    prompts = [prompt(i, [rng.bytes(20_000)], 300) for i in range(512)]
    groups = step.sample(prompts, 400, 5)
    step.run(groups, {"old_logprobs"}, "old_logprobs")
    step.run(groups, {"ref_logprobs"}, "ref_logprobs")
    for r in (r for g in groups for r in g.responses):
        r.columns["advantages"] = np.zeros(len(r.token_ids), np.float32)
    step.run(groups, {"old_logprobs", "ref_logprobs", "advantages"})
    raw = sum(len(m.data) for p in prompts for m in p.media)
    raw += sum(8 * (len(p.token_ids) + len(p.expanded_ids)) for p in prompts)
    for r in (r for g in groups for r in g.responses):
        raw += r.token_ids.nbytes + r.logprobs.nbytes + sum(column.nbytes for column in r.columns.values())
    assert 0.5 * raw < step.moved < 1.2 * raw


def test_columns_reach_both_sides_and_travel_once() -> None:
    step = Step(3)
    groups = step.sample([prompt(i, []) for i in range(7)], 9, 2)
    groups[2].responses[0].columns["old_logprobs"] = np.full(len(groups[2].responses[0].token_ids), -9, np.float32)
    step.run(groups, {"old_logprobs"}, "old_logprobs")
    for group in groups:
        for r in group.responses:
            wanted = -9 if r is groups[2].responses[0] else len(r.token_ids)
            assert r.columns["old_logprobs"].tolist() == [wanted] * len(r.token_ids)
    moved = step.moved
    step.run(groups, {"old_logprobs"}, "old_logprobs")
    assert step.moved - moved < 2500
    assert sum(len(inbox.groups) for inbox in step.inboxes) == 7


def test_workers_forget_prompts_that_are_gone() -> None:
    step = Step(2)
    groups = step.sample([prompt(i, []) for i in range(4)], 5, 1)
    step.sample([prompt(i, []) for i in range(4, 8)], 5, 1)
    assert sum(len(inbox.prompts) for inbox in step.inboxes) == 8  # those of groups, and the last ones
    kept = groups[0].prompt.uid
    del groups[1:]
    step.sample([prompt(9, [])], 5, 1)
    left = {uid for inbox in step.inboxes for uid in inbox.prompts}
    assert left == {kept, "train-0-9"}


def test_workers_that_share_sequences_train_on_the_same_groups() -> None:
    step = Step(4, team_size=2)
    groups = step.sample([prompt(i, []) for i in range(6)], 9, 2)
    step.run(groups, {"old_logprobs"}, "old_logprobs")
    uids = [[g.prompt.uid for g in inbox.groups] for inbox in step.inboxes]
    assert uids[0] == uids[1] and uids[2] == uids[3] and not set(uids[0]) & set(uids[2])
    assert [sum(sizes) for sizes in zip(step.dispatch.sizes(0, 4), step.dispatch.sizes(2, 4), strict=True)] == [4, 2]


def test_workers_of_one_engine_sample_the_same_prompts() -> None:
    shares = Step(4, engine_size=2).dispatch.share_prompts([prompt(i, []) for i in range(5)])
    assert shares[0] == shares[1] and shares[2] == shares[3]
    assert sorted(p.row_index for p in shares[0] + shares[2]) == [0, 1, 2, 3, 4]


def test_each_worker_of_an_engine_trains_on_what_the_engine_answered() -> None:
    step = Step(4, engine_size=2)
    groups = [Group(p, [response(5)]) for p in (prompt(i, [rng.bytes(10_000)]) for i in range(8))]
    for rank, own in enumerate(step.dispatch.share_prompts([g.prompt for g in groups])):
        step.dispatch.to_sample(rank, own)
    deliveries = step.dispatch.to_train(groups, set())
    assert all(delivery.prompts is None for delivery in deliveries)
    assert [len(delivery.groups.uids) for delivery in deliveries if delivery.groups] == [2, 2, 2, 2]
