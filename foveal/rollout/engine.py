"""The interface of a rollout engine: prompts in, groups of sampled answers out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from foveal.config import Config
from foveal.errors import ConfigError, EngineError, ModelError
from foveal.rollout.vllm_available import vllm_obstacle, vllm_version
from foveal.types import Group, Prompt, Sampling

STOPPED = "sampling was asked to stop"


def check_finite(logprobs: np.ndarray) -> None:
    """Raises ModelError where a sampled token's log-probability is not a number."""
    if not np.isfinite(logprobs).all():
        raise ModelError(
            "The model's next-token probabilities are not finite: its weights or activations hold NaN or infinity. "
            "Check the loaded weights, the learning rate, and the dtype (fp16 overflows where bf16 does not)."
        )


class RolloutEngine(ABC):
    """Samples answers to prompts with the policy's weights.

    What holds for every engine:

    - An answer never holds a vision placeholder id. Their probability is zero, so that features and placeholders of a
      prompt with its answer still match when the policy trains on it.
    - `Response.logprobs` are those of the distribution sampled from: at the sampling temperature, with forbidden ids
      masked out (and cut by top_k and top_p where they are set). Greedy answers (temperature 0) have those of the
      masked distribution at temperature 1.
    - An end token that the model wrote is part of `Response.token_ids` (finish_reason "stop").
    - `Response.text` stays empty and `Response.rewards` too: decoding and scoring are not the engine's.
    - The same (seed, uid, number of the answer) under the same weights gives the same answer, up to rounding.
    """

    dtype: torch.dtype | None = None
    """The type that it keeps weights in; None: it has none of its own."""
    takes_adapters: bool = False
    """Whether it applies a low-rank adapter itself: it then gets the base weights, and the adapter beside them."""

    asleep_bytes: int = 0
    """What torch counts as the engine's on the device, though nothing is there while it sleeps."""

    stop_asked: Callable[[], bool] = staticmethod(lambda: False)
    """Looked at between tokens: true ends `collect` with an EngineError, and leaves answers open."""

    on_step: Callable[[], None] | None = None
    """Called after each step of the engine, for a profile that records only some of them."""

    @abstractmethod
    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, weight_version: int) -> None:
        """Queues `sampling.n` answers to each prompt. Returns at once.

        Args:
            weight_version: what the answers' `weight_spans` say wrote them.

        Raises:
            ConfigError: `sampling.extra` holds a parameter that this engine does not know.
        """

    @abstractmethod
    def collect(self) -> Iterator[Group]:
        """Yields a group for everything submitted, as its last answer finishes; ends when nothing is left.

        The order is that of finishing. While iterating, the consumer may call `submit` and `abort`. A consumer may
        also stop early: what was not yielded is still open, and a later `collect` yields it.
        """

    @abstractmethod
    def abort(self, uids: Collection[str]) -> None:
        """Gives up the unfinished answers of these prompts.

        Their groups are still yielded, soon: finished answers as they are, the others as far as they came, with
        finish_reason "abort". Uids that are not open are ignored.
        """

    @abstractmethod
    def update_weights(self, buckets: Iterator[list[tuple[str, torch.Tensor]]], version: int) -> None:
        """Takes over new weights before the next `submit`.

        Args:
            buckets: full tensors under the names and layouts that `save_pretrained` writes, some at a time.
            version: the number of these weights.
        """

    def update_adapter(self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], version: int) -> None:
        """Takes over a new adapter before the next `submit`, after the base weights; where `takes_adapters` is true.

        Args:
            tensors: full, under the names that peft writes into adapter_model.safetensors.
            config: what peft writes into adapter_config.json.
            version: the number of these weights.
        """
        raise NotImplementedError(f"{type(self).__name__} applies no adapters")

    @abstractmethod
    def sleep(self) -> None:
        """Hands back the device memory that the engine holds, so that training can use it."""

    @abstractmethod
    def wake(self) -> None:
        """Takes the memory again after `sleep`. Weights must be updated before the next `submit`."""

    def check_stop(self) -> None:
        if self.stop_asked():
            raise EngineError(STOPPED)

    def close(self) -> None:  # noqa: B027 (not every engine holds something)
        """Ends the engine."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, weight_version: int) -> list[Group]:
        """Submits prompts of distinct uids and returns their groups in order. Nothing else may be open."""
        self.submit(prompts, sampling, weight_version)
        groups = {group.prompt.uid: group for group in self.collect()}
        return [groups[prompt.uid] for prompt in prompts]


def choose_engine(config: Config, say: Callable[[str], None] | None = None) -> Literal["vllm", "transformers"]:
    """Resolves `worker.rollout.name`. Cheap, and the same whenever it is asked on a machine.

    Args:
        say: gets the one line that tells what "auto" chose, and why.

    Raises:
        ConfigError: vLLM was asked for and cannot run here.
        ModelError: there is no config.json to look at.
    """
    name = config.worker.rollout.name
    if name == "transformers":
        return name
    model_path = config.worker.actor.model.model_path
    assert model_path is not None
    obstacle = vllm_obstacle(model_path)
    if name == "vllm":
        if obstacle is not None:
            raise ConfigError(
                f"worker.rollout.name=vllm: {obstacle}. Or set worker.rollout.name=transformers, or auto, which takes "
                "vLLM where it can run."
            )
        return name
    if say is not None:
        say(
            f"rollout engine: vLLM {vllm_version()} (worker.rollout.name=auto)"
            if obstacle is None
            else f"rollout engine: transformers (worker.rollout.name=auto; {obstacle})"
        )
    return "vllm" if obstacle is None else "transformers"
