"""Where a run's metrics and sample answers go: the run's own files always, outside trackers as configured."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path

from foveal.config import Config
from foveal.masking import masked
from foveal.track.backends import BACKENDS, RunInfo
from foveal.track.console import note, warn
from foveal.track.external import Background, close_all
from foveal.track.file import RunFiles
from foveal.track.samples import Sample
from foveal.types import Metrics


class Trackers:
    """Hands metrics and samples to every tracker of the run.

    The files are written whether or not `trainer.logger` names them: the curve and the viewer read them.

    Args:
        config: the whole configuration; `trainer.logger` names the trackers.
        run_dir: the run's folder.
        resume_step: steps that were done before this process; trackers then go on with the run they had.
        run_ids: of the trackers' runs, by tracker, where the run's folder doesn't tell them.

    Attributes:
        log_file: `experiment_log.jsonl` of the run.

    Raises:
        ConfigError: the folder cannot be written to. Outside trackers only ever warn.
    """

    def __init__(
        self, config: Config, run_dir: Path, resume_step: int = 0, run_ids: dict[str, str] | None = None
    ) -> None:
        values = masked(config.model_dump(mode="json"))
        self._files = RunFiles(run_dir, values)
        self.log_file = self._files.log_file
        self._ids = _RunIds(run_dir / "trackers.json", resume_step, run_ids)
        self._external = []
        for name in dict.fromkeys(config.trainer.logger):
            if name not in BACKENDS:
                continue  # console and file are always on
            run = RunInfo(
                project=config.trainer.project_name,
                experiment=config.trainer.experiment_name,
                config=values,
                run_dir=run_dir,
                resume_step=resume_step,
                run_id=self._ids.get(name),
            )
            self._external.append(Background(name, BACKENDS[name](), run, partial(self._ids.keep, name)))
        self._file_failed = False
        note(f"metrics and sample answers: {run_dir}/{self.log_file.name}, {run_dir}/generations.log")
        note(f"in the browser: foveal view {run_dir}")

    @property
    def run_ids(self) -> dict[str, str]:
        """The ids that trackers have given the run so far."""
        return self._ids.all()

    def log(self, metrics: Metrics, step: int) -> None:
        """Logs metrics; may be called several times for a step."""
        try:
            self._files.log(metrics, step)
        except OSError as error:
            self._warn_of_file(error)
        for tracker in self._external:
            tracker.log(metrics, step)

    def log_samples(self, samples: list[Sample], step: int) -> None:
        """Logs sample answers, as `val/generations` where a tracker has tables or texts."""
        if not samples:
            return
        try:
            self._files.log_samples(samples)
        except OSError as error:
            self._warn_of_file(error)
        for tracker in self._external:
            tracker.log_samples(samples, step)

    def close(self) -> None:
        """Writes out what is waiting; outside trackers get ten seconds at most."""
        try:
            self._files.close()
        except OSError as error:
            self._warn_of_file(error)
        close_all(self._external)

    def _warn_of_file(self, error: OSError) -> None:
        if not self._file_failed:
            self._file_failed = True
            warn(f"cannot write {self.log_file} ({error}); the run goes on, its log will have gaps.")


class _RunIds:
    """The ids that trackers gave the run, kept in `trackers.json` so that a resumed run is not a second one there."""

    def __init__(self, path: Path, resume_step: int, otherwise: dict[str, str] | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._ids = dict(otherwise or {})
        if resume_step and path.exists():
            try:
                self._ids |= json.loads(path.read_text(encoding="utf-8")).items()
            except (OSError, ValueError, AttributeError):
                warn(f"{path} is damaged: trackers start a new run instead of going on with the old one.")

    def get(self, name: str) -> str | None:
        return self._ids.get(name)

    def all(self) -> dict[str, str]:
        with self._lock:
            return dict(self._ids)

    def keep(self, name: str, run_id: str) -> None:
        with self._lock:
            self._ids[name] = run_id
            try:
                self._path.write_text(json.dumps(self._ids, indent=2) + "\n", encoding="utf-8")
            except OSError as error:
                warn(f"cannot write {self._path} ({error}): when resumed, {name} will start a second run.")
