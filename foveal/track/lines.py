"""The wording of a step's line: which few numbers are shown, how they are written, and the time left."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foveal.types import Metrics

# label → names under which the number may be logged; the first that is there is shown
_TRAINING: dict[str, tuple[str, ...]] = {
    "reward": ("reward/overall", "critic/score/mean"),
    "acc": ("reward/accuracy",),
    "kl": ("actor/kl_loss", "actor/kl_penalty"),
    "len": ("response_length/mean",),
    "grad": ("actor/grad_norm",),
}
_VALIDATION: dict[str, tuple[str, ...]] = {
    "score": ("val/reward_score",),
    "acc": ("val/accuracy_reward",),
    "len": ("val_response_length/mean",),
}
_WITH_CHANGE = ("reward", "score")
_STEP_SECONDS = ("perf/time_per_step", "timing_s/step")
_VALIDATION_SECONDS = ("timing_s/validation",)

_WORTH_TELLING = 0.1
"""Part of a step that one side must have been idle for."""


class StepLines:
    """Writes the lines of one run. Columns stay aligned because a column never gets narrower."""

    def __init__(self) -> None:
        self._widths: dict[str, int] = {}
        self._previous: dict[str, float] = {}
        self._durations: deque[float] = deque(maxlen=20)
        self._last_time: float | None = None

    def training(self, step: int, total_steps: int | None, metrics: Metrics, now: float | None = None) -> str:
        """As `step  12/100  reward 0.530 (+0.020)  acc 0.610  kl 0.003  len 87.0  grad 0.420  12 s  left 18 min`.

        Args:
            now: seconds on a clock that never goes back; the present when None.
        """
        now = time.monotonic() if now is None else now
        seconds = _first(metrics, _STEP_SECONDS)
        # From line to line rather than the step alone: validations and checkpoints take the user's time as well.
        elapsed = seconds if self._last_time is None else now - self._last_time
        self._last_time = now
        if elapsed is not None and math.isfinite(elapsed):
            self._durations.append(elapsed)
        cells = self._cells("training", _TRAINING, metrics)
        if seconds is not None:
            cells.append(self._padded("training seconds", duration(seconds)))
            for side in ("trainer", "engine"):
                idle = metrics.get(f"perf/idle_s/{side}", 0.0)
                if idle > _WORTH_TELLING * seconds:
                    cells.append(f"{side} idle {100 * idle / seconds:.0f} %")
        if total_steps is not None and self._durations and total_steps > step:
            left = sum(self._durations) / len(self._durations) * (total_steps - step)
            cells.append(f"left {duration(left)}")
        width = len(str(total_steps or step))
        of_total = "" if total_steps is None else f"/{total_steps}"
        return "  ".join([f"step {step:>{width}}{of_total}", *cells]).rstrip()

    def validation(self, step: int, metrics: Metrics) -> str:
        """As `validation at step 10  score 0.530 (+0.020)  acc 0.610  len 87.0  41 s`."""
        cells = self._cells("validation", _VALIDATION, metrics)
        seconds = _first(metrics, _VALIDATION_SECONDS)
        if seconds is not None:
            cells.append(duration(seconds))
        return "  ".join([f"validation at step {step}", *cells]).rstrip()

    def _cells(self, kind: str, columns: dict[str, tuple[str, ...]], metrics: Metrics) -> list[str]:
        cells = []
        for label, names in columns.items():
            value = _first(metrics, names)
            if value is None:
                continue
            text = f"{label} {number(value)}"
            if label in _WITH_CHANGE:
                text += self._change(label, value)
            cells.append(self._padded(f"{kind} {label}", text))
        return cells

    def _change(self, label: str, value: float) -> str:
        previous = self._previous.get(label)
        self._previous[label] = value
        return "" if previous is None else f" ({value - previous:+.3f})"

    def _padded(self, column: str, text: str) -> str:
        self._widths[column] = max(self._widths.get(column, 0), len(text))
        return text.ljust(self._widths[column])


def _first(metrics: Metrics, names: tuple[str, ...]) -> float | None:
    return next((float(metrics[name]) for name in names if name in metrics), None)


def number(value: float) -> str:
    """About four significant characters: `0.530`, `12.40`, `873.0`, `1.2e-05`, `nan`."""
    size = abs(value)
    if not math.isfinite(size):
        return str(value)
    if size and (size < 1e-3 or size >= 1e5):
        return f"{value:.1e}"
    return f"{value:.3f}" if size < 10 else f"{value:.2f}" if size < 100 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """As a person says it: `0.4 s`, `42 s`, `18 min`, `3 h 05 min`, `2 d 4 h`."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"
