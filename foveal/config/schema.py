"""The whole configuration: section `trainer`, and `Config`, which holds all sections."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from foveal.config.schema_data import AlgorithmConfig, DataConfig
from foveal.config.schema_worker import WorkerConfig
from foveal.config.sections import Int, NotNegative, Positive, PositiveOrOff, Section, UserPath

TrackerName = Literal["console", "file", "wandb", "swanlab", "mlflow", "tensorboard", "trackio"]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class TrainerConfig(Section):
    """Length of the run, devices, validation, saving and logging."""

    total_epochs: Positive = Field(default=15, description="Times that the data is gone through.")
    max_steps: Positive | None = Field(
        default=None, description="Steps of the run; replaces `total_epochs`, and the data goes round again as needed."
    )
    project_name: str = Field(
        default="easy_r1", min_length=1, description="Name of the project in trackers and folders."
    )
    experiment_name: str = Field(default="demo", min_length=1, description="Name of the run in trackers and folders.")
    logger: Annotated[list[TrackerName], BeforeValidator(_as_list)] = Field(
        default=["console", "wandb"], description="Where metrics go. A tracker that is missing is one warning line."
    )
    nnodes: Positive = Field(default=1, description="Machines.")
    n_gpus_per_node: PositiveOrOff = Field(
        default=-1,
        description="Devices per machine; -1 means every GPU that is there, or one worker without any. Without "
        "accelerators, worker processes per machine.",
    )
    max_try_make_batch: PositiveOrOff = Field(
        default=20,
        description="Generation calls after which `algorithm.online_filtering` trains on what it has kept, and ends "
        "the run where that is nothing; -1 means no limit.",
    )
    critic_warmup: NotNegative = Field(default=0, description="First steps in which only the critic is trained.")
    val_freq: PositiveOrOff = Field(
        default=-1, description="Validate every so many steps and after the last; -1 means not in between."
    )
    val_before_train: bool = Field(default=True, description="Validate before the first step, and after the last.")
    val_only: bool = Field(default=False, description="Validate and stop.")
    val_generations_to_log: NotNegative = Field(
        default=0, description="Validation samples that are logged with their scores."
    )
    log_training_samples: Annotated[Int, Field(ge=-1)] = Field(
        default=8,
        description="Prompts of each training step whose answers are kept in the run's folder, with their tokens, for "
        "`foveal view`; -1 means all. Those of validations always are.",
    )
    save_freq: PositiveOrOff = Field(default=-1, description="Save every so many steps; -1 means only at the end.")
    save_limit: PositiveOrOff = Field(
        default=-1,
        description="Checkpoints that are kept in all, the best included (with 1 the best is kept besides); "
        "-1 means all.",
    )
    async_save: bool = Field(
        default=True,
        description="Copy what is saved to host memory, where there is room, and write it while training goes on.",
    )
    best_metric: str = Field(
        default="val/reward_score", pattern="^val", description="Validation metric that the best checkpoint is told by."
    )
    best_mode: Literal["max", "min"] = Field(
        default="max", description="Whether more or less of `best_metric` is better."
    )
    save_model_only: bool = Field(
        default=False, description="Save weights without optimizer states; no resuming from these."
    )
    save_hf: bool = Field(
        default=False, description="Write Hugging Face weights into each checkpoint too, as `foveal merge` does later."
    )
    save_checkpoint_path: UserPath | None = Field(
        default=None, description="Folder of the run; null means `checkpoints/PROJECT/EXPERIMENT`."
    )
    load_checkpoint_path: UserPath | None = Field(
        default=None,
        description="Checkpoint (`…/global_step_N`) to go on from; `latest` or `best` of this run; or a Hugging Face "
        "folder, of which a new run takes the weights.",
    )
    find_last_checkpoint: bool = Field(default=True, description="Go on from the last checkpoint in the run's folder.")
    restart_data: bool = Field(
        default=False,
        description="Begin the training rows anew, which may be others, when going on from a checkpoint.",
    )
    profile_steps: list[Positive] = Field(
        default=[],
        description="Steps of which a trace for ui.perfetto.dev and a summary are written into `profile` in the run's "
        "folder, as [3, 5]. These steps are slower.",
    )
    async_rollout: bool = Field(
        default=False,
        description="Sample the next step's answers while the policy learns from this step's, on devices of their own "
        "(`cluster.rollout_devices`). Answers are then one step old; `algorithm.correction` is `tis` unless given.",
    )
    stage_timeout: Positive = Field(
        default=1800,
        description="Seconds that a stage of a run on several devices (starting, sampling the next answer, a pass, "
        "saving) may take before the run ends with a message.",
    )
    max_restarts: NotNegative = Field(
        default=0,
        description="Times that a run on several devices goes on by itself, from its last checkpoint, after a worker's "
        "process or machine was lost, stalled, lost its engine, or ran out of memory in a pass whose size is `auto` "
        "(`worker.actor.token_budget`). A single device works in the run's own process, which ends with it.",
    )
    ray_timeline: str | None = Field(
        default=None, description="File for a timeline of Ray's tasks, as Chrome's tracing shows it."
    )

    @model_validator(mode="after")
    def _fill_checkpoint_path(self) -> TrainerConfig:
        if not self.save_checkpoint_path:
            self.save_checkpoint_path = str(Path("checkpoints") / self.project_name / self.experiment_name)
        return self

    @property
    def checkpoint_dir(self) -> Path:
        """The folder of the run: checkpoints, logs and samples."""
        assert self.save_checkpoint_path is not None
        return Path(self.save_checkpoint_path)

    @property
    def devices(self) -> int:
        """Devices of all machines, or worker processes without accelerators, once `settle_devices` has counted."""
        assert self.n_gpus_per_node > 0, "nobody has counted the devices"
        return self.nnodes * self.n_gpus_per_node


class ClusterConfig(Section):
    """Which devices do what."""

    rollout_devices: NotNegative = Field(
        default=0,
        description="The last so many of all devices hold engines alone, and the others train. 0: every device samples "
        "and trains by turns.",
    )


class Config(Section):
    """Everything a run is told, with EasyR1's names and defaults."""

    data: DataConfig = Field(default_factory=DataConfig, description="Rows, prompts and batch sizes.")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="Advantages, KL, filtering.")
    worker: WorkerConfig = Field(default_factory=WorkerConfig, description="Models, sampling, rewards.")
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="Length, devices, saving, logging.")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="Which devices do what.")

    _given: frozenset[str] = PrivateAttr(frozenset())
    _notes: tuple[str, ...] = PrivateAttr(())

    @property
    def given(self) -> frozenset[str]:
        """Dotted keys that the file or the command line set."""
        return self._given

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about how keys were read, for the start of the run."""
        return self._notes

    @property
    def training_devices(self) -> int:
        """Devices that hold the trained models."""
        return self.trainer.devices - self.cluster.rollout_devices

    @property
    def engine_devices(self) -> int:
        """Devices that hold engines: some of their own, or those that train."""
        return self.cluster.rollout_devices or self.trainer.devices

    def value(self, key: str) -> Any:
        """The value at a dotted key, as `worker.rollout.n`."""
        found: Any = self
        for part in key.split("."):
            found = getattr(found, part)
        return found
