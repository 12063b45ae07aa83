"""SwanLab, online or offline."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from foveal.masking import written
from foveal.track.backends.base import SAMPLES_KEY, Backend, RunInfo
from foveal.track.sample_table import sample_pictures
from foveal.track.samples import Sample
from foveal.types import Metrics


class SwanLab(Backend):
    """SwanLab; `SWANLAB_API_KEY` and `SWANLAB_MODE` are the SDK's own, `SWANLAB_DIR` its log folder."""

    package = "swanlab"
    cure = "run `swanlab login` or set SWANLAB_API_KEY, or set SWANLAB_MODE=offline"

    def open(self, run: RunInfo) -> str | None:
        import swanlab

        more: dict[str, Any] = {}
        if run.run_id:
            more |= {"id": run.run_id, "resume": "allow"}
        if folder := os.environ.get("SWANLAB_DIR"):
            more["log_dir"] = folder
        settings: dict[str, Any] = {"interactive": False}  # never a question on the terminal
        if _command_holds_secrets():
            settings["probe"] = {"runtime": False}  # which uploads the command line
        self._run = swanlab.init(
            project=run.project,
            name=run.experiment,
            config=run.config,
            settings=swanlab.Settings(**settings),
            **more,
        )
        return str(self._run.id)

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log(metrics, step=step)

    def log_samples(self, samples: list[Sample], step: int) -> None:
        import swanlab

        texts = [swanlab.Text(sample.text(), caption=sample.uid) for sample in samples]
        pictures = [
            swanlab.Image(picture, caption=sample.uid) for sample in samples for picture in sample_pictures(sample)
        ]
        self._run.log({SAMPLES_KEY: texts} | ({"val/pictures": pictures} if pictures else {}), step=step)

    def close(self) -> None:
        self._run.finish()


def _command_holds_secrets() -> bool:
    try:
        command = Path("/proc/self/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:  # no Linux
        command = " ".join(sys.argv)
    return written(command) != command
