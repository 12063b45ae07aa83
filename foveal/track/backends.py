"""The outside trackers, each through its own SDK. Nothing here guards against failures: `external` does.

An SDK is imported when its tracker starts. Every tracker goes on with the run it had when training is resumed.
"""

from __future__ import annotations

import html
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from foveal.track.names import LegalNames
from foveal.track.samples import Sample
from foveal.types import Metrics

SAMPLES_KEY = "val/generations"
_CONTROL = r"[\x00-\x1f\x7f]"


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told about the run.

    Attributes:
        config: the whole configuration as plain values.
        resume_step: steps that are already done; 0 for a new run.
        run_id: the tracker's own name for the run that is resumed; None for a new one.
    """

    project: str
    experiment: str
    config: dict[str, Any]
    run_dir: Path
    resume_step: int
    run_id: str | None


class Backend(ABC):
    """One tracker. All calls come from one thread, which need not be the main one.

    Attributes:
        package: what to install.
        cure: what else to set, for the warning when the tracker does not start.
        illegal: regular expression of the characters that metric names must not have.
        folders: whether a metric `a` and a metric `a/b` exclude each other.
    """

    package: ClassVar[str]
    cure: ClassVar[str]
    illegal: ClassVar[str] = _CONTROL
    folders: ClassVar[bool] = False

    @abstractmethod
    def open(self, run: RunInfo) -> str | None:
        """Starts or resumes the tracker's run.

        Returns:
            the id by which to resume it; None if the tracker needs none.
        """

    @abstractmethod
    def log(self, metrics: Metrics, step: int) -> None:
        """Logs finite numbers under legal names."""

    @abstractmethod
    def log_samples(self, samples: list[Sample], step: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


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
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb(Backend):
    """Weights & Biases; `WANDB_MODE`, `WANDB_DIR` and the like are the SDK's own."""

    package = "wandb"
    cure = "run `wandb login` or set WANDB_API_KEY, or set WANDB_MODE=offline"

    def open(self, run: RunInfo) -> str | None:
        import wandb

        if wandb.setup().settings.mode in ("online", "run") and not _wandb_knows_a_key():
            raise RuntimeError("not logged in")
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

        table = wandb.Table(columns=["step", "uid", "prompt", "images", "response", "answer", "score", "rewards"])
        for sample in samples:
            images = ", ".join(sample.images)
            row = [step, sample.uid, sample.prompt, images, sample.response, sample.answer]
            table.add_data(*row, sample.score, sample.scores_text)
        self._run.log({"step": step, SAMPLES_KEY: table})

    def close(self) -> None:
        self._run.finish()


def _wandb_knows_a_key() -> bool:
    """Whether wandb can log in without asking: a question on the terminal would wait unseen."""
    import wandb

    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # releases that cannot be told not to ask
        return bool(wandb.api.api_key)


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
        self._run = swanlab.init(
            project=run.project,
            name=run.experiment,
            config=run.config,
            settings=swanlab.Settings(interactive=False),  # never a question on the terminal
            **more,
        )
        return str(self._run.id)

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log(metrics, step=step)

    def log_samples(self, samples: list[Sample], step: int) -> None:
        import swanlab

        texts = [swanlab.Text(sample.text(), caption=sample.uid) for sample in samples]
        self._run.log({SAMPLES_KEY: texts}, step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow(Backend):
    """MLflow; the server is `MLFLOW_TRACKING_URI`, the experiment `MLFLOW_EXPERIMENT_NAME` or the project's name."""

    package = "mlflow-skinny"
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
        params = (Param(legal(name), str(value)[:500]) for name, value in _dotted(config))
        while batch := list(islice(params, 100)):
            self._client.log_batch(self._run_id, params=batch)

    def log(self, metrics: Metrics, step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        entities: Iterator[Metric] = (Metric(name, value, now, step) for name, value in metrics.items())
        while batch := list(islice(entities, 1000)):
            self._client.log_batch(self._run_id, metrics=batch)

    def log_samples(self, samples: list[Sample], step: int) -> None:
        rows = [vars(sample) for sample in samples]
        self._client.log_dict(self._run_id, {"samples": rows}, f"generations/step_{step}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _dotted(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for every value of nested mappings."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


BACKENDS: dict[str, type[Backend]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "swanlab": SwanLab,
    "mlflow": Mlflow,
}
