"""Engines on devices of their own: which prompt goes where, and when they get new weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from foveal.cluster.crew import Crew
from foveal.cluster.dispatch import Dispatch
from foveal.cluster.launch import everyone, patience
from foveal.cluster.topology import engine_size
from foveal.cluster.transport import unpack_responses
from foveal.config import Config
from foveal.errors import EngineError, WorkerError
from foveal.track.timing import BusyClock
from foveal.types import Group, Metrics, Prompt, Sampling


class Engines:
    """The trainer's side of them.

    Args:
        crew: of `EngineMember`.

    Attributes:
        clock: of when they sample or take weights.
        are_stale: whether the trainers' weights are newer than theirs.
    """

    def __init__(self, config: Config, crew: Crew) -> None:
        self.config = config
        self.crew = crew
        self.clock = BusyClock()
        self.are_stale = True
        self._all: Crew | None = None
        self._dispatch = Dispatch(
            len(crew.actors),
            team_size=1,
            engine_size=engine_size(config),
            cost=lambda group: 0.0,
            batch_size=1,
            with_logprobs=False,
        )
        self._tokens = 0
        self._seconds = 0.0

    def connect(self, trainers: Crew, address: tuple[str, int], about: tuple[torch.dtype | None, bool]) -> None:
        """Opens the channel that weights come through.

        Args:
            address: where the trainers have met.
            about: what `EngineMember.start` returned.
        """
        self._all = everyone([trainers, self.crew])
        ends, timeout = 1 + len(self.crew.actors), patience(self.config)
        self._all.call("the start of the workers", "connect", lambda rank: (address, ends, timeout, *about))

    def hand_over(self) -> None:
        """Gives them the trainers' weights, where these are newer.

        Raises:
            EngineError: the process of one is gone, which was found before the trainers take part: they still work.
            WorkerError: one failed in the middle.
        """
        assert self._all is not None
        if self.are_stale:
            stage = "handing the weights over"
            with self.clock.busy():
                with weights_are_safe():
                    self.crew.call(stage, "whereabouts")
                try:
                    self._all.call(stage, "hand_over")
                except EngineError as error:  # the trainers wait for that engine, and would not begin to save
                    raise WorkerError(str(error)) from error
            self.are_stale = False

    def rollout(self, prompts: list[Prompt], sampling: Sampling) -> Iterator[Group]:
        """Groups as they finish, without text.

        Raises:
            EngineError: an engine failed, or its process died.
        """
        started = time.perf_counter()
        with self.clock.busy(), weights_are_safe():
            for group in sampled(self.crew, self._dispatch, prompts, sampling):
                self._tokens += sum(len(response.token_ids) for response in group.responses)
                yield group
        self._seconds += time.perf_counter() - started

    def performance(self) -> Metrics:
        """The rate of the rollouts since the last call."""
        tokens, seconds = self._tokens, self._seconds
        self._tokens, self._seconds = 0, 0.0
        return {"perf/tokens_per_s/gen": tokens / seconds} if seconds else {}

    def close(self, timeout: float) -> None:
        if self._all is not None and self._all.failed:
            self._all.close(timeout)
        self.crew.close(timeout)


@contextmanager
def weights_are_safe() -> Iterator[None]:
    """What the processes of engines fail with is of engines alone: the trainers can still save what was learned."""
    try:
        yield
    except WorkerError as error:
        raise EngineError(str(error)) from error


def sampled(crew: Crew, dispatch: Dispatch, prompts: list[Prompt], sampling: Sampling) -> Iterator[Group]:
    """What the crew's engines answer, each prompt being one engine's, without text."""
    shares = dispatch.share_prompts(prompts)

    def arguments(rank: int) -> tuple[Any, ...]:
        own = shares[rank]
        speaks = rank % dispatch.engine_size == 0
        return dispatch.to_sample(rank, own), [prompt.uid for prompt in own], sampling, speaks

    for rank, (number, packed) in crew.stream("sampling", "rollout", arguments):
        yield Group(shares[rank][number], unpack_responses(packed))
