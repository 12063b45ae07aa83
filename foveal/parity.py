"""`foveal check --parity`: do engine and trainer give the same tokens the same log-probabilities?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from foveal.cluster.worker import Worker
from foveal.config import Config
from foveal.data.loader import open_loader
from foveal.models.lora import has_lora, lora_layers
from foveal.preflight import check_runnable, open_processing
from foveal.rollout.collect import training_sampling
from foveal.rollout.engine import choose_engine
from foveal.track import console
from foveal.train.scoring import write_logprobs
from foveal.types import Group, Prompt, Response, Sampling

LARGEST_FLOAT32 = 1e-4
"""Bound on the largest difference where engine and trainer compute in float32."""
MEAN_ROUNDED = 0.05
"""Bound on the mean difference where one of them computes in a shorter type; bf16 on an H200 gives 0.02 to 0.03."""
GROWTH = 1.5
"""How much of that difference new weights may make: what is stale makes far more."""
NOISE = 0.05
"""Size of the change to a weight, as a part of it: little for the model, and far more than bf16 rounds away."""
NOISE_FLOOR = 1e-3
"""Weights below this are changed as if they were of this size, so that zero biases change too."""
COLUMN = "trainer_logprobs"


def check_parity(config: Config, rows: int) -> int:
    """Samples answers to the first training prompts, scores them with the trainer too, and prints the differences.

    Then it does the same once more after changing every weight a little, or the adapters where there are some, and
    handing the weights over, which shows what is stale. Nothing is trained or written.

    Args:
        rows: how many prompts to take, at most; `worker.rollout.n` answers each.

    Returns:
        the exit status: 0; 1 where a difference is beyond its bound.

    Raises:
        FovealError: anything the user can cure.
    """
    config.trainer.nnodes = config.trainer.n_gpus_per_node = config.worker.actor.ulysses_size = 1  # all in this process
    config.cluster.rollout_devices = 0
    check_runnable(config, scored=False)
    processing = open_processing(config)
    loader = open_loader(config, processing, "train")
    prompts = loader.take(min(rows, len(loader)))
    sampling = _full_sampling(config)
    worker = Worker(config, processing, train=False, images=loader.most_images)
    assert worker.engine is not None
    with closing(worker):
        trainer_dtype = worker.scorer.autocast or next(worker.model.parameters()).dtype
        dtypes = {"engine": worker.engine.dtype or trainer_dtype, "trainer": trainer_dtype}
        pictures = sum(bool(prompt.media) for prompt in prompts)
        console.note(
            f"parity of {choose_engine(config)} engine and trainer: {len(prompts)} prompts ({pictures} with pictures), "
            f"{sampling.n} answers each, temperature {sampling.temperature:g}, "
            + ", ".join(f"{side} in {_name(dtype)}" for side, dtype in dtypes.items())
        )
        groups = _answer(worker, prompts, sampling)
        first = Gap.of(groups)
        _report("as loaded", first, processing.tokenizer)
        change_weights(worker.model)
        worker.forget_step()
        worker.weight_version += 1
        updated = _answer(worker, prompts, sampling)
        second = Gap.of(updated)
        changed = "a change of the adapters" if has_lora(worker.model) else "a weight update"
        _report(f"after {changed}", second, processing.tokenizer)
        console.note(f"  an engine with the old weights would be off by {_moved(worker, groups):.2g} in the mean")
    return _judge(first, second, set(dtypes.values()) == {torch.float32})


@dataclass(frozen=True)
class Token:
    """One sampled token: where it stands (counted from 0), and what engine and trainer give it."""

    prompt: Prompt
    answer: int
    position: int
    response: Response

    def describe(self, tokenizer: Any) -> str:
        token = int(self.response.token_ids[self.position])
        prompt = self.prompt
        return (
            f"prompt {prompt.uid} (row {prompt.row_index}, pictures: {len(prompt.media)}), "
            f"answer {self.answer}, token {self.position} of {len(self.response.token_ids)}, "
            f"{tokenizer.decode([token])!r} (id {token}): engine {self.response.logprobs[self.position]:.6f}, "
            f"trainer {self.response.columns[COLUMN][self.position]:.6f}"
        )


@dataclass(frozen=True)
class Gap:
    """How far the engine's log-probabilities lie from the trainer's.

    Attributes:
        mean, largest: of the absolute differences of all tokens; NaN where one is.
        tokens: how many there are.
        worst: the token with the largest.
        of_pictures, of_texts: the largest in prompts with pictures, and in those without; None without such prompts.
    """

    mean: float
    largest: float
    tokens: int
    worst: Token
    of_pictures: float | None
    of_texts: float | None

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Gap:
        """Args: groups whose responses have the column `trainer_logprobs`."""
        tokens, differences = [], []
        for group in groups:
            for answer, response in enumerate(group.responses):
                difference = np.abs(response.logprobs - response.columns[COLUMN])
                differences.append(difference)
                tokens.append(Token(group.prompt, answer, int(difference.argmax()), response))
        largest = [float(difference.max()) for difference in differences]
        worst = int(np.argmax(largest))  # NaN counts as the largest
        everything = np.concatenate(differences)
        by_kind = {
            kind: max((d for d, t in zip(largest, tokens, strict=True) if bool(t.prompt.media) == kind), default=None)
            for kind in (True, False)
        }
        return cls(
            float(everything.mean()), largest[worst], len(everything), tokens[worst], by_kind[True], by_kind[False]
        )


@torch.no_grad()
def change_weights(model: nn.Module) -> None:
    """Adds seeded noise to every weight, vision tower included: normal, `NOISE` times the weight's own size.

    Where the model has adapters they alone are changed, by as much.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    adapted = lora_layers(model).values()
    for layer in adapted:
        noise = torch.randn(layer.lora_B.shape, generator=generator, device=layer.lora_B.device)
        size = layer.weight.float().norm() / (layer.scaling * noise @ layer.lora_A).norm()
        layer.lora_B.add_(noise * (NOISE * size))
    for weight in () if adapted else model.parameters():
        noise = torch.randn(weight.shape, generator=generator, device=weight.device, dtype=weight.dtype)
        weight.addcmul_(noise, weight.abs().clamp_(min=NOISE_FLOOR), value=NOISE)


