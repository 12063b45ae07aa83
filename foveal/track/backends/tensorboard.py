"""TensorBoard's event files."""

from __future__ import annotations

import html
import json
import os
from pathlib import Path

import numpy as np

from foveal.track.backends.base import SAMPLES_KEY, Backend, RunInfo
from foveal.track.sample_table import sample_pictures
from foveal.track.samples import Sample
from foveal.types import Metrics


class TensorBoard(Backend):
    """Event files in `$TENSORBOARD_DIR/PROJECT/EXPERIMENT`, or in the run's folder."""

    package = "tensorboard"
    cure = "set TENSORBOARD_DIR to a folder that can be written"
    illegal = r"[^-/\w.]"

    def open(self, run: RunInfo) -> str | None:
        from torch.utils.tensorboard import SummaryWriter

        root = os.environ.get("TENSORBOARD_DIR")
        folder = Path(root) / run.project / run.experiment if root else run.run_dir / "tensorboard"
        # purge_step hides steps of an earlier process that are about to be trained again
        self._pictures: set[str] = set()
        self._writer = SummaryWriter(str(folder), purge_step=run.resume_step + 1 if run.resume_step else 0)
        if not run.resume_step:
            text = html.escape(json.dumps(run.config, indent=2, ensure_ascii=False), quote=False)
            self._writer.add_text("config", f"<pre>{text}</pre>", 0)
        return None

    def log(self, metrics: Metrics, step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, samples: list[Sample], step: int) -> None:
        text = html.escape("".join(sample.text() for sample in samples), quote=False)
        self._writer.add_text(SAMPLES_KEY, f"<pre>{text}</pre>", step)
        for sample in samples:
            if sample.uid not in self._pictures:  # once, not at every validation
                self._pictures.add(sample.uid)
                for number, picture in enumerate(sample_pictures(sample)):
                    self._writer.add_image(f"val/pictures/{sample.uid}/{number}", np.array(picture), dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
