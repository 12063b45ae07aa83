"""Weights & Biases, online or offline."""

from __future__ import annotations

import sys

from foveal.masking import written
from foveal.track.backends.base import SAMPLES_KEY, Backend, RunInfo
from foveal.track.sample_table import sample_table
from foveal.track.samples import Sample
from foveal.types import Metrics


class Wandb(Backend):
    """Weights & Biases; `WANDB_MODE`, `WANDB_DIR` and the like are the SDK's own."""

    package = "wandb"
    cure = "run `wandb login` or set WANDB_API_KEY, or set WANDB_MODE=offline"

    def open(self, run: RunInfo) -> str | None:
        import wandb

        if wandb.setup().settings.mode in ("online", "run") and not _wandb_knows_a_key():
            raise RuntimeError("not logged in")
        sys.argv[1:] = map(written, sys.argv[1:])  # the SDK uploads the command line
        self._run = wandb.init(
            project=run.project,
            name=run.experiment,
            config=run.config,
            id=run.run_id,
            resume="allow" if run.run_id else None,
        )
        # wandb drops steps below its own counter; as an x axis a step that is trained again is kept
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log({"step": step, **metrics})

    def log_samples(self, samples: list[Sample], step: int) -> None:
        import wandb

        columns, rows = sample_table(samples, wandb.Image)
        self._run.log({"step": step, SAMPLES_KEY: wandb.Table(columns=[*columns], data=rows)})

    def close(self) -> None:
        self._run.finish()


def _wandb_knows_a_key() -> bool:
    """Whether wandb can log in without asking: a question on the terminal would wait unseen."""
    import wandb

    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # releases that cannot be told not to ask
        return bool(wandb.api.api_key)
