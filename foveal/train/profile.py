"""A trace and a summary of one training step (`trainer.profile_steps`)."""

from __future__ import annotations

import gzip
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from foveal.train.profile_summary import PhaseRecord, TraceCounts, summary

MICRO_BATCHES = 4
"""Of each pass these are recorded; the rest is more of the same, and a trace of all would be too large to open."""
ENGINE_STEPS = 64
"""Of sampling; an engine may decode several tokens in one."""


@dataclass
class _Recording:
    record: PhaseRecord
    profiler: profile
    mark: Any
    began: float


class Profile:
    """Records the beginning of each phase of one step, and the first step of each phase's optimizer.

    Nothing but time is changed by it: each recording is started and ended with a wait for the device, and while one
    runs the host is slower.

    Args:
        device: whose work is recorded, beside the host's.
        folder: for `step_N.json.gz` and `step_N.txt`.
        step: the trainer's step.
        absent: as of `Meter`.
    """

    def __init__(self, device: torch.device, folder: Path, step: int, absent: Callable[[], int] = lambda: 0) -> None:
        self._device = device
        self._absent = absent
        self._folder = folder
        self._step = step
        self._records: dict[str, PhaseRecord] = {}
        self._open: PhaseRecord | None = None
        self._running: _Recording | None = None
        self._overhead = 0.0
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else the profiler's library prints lines about itself
        self._parts = tempfile.TemporaryDirectory(prefix="foveal_profile_")
        self._hooks = [
            register_optimizer_step_pre_hook(lambda *_: self._before_optimizer()),
            register_optimizer_step_post_hook(lambda *_: self._after_optimizer()),
        ]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Records what goes on inside, if this is the phase's first time in the step."""
        is_new = name not in self._records
        record = self._records.setdefault(name, PhaseRecord(name, ENGINE_STEPS if name == "gen" else MICRO_BATCHES))
        began, overhead = time.perf_counter(), self._overhead
        self._open = record
        if is_new:
            self._start(record)
        try:
            yield
        finally:
            if self._open is record:  # sampling that was left with answers to come may end inside another phase
                self._stop()
                self._open = None
            record.peak_bytes = max(record.peak_bytes, self._peak_bytes())
            record.seconds += time.perf_counter() - began - (self._overhead - overhead)

    def tick(self) -> None:
        """To be called at the begin of each micro-batch, and after each step of the engine."""
        record, running = self._open, self._running
        if record is None:
            return
        if running is not None and running.record is record and record.units >= record.most_units:
            self._stop()
        record.units += 1

    def write(self, timings: dict[str, float]) -> str:
        """Ends the profile and writes its files.

        Args:
            timings: seconds of the step's phases, as the trainer measured them.

        Returns:
            a line for the user.
        """
        for hook in self._hooks:
            hook.remove()
        trace, text = (self._folder / f"step_{self._step}.{end}" for end in ("json.gz", "txt"))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            counts = self._merge(trace)
            lines = summary(list(self._records.values()), counts, timings, is_gpu=self._device.type == "cuda")
            head = f"step {self._step} on {self._device_name()}, torch {torch.__version__}"
            text.write_text(f"{head}\n{trace.name}: open it at https://ui.perfetto.dev\n\n{lines}", "utf-8")
        except (OSError, ValueError) as error:  # ValueError: the profiler's library wrote what is no JSON
            return f"the profile of step {self._step} could not be written: {error}"
        finally:
            self._parts.cleanup()
        return f"profile of step {self._step}: {trace} (for ui.perfetto.dev), summary in {text.name}"

    def _before_optimizer(self) -> None:
        phase = self._open
        if phase is None or f"{phase.name}, optimizer" in self._records:
            return
        self._stop()
        record = PhaseRecord(f"{phase.name}, optimizer", most_units=1, units=1)
        self._records[record.name] = record
        self._start(record)

    def _after_optimizer(self) -> None:
        if self._running is not None and self._running.record is not self._open:
            record = self._running.record
            self._stop()
            record.seconds, record.peak_bytes = record.recorded_seconds, self._peak_bytes()

    def _start(self, record: PhaseRecord) -> None:
        self._stop()  # of a phase that was left and never ended
        began = time.perf_counter()
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])
        profiler = profile(activities=activities)
        self._wait()
        profiler.start()
        mark = record_function(record.name)
        mark.__enter__()
        self._running = _Recording(record, profiler, mark, time.perf_counter())
        self._overhead += self._running.began - began

    def _stop(self) -> None:
        if self._running is None:
            return
        running, self._running = self._running, None
        running.mark.__exit__(None, None, None)
        self._wait()
        ended = time.perf_counter()
        record = running.record
        record.recorded_seconds, record.recorded_units = ended - running.began, record.units
        running.profiler.stop()
        record.file = Path(self._parts.name) / f"{len(self._records)}.json"
        running.profiler.export_chrome_trace(str(record.file))
        self._overhead += time.perf_counter() - ended

    def _merge(self, trace: Path) -> dict[str, TraceCounts]:
        """Writes the recordings as one trace, phase by phase because each is large."""
        counts: dict[str, TraceCounts] = {}
        with gzip.open(trace, "wt", compresslevel=3, encoding="utf-8") as out:
            out.write('{"traceEvents": [')
            between = ""
            others: dict[str, Any] = {}
            for number, record in enumerate(self._records.values()):
                if record.file is None:
                    continue
                content = json.loads(record.file.read_text(encoding="utf-8"))
                events = content.pop("traceEvents")
                others = others or content
                counts[record.name] = TraceCounts(events, "kernel" if self._device.type == "cuda" else "cpu_op")
                for event in events:
                    if event.get("ph") in ("s", "t", "f"):  # arrows are numbered anew in every recording
                        event["id"] += number << 32
                    out.write(f"{between}\n{json.dumps(event)}")
                    between = ","
            others["traceName"] = trace.name
            out.write("\n], " + json.dumps(others)[1:])
        return counts

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _peak_bytes(self) -> int:
        """Of the device's memory within the phase; without a device of the host's, since the process began."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._absent()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU"
