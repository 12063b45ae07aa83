"""Trackio, which keeps runs in local files and has a page of its own (`trackio show`)."""

from __future__ import annotations

from foveal.track.backends.base import SAMPLES_KEY, Backend, RunInfo
from foveal.track.sample_table import sample_table
from foveal.track.samples import Sample
from foveal.types import Metrics


class Trackio(Backend):
    """Trackio; `TRACKIO_DIR`, `TRACKIO_SPACE_ID`, `TRACKIO_SERVER_URL` and the like are the SDK's own."""

    package = "trackio"
    cure = "set TRACKIO_DIR to a folder that can be written; for a Space, log in with `hf auth login`"

    def open(self, run: RunInfo) -> str | None:
        import trackio

        self._run = trackio.init(
            project=run.project,
            name=run.run_id or run.experiment,
            config=run.config,
            resume="allow" if run.run_id else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return str(self._run.name)

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, samples: list[Sample], step: int) -> None:
        import trackio

        columns, rows = sample_table(samples, trackio.Image)
        self._run.log({SAMPLES_KEY: trackio.Table(columns=columns, data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()
