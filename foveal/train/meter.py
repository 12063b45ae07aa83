"""How fast the phases of a step are, and how much memory they take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from foveal.models.flops import FlopCounter, Work, peak_flops, visible_pairs
from foveal.models.grids import Grid
from foveal.models.lora import computes_as_at_start, without_adapter
from foveal.models.positions import decoder_of
from foveal.models.vision import vision_tower
from foveal.train.profile import Profile
from foveal.train.scorer import StartScorer
from foveal.types import Group, Metrics, Prompt

_GIB = 1024**3
_MFU_NAMES = {"update_actor": "actor", "update_critic": "critic"}
"""EasyR1 writes `perf/mfu_actor`; other phases keep the name they are timed under."""


@dataclass
class _Phase:
    """What one phase did, on this device. Peers are trainers that lay out one sequence per sample."""

    tokens: int = 0
    flops: float = 0.0
    peer_tokens: int = 0
    peer_flops: float = 0.0
    peak_bytes: int = 0


class Meter:
    """Counts the work of a device, phase by phase, and tells what rate that makes.

    Args:
        device: whose memory and peak rate count.
        grids: the sizes of a prompt's pictures and videos.
        absent: bytes that torch counts as taken at the moment, though they are not on the device.

    Attributes:
        profile: of the step, where it is to be recorded.
    """

    def __init__(
        self,
        device: torch.device,
        grids: Callable[[Prompt], Iterable[Grid]],
        absent: Callable[[], int] = lambda: 0,
    ) -> None:
        self._device = device
        self._grids = grids
        self.absent = absent
        self._peak_rate = peak_flops(device)
        self._counters: dict[nn.Module, FlopCounter] = {}
        self._starts: dict[nn.Module, FlopCounter] = {}  # by model, without its adapters
        self._phases: dict[str, _Phase] = {}
        self._open: _Phase | None = None
        self._allocated = self._reserved = 0
        self.profile: Profile | None = None

    def watch(self, scorer: nn.Module) -> None:
        """Counts whatever runs through a scorer (or a critic's) and its model from now on, while a phase is open.

        Counted where the work is done, so that features of pictures that are kept from another pass, or a second
        reading of the reference, count as they are.
        """
        model: Any = scorer.model
        if isinstance(scorer, StartScorer):  # its work is done by the policy's scorer, which is watched
            with without_adapter(model):
                self._counters[scorer] = FlopCounter(model)
            self._starts[model] = self._counters[scorer]
            return
        own = self._counters[scorer] = FlopCounter(model)
        tower = vision_tower(model)

        def count(work: Work) -> None:
            if self._open is not None:
                at_start = model in self._starts and computes_as_at_start(model)
                counter = self._starts[model] if at_start else own
                self._open.tokens += work.tokens
                self._open.flops += counter.training(work) if torch.is_grad_enabled() else counter.forward(work)

        def decode(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            segments = options.get("segments")
            if segments is not None:
                count(Work(sum(segments.lengths), visible_pairs(segments)))

        def look(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            if self._open is not None:  # an engine that samples with the model has grids on the device
                count(Work(grids=tuple((t, h, w) for t, h, w in options["grid_thw"].tolist())))

        def score(_: nn.Module, args: tuple[Any, ...]) -> None:
            if self.profile is not None:
                self.profile.tick()
            count(Work(scored=len(args[0].targets)))

        scorer.register_forward_pre_hook(score)
        decoder_of(model).register_forward_pre_hook(decode, with_kwargs=True)
        if tower is not None:
            tower.register_forward_pre_hook(look, with_kwargs=True)

    def counter(self, scorer: nn.Module) -> FlopCounter:
        """Of a watched scorer's model."""
        return self._counters[scorer]

    @contextmanager
    def phase(self, name: str, scorer: nn.Module, groups: Sequence[Group], *, passes: int = 1) -> Iterator[None]:
        """A pass of a watched scorer over all trained responses of some groups.

        Args:
            name: under which the trainer times it: "old", "ref", "values", "update_critic" or "update_actor".
            passes: times that the groups are gone through. An update, which a peer does forward and backward, is one
                whose name says so.
        """
        phase = self._phases.setdefault(name, _Phase())
        peers = sum((peer_work(group, tuple(self._grids(group.prompt))) for group in groups), Work())
        counter = self._counters[scorer]
        once = counter.training(peers) if name.startswith("update") else counter.forward(peers)
        phase.peer_tokens += peers.tokens * passes
        phase.peer_flops += once * passes
        self._open = phase
        try:
            with self._memory(phase), self._profiled(name):
                yield
        finally:
            self._open = None

    @contextmanager
    def generation(self) -> Iterator[Callable[[Group], None]]:
        """Sampling; call what it gives with each group that was answered."""
        phase = self._phases.setdefault("gen", _Phase())

        def count(group: Group) -> None:
            phase.tokens += sum(len(response.token_ids) for response in group.responses)

        with self._memory(phase), self._profiled("gen"):
            yield count

    def _profiled(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.profile is None else self.profile.phase(name)

    def metrics(self, timings: dict[str, float]) -> Metrics:
        """The rates of what was done since the last call, and forgets it.

        Args:
            timings: seconds of each phase.

        Returns:
            for each phase that was timed, per second of it on this device: `perf/tokens_per_s/PHASE`, tokens that were
            laid out (of answers for `gen`); `perf/peer_tokens_per_s/PHASE`, tokens of the same responses with one
            sequence per sample; where the device's peak rate is known `perf/mfu_NAME`, the share of it that was used,
            and `perf/effective_mfu_NAME`, the same with the peers' work in the numerator. NAME is `actor` and `critic`
            for the updates. On CUDA `perf/peak_memory_gb/PHASE` in GiB, and over the whole run
            `perf/max_memory_{allocated,reserved}_gb`.
        """
        metrics: Metrics = {}
        for name, phase in self._phases.items():
            seconds = timings.get(name, 0.0)
            if seconds > 0:
                metrics |= self._rates(name, phase, seconds)
            if phase.peak_bytes:
                metrics[f"perf/peak_memory_gb/{name}"] = phase.peak_bytes / _GIB
        if self._allocated:
            metrics["perf/max_memory_allocated_gb"] = self._allocated / _GIB
            metrics["perf/max_memory_reserved_gb"] = self._reserved / _GIB
        self._phases = {}
        return metrics

    def _rates(self, name: str, phase: _Phase, seconds: float) -> Metrics:
        metrics: Metrics = {f"perf/tokens_per_s/{name}": phase.tokens / seconds}
        if phase.peer_tokens:
            metrics[f"perf/peer_tokens_per_s/{name}"] = phase.peer_tokens / seconds
        if phase.peer_flops and self._peak_rate:
            short = _MFU_NAMES.get(name, name)
            metrics[f"perf/mfu_{short}"] = phase.flops / seconds / self._peak_rate
            metrics[f"perf/effective_mfu_{short}"] = phase.peer_flops / seconds / self._peak_rate
        return metrics

    @contextmanager
    def _memory(self, phase: _Phase) -> Iterator[None]:
        if self._device.type != "cuda":
            yield
            return
        self._note_peaks()  # of what ran outside phases, for the run's own
        try:
            yield
        finally:
            phase.peak_bytes = max(phase.peak_bytes, self._note_peaks())

    def _note_peaks(self) -> int:
        """The highest memory since the last call, which the run's own learns of."""
        absent = self.absent()
        allocated = torch.cuda.max_memory_allocated(self._device) - absent
        self._allocated = max(self._allocated, allocated)
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device) - absent)
        torch.cuda.reset_peak_memory_stats(self._device)  # now, since what is absent changes between phases
        return allocated


def peer_work(group: Group, grids: tuple[Grid, ...]) -> Work:
    """What a trainer with one sequence per sample feeds its model for a group: what ours does without a shared prefix.

    Args:
        grids: of the prompt's pictures and videos.
    """
    prompt = len(group.prompt.expanded_ids)
    work = Work()
    for response in group.trained:
        answer = len(response.token_ids)
        if answer:
            fed = prompt + answer - 1  # the last token predicts nothing
            work += Work(fed, fed * (fed + 1) // 2, answer, grids)
    return work


def combined(found: Sequence[Metrics], *, team_size: int, engine_size: int) -> Metrics:
    """The metrics of workers as one: rates added up, shares of the device's peak averaged, the highest memory.

    Args:
        team_size, engine_size: workers that share each sequence in a pass, or an engine, and count the same work.
    """
    metrics: Metrics = {}
    for name in sorted({name for own in found for name in own}):
        size = engine_size if name.endswith("/gen") else team_size
        values = [own.get(name, 0.0) for own in found]
        if "memory" in name:
            metrics[name] = max(values)
        else:
            total = sum(values) / size
            metrics[name] = total / len(found) if "mfu_" in name else total
    return metrics
