"""Errors that a user can cure.

The command line prints these without a traceback and exits with 1. A message names the thing, what is allowed, and
what to do. Everything else is a bug of ours and keeps its traceback.
"""


class FovealError(Exception):
    """Base of all errors that come from the user's input or machine."""


class ConfigError(FovealError):
    """The configuration is wrong: unknown key, value out of range, values that contradict each other."""


class DataError(FovealError):
    """A data source, row or picture is wrong."""


class RewardError(FovealError):
    """The reward function cannot be loaded, raised, ran out of time, or broke its contract."""


class ModelError(FovealError):
    """The model folder is incomplete, unsupported, or does not fit."""


class CheckpointError(FovealError):
    """A checkpoint is incomplete, damaged, or belongs to something else."""


class EngineError(FovealError):
    """The rollout engine cannot start, ran out of memory, or died."""


class WorkerError(FovealError):
    """A worker's process died, failed, or makes no progress; or the cluster can't run the workers."""


class DeviceMemoryError(FovealError):
    """A pass of a model does not fit into the device's memory.

    Args:
        smaller: tokens of passes that might; None where it takes more than smaller passes.
    """

    def __init__(self, message: str, smaller: int | None = None) -> None:
        super().__init__(message)
        self.smaller = smaller
