"""The folder of a run: it can be written to, and one run at a time writes to it."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from foveal.errors import ConfigError

LOCK = ".lock"


class RunFolder:
    """Holds a run's folder until `close`; the system lets go of it when the process dies.

    Args:
        path: made when absent.

    Raises:
        ConfigError: it cannot be written to, or another run is using it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = (path / LOCK).open("a+")
        except OSError as error:
            raise ConfigError(
                f"trainer.save_checkpoint_path: cannot write to {path} ({error.strerror or error}). Give a folder on a "
                "disk that can be written to."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "unknown"
            self._lock.close()
            raise ConfigError(
                f"trainer.save_checkpoint_path: {path} is in use by another run (process {holder}). Wait for it, or "
                "give this run a name of its own with trainer.experiment_name or trainer.save_checkpoint_path."
            ) from error
        except OSError:
            return  # a file system without locks: then nothing keeps two runs apart
        with suppress(OSError):
            self._lock.truncate(0)
            self._lock.write(str(os.getpid()))
            self._lock.flush()

    def close(self) -> None:
        self._lock.close()
