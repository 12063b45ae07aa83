"""The terminal: notes, warnings, errors, one line a step, and a bar for long phases.

Everything here is a plain line, so that it reads the same in a terminal, in a pipe and in a log file. Only a phase has
a bar in a terminal, which leaves nothing behind; elsewhere it says now and then how far it is.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from foveal.masking import without_secrets
from foveal.track.lines import StepLines, duration

if TYPE_CHECKING:
    from foveal.types import Metrics

Take = Callable[[str, str], None]
"""Gets the kind of a line ("note", "warning" or "error") and its text."""

PLAIN_SECONDS = 20.0
"""Between two lines of a phase where there is no terminal."""

_STEERING = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Characters that steer a terminal; they may stand in rows, answers and names of files."""

_lines = StepLines()
_take: Take | None = None
_bar_is_open = False


def divert(take: Take | None) -> None:
    """Sends lines elsewhere from now on, as from a process that has no terminal; None ends that."""
    global _take
    _take = take


def note(text: str) -> None:
    """Prints one line for the user, on standard output."""
    if _take is not None:
        _take("note", text)
    else:
        _write(sys.stdout, text)


def warn(text: str) -> None:
    """Prints one line that starts with "warning:", on standard error."""
    if _take is not None:
        _take("warning", text)
    else:
        _write(sys.stderr, f"warning: {text}")


def error(text: str) -> None:
    """Prints why a command ends early, set off by an empty line, on standard error."""
    _write(sys.stderr, f"\n{text}")


def step_line(step: int, total_steps: int | None, metrics: Metrics) -> None:
    """Prints what a training step did, and the time left for the run."""
    note(_lines.training(step, total_steps, metrics))


def validation_line(step: int, metrics: Metrics) -> None:
    """Prints how a validation went."""
    note(_lines.validation(step, metrics))


@contextmanager
def phase(name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Shows a bar while a long phase runs, with the time left; it is gone afterwards.

    Where standard output is no terminal, a line is printed every twenty seconds instead, if `total` is known.

    Args:
        name: what is going on, as "validation".
        total: how many things will be done; None when nobody knows.

    Yields:
        `advance(n)`: call it when n more things are done. A phase inside another one shows nothing.
    """
    global _bar_is_open
    if _bar_is_open or not sys.stdout.isatty():
        yield _plain(name, total) if total and not _bar_is_open else lambda n: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(), transient=True) as progress:
        task = progress.add_task(name, total=total)
        _bar_is_open = True
        try:
            yield lambda n: progress.advance(task, n)
        finally:
            _bar_is_open = False


def _plain(name: str, total: int) -> Callable[[int], None]:
    begin = shown = time.monotonic()
    done = 0

    def advance(n: int) -> None:
        nonlocal done, shown
        done += n
        now = time.monotonic()
        if now - shown >= PLAIN_SECONDS and 0 < done < total:
            shown = now
            note(f"{name}: {done:,} of {total:,}, left {duration((now - begin) / done * (total - done))}")

    return advance


def _write(stream: TextIO, text: str) -> None:
    text = without_secrets(text).translate(_STEERING)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, errors="replace").decode(encoding) + "\n")
        stream.flush()
    except BrokenPipeError:  # the reader of our output has gone (`… | head`); the run goes on without it
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        pass  # closed, or on a full disk
