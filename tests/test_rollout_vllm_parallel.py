"""vLLM and torch.distributed: in two processes, as one engine and as two, and the process group of a single one."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytest.importorskip("vllm")

from foveal.errors import EngineError
from foveal.quickstart.tiny import build_tiny
from foveal.types import Group, Sampling
from tests.vllm_support import Side

pytestmark = pytest.mark.slow

CLOSE = 1e-4
LIMIT = 500
SAMPLING = Sampling(n=3, max_tokens=40, seed=5)
SHARED = [0, 1, 2, 1, 0]

Answers = dict[str, list[list[int]]]


@dataclass
class Seen:
    """What one process saw. The gaps are those of log-probabilities between engine and trainer."""

    answers: Answers
    gap: float
    aborted: Answers
    after_abort: Answers
    updated: Answers
    updated_gap: float
    stopped_after: int
    own: Answers
    own_gap: float
    adapter_gap: float
    sum_after_engines: float


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """Of the two processes, in which an engine of both is followed by an engine for each."""
    folder = tmp_path_factory.mktemp("parallel")
    config = build_tiny(folder / "model", "qwen2_5_vl") / "config.json"
    values = json.loads(config.read_text())
    values["vision_config"]["num_heads"] = 2  # one for each process
    config.write_text(json.dumps(values))
    with open(Path(tempfile.gettempdir()) / "foveal_vllm_parallel.lock", "w") as lock:
        # vLLM names the memory that its CPU processes share after their ranks alone: two runs would meet in it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        run_processes(in_processes, 2, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def run_processes(work: Callable[[int, Path], None], count: int, folder: Path) -> None:
    context = mp.spawn(work, args=(folder,), nprocs=count, join=False)
    deadline = time.monotonic() + LIMIT
    try:
        while not context.join(1):
            assert time.monotonic() < deadline, "the processes wait for each other: they made different calls"
    finally:
        for process in context.processes:
            process.kill()


def in_processes(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    together = as_one_engine(folder, rank)
    apart = as_two_engines(folder, rank)
    adapted = with_an_adapter(folder)
    ranks = torch.tensor(float(rank + 1))
    dist.all_reduce(ranks)
    torch.save(Seen(*together, *apart, adapted, ranks.item()), folder / f"{rank}.pt")
    dist.barrier()  # one that leaves while the other still talks to it may abort
    dist.destroy_process_group()


def in_a_single_process(rank: int, folder: Path) -> None:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "100000"
    with pytest.raises(EngineError, match="100000 GiB"):
        Side(folder / "model", "qwen3")
    assert not dist.is_initialized(), "after a start that failed"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    side = Side(folder / "model", "qwen3")
    assert dist.get_world_size() == 1
    side.engine.close()
    assert not dist.is_initialized(), "after its end"
    side.engine.close()


def as_one_engine(folder: Path, rank: int) -> tuple[Answers, float, Answers, Answers, Answers, float, int]:
    side = start(folder, processes=2)
    groups = side.engine.generate(side.prompts(SHARED), SAMPLING, side.version)
    gap = side.gap(groups)
    aborted, after_abort = abort_some(side)
    with side.other_weights():
        for weight in side.model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
        side.hand_over()
        updated = side.engine.generate(side.prompts(SHARED), SAMPLING, side.version)
        updated_gap = side.gap(updated)
    steps = stop_one(side, rank)
    side.engine.close()
    return tokens(groups), gap, aborted, after_abort, tokens(updated), updated_gap, steps


def abort_some(side: Side) -> tuple[Answers, Answers]:
    prompts = side.prompts([1] * 12)
    side.engine.submit(prompts[:2], SAMPLING, side.version)
    side.engine.submit(prompts[2:], Sampling(n=3, max_tokens=200, seed=6, ignore_eos=True), side.version)
    groups: list[Group] = []
    for group in side.engine.collect():
        if not groups:
            side.engine.abort([prompt.uid for prompt in prompts[2:]])
        groups.append(group)
    again = side.engine.generate(prompts, SAMPLING, side.version)
    return tokens(groups), tokens(again)


def stop_one(side: Side, rank: int) -> int:
    """Steps of this process when the second one had been asked to stop after thirty."""
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    side.engine.on_step = count
    side.engine.stop_asked = lambda: rank == 1 and steps > 30
    side.engine.submit(side.prompts([1, 0]), Sampling(n=3, max_tokens=250, seed=7, ignore_eos=True), side.version)
    with pytest.raises(EngineError, match="asked to stop"):
        list(side.engine.collect())
    return steps


def as_two_engines(folder: Path, rank: int) -> tuple[Answers, float]:
    side = start(folder, processes=1)
    prompts = [side.prompt(10 * rank + number, number % 3) for number in range(2 + 3 * rank)]
    groups = side.engine.generate(prompts, SAMPLING, side.version)
    side.engine.close()
    return tokens(groups), side.gap(groups)


def with_an_adapter(folder: Path) -> float:
    side = start(folder, 2, "worker.actor.model.lora.rank=6", "worker.actor.model.lora.alpha=3")
    assert side.engine.takes_adapters
    side.change_adapter()
    side.hand_over_adapter()
    groups = side.engine.generate(side.prompts(SHARED), SAMPLING, side.version)
    side.engine.close()
    return side.gap(groups)


def start(folder: Path, processes: int, *overrides: str) -> Side:
    size = f"worker.rollout.tensor_parallel_size={processes}"
    return Side(folder / "model", "qwen2_5_vl", size, "trainer.n_gpus_per_node=2", *overrides)


def tokens(groups: list[Group]) -> Answers:
    """By prompt, in the order in which the groups came."""
    return {group.prompt.uid: [response.token_ids.tolist() for response in group.responses] for group in groups}


def test_processes_of_one_engine_yield_the_same_groups_in_the_same_order(seen: list[Seen]) -> None:
    first, second = seen
    assert list(first.answers.items()) == list(second.answers.items())
    assert len(first.answers) == len(SHARED)
    assert list(first.updated.items()) == list(second.updated.items()) and first.updated != first.answers


def test_logprobs_of_a_split_model_are_the_trainers(seen: list[Seen]) -> None:
    assert all(process.gap < CLOSE for process in seen)


def test_a_split_model_takes_new_weights(seen: list[Seen]) -> None:
    assert all(process.updated_gap < CLOSE for process in seen)


def test_a_split_model_applies_an_adapter(seen: list[Seen]) -> None:
    assert all(process.adapter_gap < CLOSE for process in seen)


def test_processes_stay_together_when_answers_are_aborted(seen: list[Seen]) -> None:
    first, second = seen
    assert list(first.aborted.items()) == list(second.aborted.items()) and len(first.aborted) == 12
    assert any(len(answer) < 200 for answers in first.aborted.values() for answer in answers)
    assert list(first.after_abort.items()) == list(second.after_abort.items())


def test_processes_of_one_engine_stop_together_when_one_is_asked_to(seen: list[Seen]) -> None:
    assert seen[0].stopped_after == seen[1].stopped_after < 60


def test_engines_of_one_process_each_answer_their_own_prompts(seen: list[Seen]) -> None:
    first, second = seen
    assert (len(first.own), len(second.own)) == (2, 5) and not first.own.keys() & second.own.keys()
    assert all(process.own_gap < CLOSE for process in seen)


def test_the_process_group_outlives_the_engines(seen: list[Seen]) -> None:
    assert [process.sum_after_engines for process in seen] == [3.0, 3.0]


def test_the_process_group_that_an_engine_made_ends_with_it(tmp_path: Path) -> None:
    run_processes(in_a_single_process, 1, tmp_path)
