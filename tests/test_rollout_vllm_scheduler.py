"""Bursts against what must come out: each request's own tokens, up to its own end, in memory that it really has."""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from foveal.rollout.vllm_lora import adapter_request
from foveal.rollout.vllm_scheduler import with_bursts
from tests.vllm_support import Side

STOP = 7
BLOCK = 16


def token_at(name: str, position: int) -> int:
    """What the pretended model writes: now and then the end token."""
    return zlib.crc32(f"{name}:{position}".encode()) % 61


def expected(name: str, prompt: int, limit: int) -> tuple[list[int], str]:
    tokens = []
    for position in range(prompt, prompt + limit):
        tokens.append(token_at(name, position))
        if tokens[-1] == STOP:
            return tokens, "stop"
    return tokens, "length"


class Runner:
    """Keeps what a model runner keeps, and checks that each step fits it."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[int]] = {}
        self.known: dict[str, int] = {}
        self.computed: dict[str, int] = {}

    def run(self, output: Any) -> Any:
        for name in (output.finished_req_ids or set()) | (output.preempted_req_ids or set()):
            self.blocks.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.blocks[new.req_id] = list(new.block_ids[0])
            self.known[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids)
            self.computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                self.blocks[name] = list(blocks[0])
                self.known[name] = len(cached.all_token_ids[name])
                self.computed[name] = computed
            elif blocks is not None:
                self.blocks[name] += blocks[0]
            assert self.computed[name] == computed, f"{name}: {computed} given, {self.computed[name]} true"
        tokens, owners = [], {}
        for name, count in output.num_scheduled_tokens.items():
            self.computed[name] += count
            assert self.computed[name] <= self.known[name], f"{name}: ahead of its tokens"
            assert self.computed[name] <= BLOCK * len(self.blocks[name]), f"{name}: writes where it has no memory"
            for other in self.blocks[name][-1:]:
                assert owners.setdefault(other, name) == name, "two requests write to one block"
            samples = self.computed[name] == self.known[name]
            tokens.append([token_at(name, self.known[name])] if samples else [])
            self.known[name] += samples
        values = np.array([[-float(t[0]) if t else 0.0] for t in tokens], dtype=np.float32).reshape(-1, 1)
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: k for k, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=LogprobsLists(values.astype(np.int32), values, values[:, 0].astype(np.int32)),
            prompt_logprobs_dict={},
        )


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Any:
    side = Side(tmp_path_factory.mktemp("scheduler") / "model", "qwen3", "worker.rollout.enforce_eager=true")
    yield side
    side.engine.close()


def make_scheduler(side: Side, *, asynchronous: bool, blocks: int, adapter: bool) -> Any:
    from vllm.config import LoRAConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    core = side.engine.core
    config = core.vllm_config
    config.cache_config.num_gpu_blocks = blocks
    config.scheduler_config.async_scheduling = asynchronous
    config.lora_config = LoRAConfig(max_loras=1) if adapter else None
    memory = core.scheduler.kv_cache_config
    (group,) = memory.kv_cache_groups
    group = replace(group, kv_cache_spec=replace(group.kv_cache_spec, block_size=BLOCK))
    return with_bursts(AsyncScheduler if asynchronous else Scheduler)(
        vllm_config=config,
        kv_cache_config=replace(memory, num_blocks=blocks, kv_cache_groups=[group]),
        structured_output_manager=core.structured_output_manager,
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=False,
    )


def make_request(name: str, prompt: int, limit: int, *, adapter: bool) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    return Request(
        request_id=name,
        prompt_token_ids=[hash((name, k)) % 50 for k in range(prompt)],
        sampling_params=SamplingParams(max_tokens=limit, stop_token_ids=[STOP], ignore_eos=True, logprobs=0),
        pooling_params=None,
        lora_request=adapter_request() if adapter else None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def check_counts(scheduler: Any, under_way: list[Any]) -> None:
    """Between bursts vLLM knows what is under way: by it newer versions tell which tokens a preemption made stale."""
    for request in scheduler.running if scheduler.burst is None else ():
        name = request.request_id
        count = sum(output.num_scheduled_tokens.get(name, 0) for output in under_way)
        assert getattr(request, "num_in_flight_tokens", count) == count, name


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize(("blocks", "requests"), [(400, 12), (60, 12), (24, 8), (400, 40)])
@pytest.mark.parametrize("seed", range(3))
def test_every_request_gets_its_own_tokens(
    side: Side, asynchronous: bool, adapter: bool, blocks: int, requests: int, seed: int
) -> None:
    """With room for all and with so little that requests wait or are thrown out; with late ones, and with aborts."""
    from vllm.v1.request import RequestStatus

    rng = np.random.default_rng(seed)
    scheduler = make_scheduler(side, asynchronous=asynchronous, blocks=blocks, adapter=adapter)
    runner = Runner()
    shapes = {f"r{k}": (int(rng.integers(1, 60)), int(rng.integers(1, 150))) for k in range(requests)}
    late = set(rng.choice(list(shapes), requests // 4, replace=False).tolist())
    doomed = set(rng.choice(list(shapes), 2, replace=False).tolist())
    for name in shapes.keys() - late:
        scheduler.add_request(make_request(name, *shapes[name], adapter=adapter))
    tokens: dict[str, list[int]] = {name: [] for name in shapes}
    values: dict[str, list[float]] = {name: [] for name in shapes}
    reasons: dict[str, str] = {}
    bursts = 0
    under_way: deque[Any] = deque()
    for step in range(3000):
        if step == 25:
            for name in late:
                scheduler.add_request(make_request(name, *shapes[name], adapter=adapter))
        if step == 40:
            scheduler.finish_requests(doomed & tokens.keys(), RequestStatus.FINISHED_ABORTED)
        if scheduler.has_requests():
            output = scheduler.schedule()
            bursts += hasattr(output, "burst")
            under_way.append((output, runner.run(output)))
        elif not under_way:
            if step > 40:
                break
            continue
        if asynchronous and len(under_way) < 2 and scheduler.has_requests():
            continue
        answers = scheduler.update_from_output(*under_way.popleft())
        check_counts(scheduler, [output for output, _ in under_way])
        for piece in scheduler.take_pieces():
            tokens[piece.request_id] += piece.token_ids.tolist()
            values[piece.request_id] += piece.logprobs.tolist()
            if piece.finish_reason:
                reasons[piece.request_id] = piece.finish_reason
        for answer in answers[0].outputs if answers else ():
            tokens[answer.request_id] += answer.new_token_ids
            values[answer.request_id] += answer.new_logprobs.logprobs[:, 0].tolist()
            if answer.finish_reason is not None:
                reasons[answer.request_id] = str(answer.finish_reason)
    for piece in scheduler.take_pieces():
        tokens[piece.request_id] += piece.token_ids.tolist()
    for name, (prompt, limit) in shapes.items():
        wanted, reason = expected(name, prompt, limit)
        if name in doomed and name not in reasons:
            assert tokens[name] == wanted[: len(tokens[name])]
            continue
        assert tokens[name] == wanted, name
        assert reasons[name] == reason, name
        assert values[name] == [-float(token) for token in wanted], name
    assert bursts > 20, "no burst took place"
    assert not scheduler.running
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == blocks - 1, "memory was lost"
