"""Sampling with the trainer's own transformers module: a batch of prompts, prefilled once, n answers each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from foveal.errors import ConfigError
from foveal.models.positions import prompt_positions
from foveal.rollout.engine import RolloutEngine, check_finite
from foveal.rollout.kv_cache import AnswerCache
from foveal.rollout.sampler import answer_uniforms, sample
from foveal.types import Group, Prompt, Response, Sampling

KNOWN_EXTRA = ("stop_token_ids",)
_CPU_MEMORY = 2 * 2**30
FREE_FRACTION = 0.5
_COMPACT_AT = 0.25  # drop finished rows once they are this share of the batch: a drop copies the cache once


@dataclass(eq=False)
class _Job:
    prompt: Prompt
    sampling: Sampling
    weight_version: int
    aborted: bool = False

    def group(self, answers: list[tuple[np.ndarray, np.ndarray, Any]]) -> Group:
        """The prompt with its answers, each given as token ids, log-probabilities and finish reason."""
        spans = [(0, self.weight_version)]
        return Group(self.prompt, [Response(*answer, weight_spans=list(spans)) for answer in answers])


class TransformersEngine(RolloutEngine):
    """Samples with the very module that the trainer trains, so its weights are never stale.

    Prompts are taken in the order they were submitted, as many at a time as the memory allows (at least one).

    Args:
        model: a transformers model of a supported family (text or VLM), on the device where it runs.
        processing_features: gives what the processor made of a prompt's media (`Processing.features`).
        forbidden_ids: ids that are never sampled.
        eos_ids: ids that end an answer.
        pad_id: fills prompts on the left; must not be a vision placeholder.
        kv_memory_bytes: memory for the cache, the logits and the prefill of the prompts in work. None: half of what is
            free on a CUDA device, 2 GiB elsewhere.
        autocast_dtype: the type of the matrix products, where it is not that of the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        processing_features: Callable[[Prompt], dict[str, torch.Tensor]],
        *,
        forbidden_ids: Sequence[int],
        eos_ids: Sequence[int],
        pad_id: int,
        kv_memory_bytes: int | None = None,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.forward: Callable[..., Any] = model
        self.processing_features = processing_features
        weights = next(model.parameters())
        self.device = weights.device
        self.forbidden_ids = torch.tensor(list(forbidden_ids), dtype=torch.int64, device=self.device)
        self.eos_ids = list(eos_ids)
        self.pad_id = pad_id
        self.kv_memory_bytes = kv_memory_bytes
        self.autocast_dtype = autocast_dtype
        self.cache_dtype = autocast_dtype or weights.dtype
        self.weight_version = 0
        self._open: list[_Job] = []

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, weight_version: int) -> None:
        check_extra(sampling)
        self._open.extend(_Job(prompt, sampling, weight_version) for prompt in prompts)

    def collect(self) -> Iterator[Group]:
        """As `RolloutEngine.collect`. The model is in eval mode until the iteration ends, then as it was.

        Raises:
            ModelError: the model's probabilities are not numbers.
        """
        with _eval_mode(self.model):
            while self._open:
                yield from self._answer(self._next_jobs())

    def abort(self, uids: Collection[str]) -> None:
        for job in self._open:
            job.aborted |= job.prompt.uid in uids

    def update_weights(self, buckets: Iterator[list[tuple[str, torch.Tensor]]], version: int) -> None:
        """Records the version only: the module is the trainer's, so the weights are there already.

        The buckets are not read; gathering them would be work for nothing.
        """
        self.weight_version = version

    def sleep(self) -> None:
        """Nothing to hand back: a cache lives only while its prompts are in work."""

    def wake(self) -> None:
        """Nothing to take: see `sleep`."""

    def _answer(self, jobs: list[_Job]) -> Iterator[Group]:
        batch = _Batch(self, jobs)
        while batch.unfinished:
            # Not held over a yield: the consumer's code must not run without gradients or under autocast.
            with torch.no_grad(), self._autocast():
                finished = batch.advance()
            for job, group in finished:
                self._open.remove(job)
                yield group

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.autocast_dtype) if self.autocast_dtype else nullcontext()

    def _next_jobs(self) -> list[_Job]:
        """The first open jobs that are sampled alike and fit into memory together."""
        memory = self.kv_memory_bytes or _free_memory(self.device)
        jobs: list[_Job] = []
        width = 0
        for job in self._open:
            width = max(width, len(job.prompt.expanded_ids))
            too_much = (len(jobs) + 1) * self._prompt_bytes(width, job.sampling) > memory
            if jobs and (too_much or job.sampling != jobs[0].sampling):
                break
            jobs.append(job)
        return jobs

    def _prompt_bytes(self, width: int, sampling: Sampling) -> int:
        """Memory for one prompt of `width` tokens and its answers: cache, logits, and activations of the prefill."""
        weights = next(self.model.parameters()).element_size()
        config, cache = text_config(self.model), self.cache_dtype.itemsize
        return bytes_of_prompt(config, width, sampling.n, sampling.max_tokens, cache=cache, weights=weights)


