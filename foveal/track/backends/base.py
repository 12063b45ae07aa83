"""What a tracker has to do, and what it is told about the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from foveal.track.samples import Sample
from foveal.types import Metrics

SAMPLES_KEY = "val/generations"
_CONTROL = r"[\x00-\x1f\x7f]"


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told about the run.

    Attributes:
        config: the whole configuration as plain values, without keys and passwords.
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
