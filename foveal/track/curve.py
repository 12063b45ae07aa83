"""The curve of a run as a picture: reward, validation, answer length, and KL or gradient norm."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foveal.track.console import warn
from foveal.track.file import read_log
from foveal.types import Metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d9731a", "#9aa5b1"


def draw_curve(log_file: Path, out: Path) -> None:
    """Draws a run's `experiment_log.jsonl` into a PNG file.

    The file is whole at any time: it replaces an older one. Whatever goes wrong is a warning, never an error.
    """
    try:
        _draw(read_log(log_file), out)
    except Exception as error:
        warn(f"cannot draw {out}: {type(error).__name__}: {error}")


def _draw(log: dict[int, Metrics], out: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    reward, validation, length, last = figure.subplots(2, 2).flat
    for axes in figure.axes:
        axes.set_xlim(0, max(log, default=1) or 1)
    _smoothed(reward, "Training reward", log, "reward/overall")
    _validation(validation, log)
    _smoothed(length, "Answer length (tokens)", log, "response_length/mean")
    kl = next((name for name in ("actor/kl_loss", "actor/kl_penalty") if len(_series(log, name)[0])), None)
    if kl is not None:
        _smoothed(last, "KL to the reference", log, kl)
    else:
        _smoothed(last, "Gradient norm", log, "actor/grad_norm")
    part = out.with_name(out.name + ".part")
    canvas.print_figure(part, format="png")
    os.replace(part, out)


def _series(log: dict[int, Metrics], name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of a metric, both (N,)."""
    found = [(step, metrics[name]) for step, metrics in log.items() if name in metrics]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)


def _smoothed(axes: Axes, title: str, log: dict[int, Metrics], name: str) -> None:
    steps, values = _series(log, name)
    _frame(axes, title, steps)
    if not len(steps):
        return
    if len(steps) < 8:
        axes.plot(steps, values, color=_BLUE, marker="o", markersize=3, clip_on=False)
        return
    axes.plot(steps, values, color=_GREY, linewidth=0.8, label="each step")
    window = max(3, len(steps) // 10)
    axes.plot(steps, moving_mean(values, window), color=_BLUE, linewidth=1.8, label=f"mean of {window}")
    axes.legend(fontsize=8, frameon=False)


def _validation(axes: Axes, log: dict[int, Metrics]) -> None:
    steps, scores = _series(log, "val/reward_score")
    _frame(axes, "Validation", steps)
    if not len(steps):
        return
    axes.plot(steps, scores, color=_BLUE, marker="o", markersize=3.5, clip_on=False, label="score")
    steps, accuracies = _series(log, "val/accuracy_reward")
    if len(steps):
        axes.plot(steps, accuracies, color=_ORANGE, marker="s", markersize=3.5, clip_on=False, label="accuracy")
    axes.legend(fontsize=8, frameon=False)


def _frame(axes: Axes, title: str, steps: np.ndarray) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(color="#e6e9ed", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if not len(steps):
        axes.text(0.5, 0.5, "nothing logged yet", ha="center", va="center", color=_GREY, transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """(N,) mean of the last `window` values up to each one, of fewer at the start."""
    sums = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)
