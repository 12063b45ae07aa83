"""Scoring a model on the validation set; the same for training and for `foveal eval`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foveal.cluster.group import Workers
from foveal.config import Config
from foveal.data.loader import PromptLoader
from foveal.data.processing import Processing
from foveal.reward.runner import RewardRunner
from foveal.rollout.collect import generate_and_score, validation_sampling
from foveal.track import console
from foveal.track.metrics import validation_metrics
from foveal.track.sample_files import SampleFiles
from foveal.track.samples import Sample
from foveal.types import Group, Metrics


@dataclass
class Validator:
    """Answers and scores every row of the validation set.

    Args:
        rewards: a runner of its own, so that validation never touches the training function's state.
        files: get every answer.
    """

    config: Config
    loader: PromptLoader
    workers: Workers
    rewards: RewardRunner
    processing: Processing
    files: SampleFiles

    def run(self, step: int, timings: dict[str, float]) -> tuple[Metrics, list[Sample]]:
        """One pass over the set.

        Returns:
            `val/reward_score`, `val/KEY_reward`, `val_response_length/…`, and the first
            `trainer.val_generations_to_log` answers.
        """
        self.rewards.step = step
        sampling = validation_sampling(self.config)
        groups: list[Group] = []
        shown: list[Sample] = []
        counts: Metrics = {}
        part = self.files.part("val", step)
        with console.phase("validation", len(self.loader)) as advance:
            for prompts in self.loader.batches():
                scored, metrics = generate_and_score(prompts, sampling, self.workers, self.rewards, timings, advance)
                for name, value in metrics.items():
                    counts[f"val_{name}"] = counts.get(f"val_{name}", 0.0) + value
                wanted = self.config.trainer.val_generations_to_log - len(shown)
                shown += [self._sample(group, step) for group in scored[: max(0, wanted)]]
                part.add(scored)
                # without the pictures, which all together may not fit into memory
                groups += [Group(replace(g.prompt, media=[], features=None), g.responses) for g in scored]
        part.write()
        return {**counts, **validation_metrics(groups)}, shown

    def _sample(self, group: Group, step: int) -> Sample:
        return Sample.of(group.prompt, group.responses[0], step, self.processing.tokenizer)
