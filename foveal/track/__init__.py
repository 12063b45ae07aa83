"""What people see of a run: lines in the terminal, files in the run's folder, trackers, the curve, sample answers.

Importing this package (and `console`) loads nothing heavy, so the command line and the configuration may use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foveal.track.trackers import Trackers

__all__ = ["Trackers"]


def __getattr__(name: str) -> Any:
    if name == "Trackers":
        from foveal.track.trackers import Trackers

        return Trackers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