def bytes_of_prompt(text: Any, width: int, n: int, longest: int, *, cache: int, weights: int) -> int:
    """Memory for one prompt and its n answers.

    Args:
        text: the configuration of the decoder.
        width: tokens of the prompt, longest: of an answer.
        cache, weights: bytes of a number in the cache and in the weights.
    """
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * head_dim * cache
    answer = token * (width + longest) + 32 * text.vocab_size  # the sampler works in up to float64
    prefill = width * (8 * text.hidden_size + 3 * text.intermediate_size) * weights
    return int(n * answer + prefill)


class _Batch:
    """Some jobs in work: N = jobs × n answers, one token each per step."""

    def __init__(self, engine: TransformersEngine, jobs: list[_Job]) -> None:
        self.engine = engine
        self.jobs = jobs
        self.sampling = jobs[0].sampling
        n, limit = self.sampling.n, self.sampling.max_tokens
        total = len(jobs) * n
        self.stop_ids = [] if self.sampling.ignore_eos else list(engine.eos_ids)
        self.stop_ids += self.sampling.extra.get("stop_token_ids", [])
        self.delivered = np.zeros(len(jobs), bool)
        # By answer, on the host.
        self.tokens = np.zeros((total, limit), np.int64)
        self.logprobs = np.zeros((total, limit), np.float32)
        self.lengths = np.zeros(total, np.int64)
        self.reasons = np.full(total, "length", dtype=object)
        self.alive = np.ones(total, bool)
        # By row of the running batch: finished answers stay in it until enough of them can be dropped at once.
        self.rows = np.arange(total)
        self.step = 0
        # Set by the prefill and by each step.
        self.width: int
        self.filled: torch.Tensor  # (rows, width + limit) bool: where a key may be seen
        self.next_positions: torch.Tensor  # (A, rows, 1)
        self.last_ids: torch.Tensor  # (rows,)
        draws = [
            answer_uniforms(self.sampling.seed, job.prompt.uid, answer, limit) for job in jobs for answer in range(n)
        ]
        self.uniforms = torch.from_numpy(np.stack(draws)).to(engine.device)
        self.cache = AnswerCache(text_config(engine.model).num_hidden_layers, engine.cache_dtype)

    @property
    def unfinished(self) -> bool:
        return not self.delivered.all()

    def advance(self) -> list[tuple[_Job, Group]]:
        """Goes on until at least one job is finished; returns those that are."""
        while True:
            self.engine.check_stop()
            self._drop_aborted()
            if finished := self._finished():
                return finished
            logits = self._prefill() if self.step == 0 else self._decode()
            self._sample(logits)
            if self.engine.on_step is not None:
                self.engine.on_step()

    def _drop_aborted(self) -> None:
        n = self.sampling.n
        for number, job in enumerate(self.jobs):
            if job.aborted:
                answers = slice(number * n, (number + 1) * n)
                self.reasons[answers][self.alive[answers]] = "abort"
                self.alive[answers] = False

    def _finished(self) -> list[tuple[_Job, Group]]:
        n = self.sampling.n
        ready = ~self.alive.reshape(-1, n).any(1) & ~self.delivered
        self.delivered |= ready
        return [
            (self.jobs[number], self.jobs[number].group([self._answer(number * n + k) for k in range(n)]))
            for number in np.flatnonzero(ready).tolist()
        ]

    def _answer(self, answer: int) -> tuple[np.ndarray, np.ndarray, Any]:
        length = self.lengths[answer]
        return self.tokens[answer, :length].copy(), self.logprobs[answer, :length].copy(), self.reasons[answer]

    def _prefill(self) -> torch.Tensor:
        """Runs the prompts once, left-padded, and gives each answer its row. Returns (N, V) logits."""
        engine, n = self.engine, self.sampling.n
        prompts = [job.prompt for job in self.jobs]
        features = [engine.processing_features(prompt) for prompt in prompts]
        places = [
            prompt_positions(engine.model, prompt.expanded_ids, feature)
            for prompt, feature in zip(prompts, features, strict=True)
        ]
        width = max(len(prompt.expanded_ids) for prompt in prompts)
        ids = torch.full((len(prompts), width), engine.pad_id)
        filled = torch.zeros(len(prompts), width + self.sampling.max_tokens, dtype=torch.bool)
        positions = torch.zeros(places[0].shape[0], len(prompts), width + 1, dtype=torch.int64)
        for row, (prompt, place) in enumerate(zip(prompts, places, strict=True)):
            start = width - len(prompt.expanded_ids)
            ids[row, start:] = torch.tensor(prompt.expanded_ids)
            filled[row, start:] = True
            positions[:, row, start:] = place
        self.width = width
        self.filled = filled.to(engine.device)
        positions = positions.to(engine.device)
        logits = self._forward(ids.to(engine.device), positions[:, :, :-1], **_joined(features, engine.device))
        self.cache.expand(n, width + self.sampling.max_tokens)
        self.filled = self.filled.repeat_interleave(n, 0)
        self.next_positions = positions[:, :, -1:].repeat_interleave(n, 1)
        return logits.repeat_interleave(n, 0)

    def _decode(self) -> torch.Tensor:
        """Runs the tokens sampled last. Returns (rows, V) logits."""
        self._compact()
        logits = self._forward(self.last_ids.unsqueeze(1), self.next_positions)
        self.next_positions = self.next_positions + 1
        return logits

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, **features: torch.Tensor) -> torch.Tensor:
        """(rows, Q) ids at (A, rows, Q) positions -> (rows, V) float32 logits after the last of them."""
        output = self.engine.forward(
            input_ids=ids,
            attention_mask=self.filled[:, : self.width + self.step],
            # Explicit positions: the rope deltas that VLMs keep on the module play no part.
            position_ids=positions if len(positions) > 1 else positions[0],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            **features,
        )
        return output.logits[:, -1].float()

    def _sample(self, logits: torch.Tensor) -> None:
        """Draws a token for every row and notes those of the answers that are not finished."""
        sampling = self.sampling
        self.last_ids, drawn_logprobs = sample(
            logits,
            self.uniforms[:, self.step],
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            self.engine.forbidden_ids,
        )
        drawn, logprobs = self.last_ids.cpu().numpy(), drawn_logprobs.cpu().numpy()
        check_finite(logprobs)
        going = self.alive[self.rows]
        answers = self.rows[going]
        self.tokens[answers, self.step] = drawn[going]
        self.logprobs[answers, self.step] = logprobs[going]
        self.step += 1
        self.lengths[answers] = self.step
        stopped = answers[np.isin(drawn[going], self.stop_ids)]
        self.reasons[stopped] = "stop"
        self.alive[stopped] = False
        if self.step == sampling.max_tokens:
            self.alive[:] = False

    def _compact(self) -> None:
        """Drops the rows of finished answers when there are enough of them."""
        going = self.alive[self.rows]
        if (~going).mean() < _COMPACT_AT:
            return
        self.rows = self.rows[going]
        rows = torch.from_numpy(np.flatnonzero(going)).to(self.engine.device)
        self.cache.select(rows)
        self.last_ids = self.last_ids[rows]
        self.uniforms = self.uniforms[rows]
        self.filled = self.filled[rows]
        self.next_positions = self.next_positions[:, rows]


