"""MLflow: a server, a database or files."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from foveal.track.backends.base import Backend, RunInfo
from foveal.track.file import dotted
from foveal.track.names import LegalNames
from foveal.track.sample_table import sample_table
from foveal.track.samples import Sample
from foveal.types import Metrics

if TYPE_CHECKING:
    from PIL import Image


class Mlflow(Backend):
    """MLflow; the server is `MLFLOW_TRACKING_URI`, the experiment `MLFLOW_EXPERIMENT_NAME` or the project's name."""

    package = "mlflow-skinny sqlalchemy alembic"
    cure = "set MLFLOW_TRACKING_URI to a server that answers, or to file:FOLDER"
    illegal = r"[^-/\w. ]"
    folders = True

    def open(self, run: RunInfo) -> str | None:
        import mlflow

        uri = mlflow.get_tracking_uri()
        if uri.startswith("file:") or "://" not in uri:
            # the user asked for files; recent releases want to be told twice
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = mlflow.MlflowClient()
        self._pictures: set[str] = set()
        if run.run_id:
            self._client.update_run(run.run_id, status="RUNNING")
            self._run_id = run.run_id
            return self._run_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", run.project)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._run_id = self._client.create_run(experiment_id, run_name=run.experiment).info.run_id
        self._log_config(run.config)
        return self._run_id

    def _log_config(self, config: dict[str, Any]) -> None:
        from mlflow.entities import Param

        # 100 a call and 500 characters are what every server takes
        legal = LegalNames(self.illegal)
        params = (Param(legal(name), str(value)[:500]) for name, value in dotted(config))
        while batch := list(islice(params, 100)):
            self._client.log_batch(self._run_id, params=batch)

    def log(self, metrics: Metrics, step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        entities: Iterator[Metric] = (Metric(name, value, now, step) for name, value in metrics.items())
        while batch := list(islice(entities, 1000)):
            self._client.log_batch(self._run_id, metrics=batch)

    def log_samples(self, samples: list[Sample], step: int) -> None:
        columns, rows = sample_table(samples, self._keep_picture)
        self._client.log_dict(self._run_id, {"columns": columns, "data": rows}, f"generations/step_{step}.json")

    def _keep_picture(self, picture: Image.Image) -> str:
        """Uploads a picture unless it is there; returns the artifact's name."""
        name = f"generations/pictures/{hashlib.sha256(picture.tobytes()).hexdigest()[:16]}.png"
        if name not in self._pictures:
            self._client.log_image(self._run_id, picture, name)
            self._pictures.add(name)
        return name

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
