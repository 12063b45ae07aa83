"""The outside trackers, each through its own SDK. Nothing here guards against failures: `external` does.

An SDK is imported when its tracker starts. Every tracker goes on with the run it had when training is resumed.
"""

from __future__ import annotations

from foveal.track.backends.base import Backend, RunInfo
from foveal.track.backends.mlflow import Mlflow
from foveal.track.backends.swanlab import SwanLab
from foveal.track.backends.tensorboard import TensorBoard
from foveal.track.backends.trackio import Trackio
from foveal.track.backends.wandb import Wandb

__all__ = ["BACKENDS", "Backend", "RunInfo"]

BACKENDS: dict[str, type[Backend]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "swanlab": SwanLab,
    "mlflow": Mlflow,
    "trackio": Trackio,
}
