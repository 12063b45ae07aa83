"""The files of a run: the whole configuration, one JSON object per log call, and readable sample answers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from foveal.errors import ConfigError
from foveal.track.samples import Sample
from foveal.types import Metrics

CONFIG_FILE = "experiment_config.json"
LOG_FILE = "experiment_log.jsonl"
SAMPLES_FILE = "generations.log"


class RunFiles:
    """Writes into the run's folder, always at the end of what is there, and flushes every time.

    Args:
        run_dir: made when absent.
        config: the whole configuration as plain values, without keys and passwords.

    Raises:
        ConfigError: the folder cannot be written to.
    """

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        self.log_file = run_dir / LOG_FILE
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
            (run_dir / CONFIG_FILE).write_text(text, encoding="utf-8", errors="backslashreplace")
            self._log = _open_to_append(self.log_file)
            self._samples = _open_to_append(run_dir / SAMPLES_FILE)
        except OSError as error:
            raise ConfigError(
                f"trainer.save_checkpoint_path: cannot write to {run_dir} ({error}). Give a folder that can be written."
            ) from error
        if _ends_inside_a_line(self.log_file):
            self._log.write("\n")

    def log(self, metrics: Metrics, step: int) -> None:
        """Adds one line to `experiment_log.jsonl`: `{"step": 1, "reward": {"overall": 0.5}}`."""
        line = json.dumps({"step": step, **nest(metrics)}, ensure_ascii=False, allow_nan=False)
        self._log.write(line + "\n")
        self._log.flush()

    def log_samples(self, samples: list[Sample]) -> None:
        """Adds the samples to `generations.log`."""
        for sample in samples:
            self._samples.write(sample.text())
        self._samples.flush()

    def close(self) -> None:
        self._log.close()
        self._samples.close()


def _open_to_append(path: Path) -> TextIO:
    # backslashreplace: a lone surrogate in a user's text must not stop a run, and stays valid JSON
    return open(path, "a", encoding="utf-8", errors="backslashreplace", newline="\n")


def _ends_inside_a_line(path: Path) -> bool:
    """Whether a killed run left half a line."""
    with open(path, "rb") as file:
        file.seek(0, 2)
        if file.tell() == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def nest(metrics: Metrics) -> dict[str, Any]:
    """Splits names at "/" into nested objects; `flatten` undoes it exactly.

    `a/b` stays one key where `a` is a number of its own, as does everything under `step`, which names the step. Numbers
    that JSON does not know (NaN, infinities) become null.
    """
    leaves = {*metrics, "step"}
    nested: dict[str, Any] = {}
    for name, value in metrics.items():
        first, *rest = name.split("/")
        path, node = first, nested
        key = first
        for part in rest:
            if path in leaves:
                key = f"{key}/{part}"
            else:
                node = node.setdefault(key, {})
                key = part
            path = f"{path}/{part}"
        node["step_" if name == "step" else key] = _plain(value)
    return nested


def _plain(value: Any) -> int | float | None:
    value = value.item() if hasattr(value, "item") else value
    return value if isinstance(value, int) or math.isfinite(value) else None


def flatten(nested: dict[str, Any], prefix: str = "") -> Metrics:
    """Names joined with "/" again, without what is not a finite number."""
    flat: Metrics = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}/"))
        elif isinstance(value, int | float) and -sys.float_info.max <= value <= sys.float_info.max:
            flat[prefix + key] = value
    return flat


class RunLog:
    """What a run logged, read as far as it has come.

    A file may hold a step several times: validation and saving add to it, and a run that went on from an older
    checkpoint trained some steps again. The later line wins, and training a step again drops what stood after it.

    Attributes:
        steps: step → metrics with their full names.
        broken: numbers of the lines that cannot be read, from 1.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin()

    def _begin(self) -> None:
        self.steps: dict[int, Metrics] = {}
        self.broken: list[int] = []
        self._lines = 0
        self._trained = 0
        self._place = 0

    def read_on(self) -> bool:
        """Takes the lines that are new; the last one waits until it is whole.

        Returns:
            whether there were any.

        Raises:
            OSError: the file is there, but cannot be read.
        """
        if not self.path.is_file():
            return False
        with open(self.path, "rb") as file:
            if file.seek(0, 2) < self._place:  # a new file in the place of the old
                self._begin()
            file.seek(self._place)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._place += len(whole)
        for line in whole.splitlines():
            self._lines += 1
            if line and not self._take(line):
                self.broken.append(self._lines)
        return bool(whole)

    def _take(self, line: bytes) -> bool:
        """Returns whether it can be read."""
        try:
            metrics = flatten(json.loads(line.decode("utf-8", errors="replace")))
            step = int(metrics.pop("step"))
        except (ValueError, KeyError, AttributeError, OverflowError, RecursionError):
            return False
        if any(name.startswith("actor/") for name in metrics):
            if step <= self._trained:
                self.steps = {old: found for old, found in self.steps.items() if old < step}
            self._trained = step
        self.steps.setdefault(step, {}).update(metrics)
        return True


def read_log(log_file: Path) -> dict[int, Metrics]:
    """What a run logged, by step, in order of the steps.

    Returns:
        step → metrics with their full names. Empty when there is no such file.
    """
    log = RunLog(log_file)
    log.read_on()
    return dict(sorted(log.steps.items()))


def dotted(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for every value of nested mappings."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
