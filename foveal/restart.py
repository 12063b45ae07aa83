"""Training that goes on by itself after workers were lost."""

from __future__ import annotations

import gc
import sys
import time

from foveal.config import Config
from foveal.errors import DeviceMemoryError, EngineError, FovealError, WorkerError
from foveal.track import console
from foveal.trainer import Trainer


def train(config: Config) -> int:
    """Trains to the end. Where workers of several devices are lost, everything is closed and the run goes on from its
    last checkpoint, `trainer.max_restarts` times at most; without a checkpoint it begins again as it did.

    Workers are lost when their processes or machines die or stall, whenever that is, and when an engine dies in the
    middle of the run; one that cannot start is the user's to cure. They are also lost when the memory of one runs out
    in a pass, as the others wait for it: where passes are as large as fits, they are smaller from then on.

    Returns:
        the process's exit status, as `Trainer.fit`.

    Raises:
        FovealError: what ended the run.
    """
    most, lost, reached = config.trainer.max_restarts, 0, 0
    tracker_ids: dict[str, str] = {}
    ceiling = sys.maxsize
    began = time.monotonic()
    while True:
        trainer: Trainer | None = None
        try:
            trainer = Trainer(config, tracker_ids=tracker_ids, token_ceiling=ceiling)
            if lost:
                again = reached - trainer.step
                console.note(
                    f"restart {lost} of {most} after {time.monotonic() - began:.0f} s: going on after step "
                    f"{trainer.step}; {again} finished step{'' if again == 1 else 's'} and the one under way are lost"
                )
            return trainer.fit()
        except FovealError as error:
            smaller = _smaller_passes(error, trainer, config)
            if config.trainer.devices == 1 or not (smaller or _is_loss(error, trainer)):
                raise
            if lost == most:
                if smaller and not most:
                    error.args = (
                        f"{error}\n  With trainer.max_restarts above 0 the run would have gone on from its last "
                        f"checkpoint, with passes of up to {smaller:,} tokens.",
                    )
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
        passes = ""
        if smaller:
            ceiling, passes = smaller, f", with passes of up to {smaller:,} tokens"
        console.note(f"restart {lost} of {most} (trainer.max_restarts): everything was closed and starts again{passes}")
        _wait_for_devices(config)


def _is_loss(error: FovealError, trainer: Trainer | None) -> bool:
    """Whether workers are what was lost, and nobody has asked the run to stop."""
    if trainer is None:
        return isinstance(error, WorkerError)
    return isinstance(error, WorkerError | EngineError) and not trainer.signals.asked


def _smaller_passes(error: FovealError, trainer: Trainer | None, config: Config) -> int | None:
    """Tokens of passes that may do what the memory of a worker did not suffice for, where the run chooses them."""
    if not isinstance(error, DeviceMemoryError) or config.worker.actor.token_budget != "auto":
        return None
    return None if trainer is None or trainer.signals.asked else error.smaller


def _go_on(config: Config) -> None:
    """From the run's own checkpoints, wherever it began."""
    config.trainer.load_checkpoint_path = None
    config.trainer.find_last_checkpoint = True
    config.trainer.restart_data = False


def _wait_for_devices(config: Config) -> None:
    from foveal.cluster.ray_cluster import wait_for_devices

    wait_for_devices(config)