def check_extra(sampling: Sampling) -> None:
    """Raises ConfigError for a key of `sampling.extra` that the transformers engine does not know, or a wrong value."""
    unknown = sorted(set(sampling.extra) - set(KNOWN_EXTRA))
    if unknown:
        raise ConfigError(
            f"Sampling parameter {', '.join(unknown)}: the transformers engine does not know it. It knows n, "
            f"temperature, top_p, top_k, max_tokens, seed, ignore_eos and {', '.join(KNOWN_EXTRA)}. Take it out of "
            "worker.rollout (val_override_config included)."
        )
    stops = sampling.extra.get("stop_token_ids", [])
    if not isinstance(stops, list) or not all(type(stop) is int for stop in stops):
        raise ConfigError(f"Sampling parameter stop_token_ids: {stops!r} given; it must be a list of token ids.")


def text_config(model: nn.Module) -> Any:
    """The configuration of the decoder, which VLMs nest."""
    config: Any = model.config
    return config.get_text_config(decoder=True)


def _joined(features: list[dict[str, torch.Tensor]], device: torch.device) -> dict[str, torch.Tensor]:
    """The media of all prompts, in order, under the names that the model's forward takes.

    Other features (token types, seconds per grid) only serve the positions, which are computed already.
    """
    names = {name for feature in features for name in feature}
    return {
        name: torch.cat([feature[name] for feature in features if name in feature]).to(device)
        for name in sorted(names)
        if name.startswith("pixel_values") or name.endswith("_grid_thw")
    }


def _free_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_MEMORY
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(FREE_FRACTION * (free + unused))


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode for every submodule (dropout off; checkpointed layers keep their cache), then each as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
