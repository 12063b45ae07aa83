"""Training that goes on by itself after workers were lost."""

from __future__ import annotations

import gc
import time

from foveal.config import Config
from foveal.errors import EngineError, FovealError, WorkerError
from foveal.track import console
from foveal.trainer import Trainer


def train(config: Config) -> int:
    """Trains to the end. Where workers of several devices are lost, everything is closed and the run goes on from its
    last checkpoint, `trainer.max_restarts` times at most; without a checkpoint it begins again as it did.

    Workers are lost when their processes or machines die or stall, whenever that is, and when an engine dies in the
    middle of the run; one that cannot start is the user's to cure.

    Returns:
        the process's exit status, as `Trainer.fit`.

    Raises:
        FovealError: what ended the run.
    """
    most, lost, reached = config.trainer.max_restarts, 0, 0
    tracker_ids: dict[str, str] = {}
    began = time.monotonic()
    while True:
        trainer: Trainer | None = None
        try:
            trainer = Trainer(config, tracker_ids=tracker_ids)
            if lost:
                again = reached - trainer.step
                console.note(
                    f"restart {lost} of {most} after {time.monotonic() - began:.0f} s: going on after step "
                    f"{trainer.step}; {again} finished step{'' if again == 1 else 's'} and the one under way are lost"
                )
            return trainer.fit()
        except FovealError as error:
            if lost == most or not _is_loss(error, trainer) or config.trainer.devices == 1:
                raise
            reason = str(error)
        # Outside the handler: the exception holds the frames, and with them the rows and everything else.
        lost, began = lost + 1, time.monotonic()
        if trainer is not None:
            reached, tracker_ids = trainer.step, tracker_ids | trainer.trackers.run_ids
            if trainer.checkpoints.written:
                _go_on(config)
        del trainer
        gc.collect()
        console.warn(reason)
        console.note(f"restart {lost} of {most} (trainer.max_restarts): everything was closed and starts again")
        _wait_for_devices(config)


def _is_loss(error: FovealError, trainer: Trainer | None) -> bool:
    """Whether workers are what was lost, and nobody has asked the run to stop."""
    if trainer is None:
        return isinstance(error, WorkerError)
    return isinstance(error, WorkerError | EngineError) and not trainer.signals.asked


def _go_on(config: Config) -> None:
    """From the run's own checkpoints, wherever it began."""
    config.trainer.load_checkpoint_path = None
    config.trainer.find_last_checkpoint = True
    config.trainer.restart_data = False


def _wait_for_devices(config: Config) -> None:
    from foveal.cluster.ray_cluster import wait_for_devices

    wait_for_devices(config)
