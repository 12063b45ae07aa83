"""What a worker moves to host memory in which phase; here from a CPU's memory to itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foveal.cluster.worker import Worker
from foveal.config import load_config
from foveal.data.loader import open_loader
from foveal.errors import EngineError
from foveal.preflight import open_processing
from foveal.rollout.collect import training_sampling
from foveal.rollout.transformers_engine import TransformersEngine
from foveal.types import Group
from tests.small_run import small_run

OFFLOAD = (
    "worker.actor.offload.offload_params=true",
    "worker.actor.offload.offload_optimizer=true",
    "worker.ref.offload.offload_params=true",
)


class OwnWeights(TransformersEngine):
    """Reads the weights that it is given, as an engine with a copy of its own would."""

    dtype = torch.float32

    def update_weights(self, buckets: Iterator[list[tuple[str, torch.Tensor]]], version: int) -> None:
        self.seen = sum(float(tensor.abs().sum()) for bucket in buckets for _, tensor in bucket)


class Run:
    """A worker, and its steps over one batch of prompts."""

    def __init__(self, root: Path, *overrides: str) -> None:
        self.config = load_config([*small_run(root, "qwen2_5_vl"), *overrides])
        processing = open_processing(self.config)
        self.prompts = open_loader(self.config, processing, "train").take(4)
        self.worker = Worker(self.config, processing, train=True)
        self.worker.parked = self.worker._parkings()

    def sample(self) -> list[Group]:
        order = {prompt.uid: number for number, prompt in enumerate(self.prompts)}
        groups = list(self.worker.rollout(self.prompts, training_sampling(self.config)))
        for group in groups:
            for number, response in enumerate(group.responses):
                response.columns["advantages"] = np.full(len(response.token_ids), number - 1.5, np.float32)
        return sorted(groups, key=lambda group: order[group.prompt.uid])

    def step(self, number: int) -> None:
        groups = self.sample()
        self.worker.ref_logprobs(groups)
        self.worker.update(groups, number, 3, 0.1)

    @property
    def away(self) -> set[str]:
        return {name for name, parking in self.worker.parked.items() if parking.is_away}

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.worker.model.state_dict().items()}


def test_states_and_reference_wait_while_answers_are_sampled(tmp_path: Path) -> None:
    run = Run(tmp_path, *OFFLOAD)
    run.step(1)
    assert run.away == set()
    groups = run.sample()
    assert run.away == {"actor optimizer", "reference"}  # the transformers engine needs the actor's weights
    run.worker.ref_logprobs(groups)
    assert run.away == {"actor optimizer"}
    run.worker.update(groups, 2, 3, 0.1)
    assert run.away == set()


def test_steps_are_the_same_with_offload(tmp_path: Path) -> None:
    runs = [Run(tmp_path, *OFFLOAD), Run(tmp_path)]
    assert not runs[1].worker.parked
    for run in runs:
        run.step(1)
        run.step(2)
    moved, stayed = (run.weights for run in runs)
    assert all(torch.equal(moved[name], value) for name, value in stayed.items())


def test_a_checkpoint_is_whole_while_states_are_away(tmp_path: Path) -> None:
    run = Run(tmp_path, *OFFLOAD)
    run.step(1)
    expected = run.weights
    run.sample()
    assert run.away
    run.worker.snapshot(model_only=False, copied=False).write(tmp_path / "global_step_1")
    run.sample()
    run.worker.load(tmp_path / "global_step_1", 1)
    assert run.away == set()
    assert all(torch.equal(run.weights[name], value) for name, value in expected.items())
    run.step(2)  # with the states that were saved


def test_a_checkpoint_is_whole_where_sampling_was_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, *OFFLOAD)
    run.step(1)
    expected = run.weights
    engine, closed = run.worker.engine, []

    def sleep() -> None:
        raise EngineError("the engine cannot sleep while 4 answers are open")

    monkeypatch.setattr(engine, "sleep", sleep)
    monkeypatch.setattr(engine, "close", lambda: closed.append(True))
    groups = run.worker.rollout(run.prompts, training_sampling(run.config))
    next(groups)  # then comes Ctrl-C
    assert run.away
    run.worker.snapshot(model_only=False, copied=False).write(tmp_path / "global_step_1")
    assert closed and run.away == set()
    assert all(torch.equal(run.weights[name], value) for name, value in expected.items())


def test_weights_leave_once_an_engine_of_its_own_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, *OFFLOAD)
    worker: Any = run.worker
    engine = worker.engine
    own = OwnWeights(
        engine.model,
        engine.processing_features,
        forbidden_ids=engine.forbidden_ids.tolist(),
        eos_ids=engine.eos_ids,
        pad_id=engine.pad_id,
    )
    worker.engine = own
    worker.parked = worker._parkings()
    monkeypatch.setattr(own, "submit", lambda *_: None)  # its weights being away, it cannot sample
    total = sum(float(p.detach().abs().sum()) for p in worker.model.parameters())
    assert list(worker.rollout(run.prompts, training_sampling(run.config))) == []
    assert own.seen == pytest.approx(total)
    assert "actor" in run.away
    worker._fetch("actor")
    assert sum(float(p.detach().abs().sum()) for p in worker.model.parameters()) == total