def _full_sampling(config: Config) -> Sampling:
    """As in training, but never cut: the trainer's log-probabilities are those of the full distribution."""
    sampling = training_sampling(config)
    if not sampling.full_distribution:
        console.note(
            f"sampling with top_p=1 and top_k=-1 instead of worker.rollout.top_p={sampling.top_p:g} and "
            f"top_k={sampling.top_k}: the two sides are compared over the full distribution, at the same temperature"
        )
    return replace(sampling, top_p=1.0, top_k=-1)


def _answer(worker: Worker, prompts: list[Prompt], sampling: Sampling) -> list[Group]:
    """Groups in the order of the prompts, scored by engine and trainer; the engine sleeps afterwards."""
    groups = {group.prompt.uid: group for group in worker.rollout(prompts, sampling)}
    worker.rest_engine()
    ordered = [groups[prompt.uid] for prompt in prompts]
    write_logprobs(worker.scorer, worker.experience_packer, ordered, COLUMN)
    return ordered


def _moved(worker: Worker, groups: Sequence[Group]) -> float:
    """Mean change of the trainer's log-probabilities of these answers since they were scored."""
    write_logprobs(worker.scorer, worker.experience_packer, groups, "moved")
    changes = [np.abs(r.columns["moved"] - r.columns[COLUMN]) for group in groups for r in group.responses]
    return float(np.concatenate(changes).mean())


def _report(when: str, gap: Gap, tokenizer: Any) -> None:
    console.note(f"{when}: mean {gap.mean:.2g}, max {gap.largest:.2g} over {gap.tokens} tokens")
    console.note(f"  worst: {gap.worst.describe(tokenizer)}")


def _judge(first: Gap, second: Gap, exact: bool) -> int:
    """Prints what the two gaps mean; returns the exit status."""
    # Written so that NaN, which is in no order with anything, is beyond every bound.
    if exact:
        bound = f"max ≤ {LARGEST_FLOAT32:g} in float32"
        good = [gap.largest <= LARGEST_FLOAT32 for gap in (first, second)]
    else:
        bound = f"mean ≤ {MEAN_ROUNDED:g} where bf16 or fp16 rounds, and hardly more after the change"
        good = [first.mean <= MEAN_ROUNDED, second.mean <= max(GROWTH * first.mean, MEAN_ROUNDED / 5)]
    if all(good):
        console.note(f"engine and trainer agree ({bound}).")
        return 0
    console.error(
        f"engine and trainer disagree (bound: {bound}). {_after_update() if good[0] else _at_once(first, exact)}"
    )
    return 1


def _at_once(gap: Gap, exact: bool) -> str:
    kinds = ""
    if gap.of_pictures is not None and gap.of_texts is not None:
        kinds = f" Largest difference in prompts with pictures: {gap.of_pictures:.2g}, without: {gap.of_texts:.2g}."
    rounding = "" if exact else " Rounding is ruled out where it stays with worker.rollout.dtype=fp32."
    return (
        "Both are given the same token ids and pixel values, so neither the chat template nor data.min_pixels and "
        f"max_pixels can be the cause: the two make something else of them.{kinds}{rounding} Try another version of "
        "vLLM; worker.rollout.name=transformers samples with the trainer's own module."
    )


def _after_update() -> str:
    return (
        "They agreed before the update, so the engine uses something stale: weights that it did not take over, or "
        "keys, values or picture features that the former weights computed. Training with it would be off-policy. Set "
        "worker.rollout.name=transformers, and report this with the versions of vLLM and transformers."
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
