"""The runs that are looked at: what their folders say, read again as far as they have grown."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foveal.errors import ConfigError
from foveal.masking import masked
from foveal.track.file import CONFIG_FILE, LOG_FILE, RunLog, dotted
from foveal.track.sample_files import ANSWERS, IMAGES
from foveal.types import Metrics
from foveal.view.answers import AnswerFiles, Index, stamp_of
from foveal.view.tokens import Vocabulary

FRESH_SECONDS = 1.0
"""For which what was read counts as new."""
LIVE_SECONDS = 300.0
"""Since the last line of the log, for which a run counts as going on."""
PICTURE = re.compile(r"[0-9a-f]{32}\.(png|jpg|gif|bmp|webp)")
"""The only names in the folder of pictures that are opened."""


class Run:
    """One run's folder.

    Attributes:
        number: its place among the runs, by which addresses name it.
        name: short, and unlike the others'.
    """

    def __init__(self, folder: Path, number: int, name: str) -> None:
        self.folder = folder
        self.number = number
        self.name = name
        self.log = RunLog(folder / LOG_FILE)
        self._answer_files = AnswerFiles(folder)
        self.vocabulary = Vocabulary(folder)
        self.version = 0
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._steps: dict[int, Metrics] = {}
        self._metric_names: set[str] = set()
        self._config: dict[str, Any] = {}
        self._config_stamp: tuple[int, int] | None = None
        self._unread: dict[str, str] = {}

    def read_on(self) -> None:
        """Takes in what has been written since."""
        with self._lock:
            if time.monotonic() - self._read_at < FRESH_SECONDS:
                return
            self._read_at = time.monotonic()
            self._read_config()
            self._unread.pop(LOG_FILE, None)
            try:
                grown = self.log.read_on()
            except OSError as error:
                grown, self._unread[LOG_FILE] = False, f" ({error.strerror})"
            if grown:
                self._steps = dict(sorted(self.log.steps.items()))
                self._metric_names = set().union(*self._steps.values())
                self.version += 1
            if self._answer_files.read_on():
                self.version += 1

    def _read_config(self) -> None:
        path = self.folder / CONFIG_FILE
        stamp = stamp_of(path)
        if stamp is None or stamp == self._config_stamp:
            return
        self._unread.pop(CONFIG_FILE, None)
        try:
            # runs of older versions have secrets in their files
            self._config = dict(dotted(masked(json.loads(path.read_text(encoding="utf-8")))))
        except (OSError, ValueError, AttributeError, RecursionError):
            self._config, self._unread[CONFIG_FILE] = {}, ""
        self._config_stamp = stamp

    @property
    def damaged(self) -> list[str]:
        """What of the run's files cannot be read and is left out, each by its name in the folder."""
        found = [f"{name}{reason}" for name, reason in self._unread.items()]
        if lines := self.log.broken:
            which = ", ".join(map(str, lines[:5])) + f" and {len(lines) - 5} more" * (len(lines) > 5)
            found.append(f"{LOG_FILE} (line{'s' * (len(lines) > 1)} {which})")
        return found + [f"{ANSWERS}/{name}" for name in sorted(self.answers.unreadable)]

    def picture(self, name: str) -> Path | None:
        """The file of a picture; None where it is missing, or no name of one. Nothing else gets into the path."""
        path = self.folder / IMAGES / name
        return path if PICTURE.fullmatch(name) and path.is_file() and not path.is_symlink() else None

    @property
    def steps(self) -> dict[int, Metrics]:
        """step → metrics, in order; not to be changed."""
        return self._steps

    @property
    def answers(self) -> Index:
        """The answers as they are now."""
        return self._answer_files.index

    @property
    def config(self) -> dict[str, Any]:
        """Dotted key → value, secrets masked; empty where the folder has no readable configuration."""
        return self._config

    @property
    def total_steps(self) -> int | None:
        total = self.config.get("trainer.max_steps")
        return total if isinstance(total, int) else None

    @property
    def is_live(self) -> bool:
        """Whether the log was written to in the last minutes, and steps are left."""
        total = self.total_steps
        if total is not None and max(self._steps, default=0) >= total:
            return False
        try:
            return time.time() - self.log.path.stat().st_mtime < LIVE_SECONDS
        except OSError:
            return False

    def last(self, name: str) -> float | None:
        """The newest value of a metric."""
        return next((m[name] for m in reversed(self._steps.values()) if name in m), None)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of a metric, of the values that are numbers."""
        found = [(s, m[name]) for s, m in self._steps.items() if name in m and math.isfinite(m[name])]
        return [step for step, _ in found], [value for _, value in found]

    def metric_names(self) -> set[str]:
        return self._metric_names


def open_runs(paths: list[Path]) -> list[Run]:
    """The runs in these folders.

    Args:
        paths: folders of runs, or folders with such folders in them, up to two levels deep.

    Raises:
        ConfigError: there is no run in one of them.
    """
    folders: list[Path] = []
    for path in paths:
        found = _runs_in(path)
        if not found:
            raise ConfigError(
                f"{path}: {'no run in this folder' if path.is_dir() else 'no such folder'}. Give the folder of a run, "
                f"which holds {LOG_FILE}; `foveal train` names it when it starts (trainer.save_checkpoint_path)."
            )
        folders += [folder for folder in found if folder not in folders]
    return [
        Run(folder, number, name) for number, (folder, name) in enumerate(zip(folders, _names(folders), strict=True))
    ]


def _runs_in(path: Path) -> list[Path]:
    path = path.resolve()
    if _is_run(path):
        return [path]
    return sorted(folder for depth in ("*", "*/*") for folder in path.glob(depth) if _is_run(folder))


def _is_run(folder: Path) -> bool:
    # Path.exists would raise for a folder of somebody else's
    return any(os.path.exists(folder / name) for name in (LOG_FILE, CONFIG_FILE, ANSWERS))


def _names(folders: list[Path]) -> list[str]:
    """The last parts of each path, as few as tell them apart."""
    for count in range(1, 10):
        names = ["/".join(folder.parts[-count:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


@dataclass(frozen=True)
class Alarm:
    """Steps during which an alarm was on, one after the other."""

    run: Run
    name: str
    first: int
    last: int
    goes_on: bool


def alarms(run: Run) -> list[Alarm]:
    """When each alarm of the run was on, the newest first."""
    found = []
    for name in sorted(run.metric_names()):
        if not name.startswith("alarm/"):
            continue
        steps, values = run.series(name)
        begin: int | None = None
        for index, value in enumerate(values):
            if value and begin is None:
                begin = steps[index]
            is_last = index == len(values) - 1
            if begin is not None and (not value or is_last):
                end = steps[index] if value else steps[index - 1]
                found.append(Alarm(run, name.removeprefix("alarm/"), begin, end, bool(value)))
                begin = None
    return sorted(found, key=lambda alarm: -alarm.last)


def differences(runs: list[Run]) -> tuple[list[tuple[str, list[Any]]], list[tuple[str, list[Any]]]]:
    """(settings that differ between the runs, settings that are the same), each (key, one value per run)."""
    configs = [run.config for run in runs]
    keys = sorted(set().union(*configs))
    rows = [(key, [_shown(config, key) for config in configs]) for key in keys]
    return [row for row in rows if len(set(row[1])) > 1], [row for row in rows if len(set(row[1])) == 1]


def _shown(config: dict[str, Any], key: str) -> str:
    if key not in config:
        return "not there"
    value = config[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
