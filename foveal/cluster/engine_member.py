"""The process of an engine on a device of its own, as Ray starts it; or of a part of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from foveal.cluster.actor import Actor
from foveal.cluster.weight_channel import WeightChannel, take_weights
from foveal.config import Config
from foveal.data.processing import Processing
from foveal.masking import remember
from foveal.rollout.engine import RolloutEngine
from foveal.rollout.vllm_engine import start_engine
from foveal.types import Group, Prompt, Sampling


class EngineMember(Actor):
    """An engine among several; where they are spread over devices, consecutive ranks are one."""

    def start(
        self,
        world: int,
        address: tuple[str, int],
        threads: int,
        timeout: float,
        shared: tuple[Config, Processing, dict[str, Any]],
    ) -> tuple[torch.dtype | None, bool]:
        """Joins the others and builds the engine, whose weights are arbitrary until the first `hand_over`.

        Args:
            shared: as of `Member.start`.

        Returns:
            the engine's `dtype` and `takes_adapters`.
        """
        config, self.processing, options = shared
        remember(config.model_dump())  # for this process's log
        self.join(world, address, threads, timeout)
        self.version = -1
        self.device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        self.engine = start_engine(config, self.processing, device=self.device, images=options["images"])
        return self.engine.dtype, self.engine.takes_adapters

    def connect(self, address: tuple[str, int], ends: int, timeout: float, *_of_the_sender: object) -> None:
        """Takes its end of the channel, of which there are so many, the first being the trainer's."""
        self._channel = WeightChannel(address, 1 + self.rank, ends, self.device, timeout)

    def hand_over(self) -> None:
        """Takes the weights that the trainers send meanwhile."""
        self.version = take_weights(self._channel, self.engine)

    def _sampler(self) -> tuple[RolloutEngine, Processing]:
        return self.engine, self.processing

    def _sample(self, prompts: list[Prompt], sampling: Sampling) -> Iterator[Group]:
        self.engine.submit(prompts, sampling, self.version)
        yield from self.engine.collect()

    def close(self) -> None:
        if hasattr(self, "engine"):  # else it did not start
            self.engine.close()
