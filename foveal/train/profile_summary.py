"""What a recorded step says in numbers: its phases, how busy the device was, and with what."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOP = 12
NAME_WIDTH = 90
_DEVICE_WORK = {"kernel": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu_op": ("cpu_op",)}


@dataclass
class PhaseRecord:
    """One phase of a step.

    Attributes:
        most_units: micro-batches, or steps of the engine, after which recording ends.
        units: that there were in all.
        recorded_units: that are in the trace.
        seconds: of the whole phase, without what starting and ending a recording took.
        recorded_seconds: of what is in the trace.
        peak_bytes: most memory.
        file: the recording, in Chrome's trace format.
    """

    name: str
    most_units: int
    units: int = 0
    recorded_units: int = 0
    seconds: float = 0.0
    recorded_seconds: float = 0.0
    peak_bytes: int = 0
    file: Path | None = None


class TraceCounts:
    """Sums over a recording's events.

    Args:
        events: in Chrome's trace format, times in µs.
        work: the category of the device's work: "kernel" on a GPU, "cpu_op" without one.

    Attributes:
        busy_s: seconds in which the device did something.
        names: name → (seconds, calls); of operators that call others, what they took themselves.
    """

    def __init__(self, events: list[dict[str, Any]], work: str) -> None:
        lanes: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        for event in events:
            if event.get("ph") == "X" and event.get("cat") in _DEVICE_WORK[work]:
                lanes[event["pid"], event["tid"]].append(event)
        seconds: dict[str, float] = defaultdict(float)
        calls: dict[str, int] = defaultdict(int)
        for lane in lanes.values():
            for event, own in _own_times(lane):
                seconds[event["name"]] += own / 1e6
                calls[event["name"]] += 1
        self.names = {name: (seconds[name], calls[name]) for name in seconds}
        self.busy_s = _covered([(event["ts"], event["ts"] + event["dur"]) for lane in lanes.values() for event in lane])


def _own_times(lane: list[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """Each event of one thread or stream with its duration less that of the events inside it, in µs."""
    lane.sort(key=lambda event: (event["ts"], -event["dur"]))
    own = [event["dur"] for event in lane]
    inside: list[int] = []
    for number, event in enumerate(lane):
        while inside and event["ts"] >= lane[inside[-1]]["ts"] + lane[inside[-1]]["dur"]:
            inside.pop()
        if inside:
            own[inside[-1]] -= event["dur"]
        inside.append(number)
    return list(zip(lane, own, strict=True))


def _covered(spans: list[tuple[float, float]]) -> float:
    """Seconds that lie in at least one span of µs."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total / 1e6


def summary(
    records: list[PhaseRecord], counts: dict[str, TraceCounts], timings: dict[str, float], *, is_gpu: bool
) -> str:
    """The text beside a trace: a table of the phases, then what the device did most in each.

    Args:
        counts: by name of the phase.
        timings: seconds of all phases of the step, as the trainer measured them.
        is_gpu: whether there is a device beside the host.
    """
    peak = "peak memory" if is_gpu else "host's peak"
    lines = [f"{'phase':<26}{'seconds':>9}  {'recorded':>9}  {'of it busy':>10}  {peak:>12}  recorded part"]
    for record in records:
        found = counts.get(record.name)
        busy = f"{found.busy_s / record.recorded_seconds:.0%}" if found and found.names else "-"
        unit = "engine steps" if record.name == "gen" else "micro-batches"
        part = "all" if record.recorded_units >= record.units else f"{record.recorded_units} of {record.units} {unit}"
        lines.append(
            f"{record.name:<26}{record.seconds:>9.3f}  {record.recorded_seconds:>9.3f}  {busy:>10}  "
            f"{record.peak_bytes / 1024**3:>8.2f} GiB  {part if found else 'nothing'}"
        )
    names = {record.name for record in records}
    others = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in timings.items() if name not in names)
    lines.append(f"\nas the trainer measured it, recording included: {others}" if others else "")
    lines.append(
        "Recording slows the host: compare seconds with timing_s of other steps. "
        + ("Busy is the GPU, with kernels and copies." if is_gpu else "Busy is the time inside operators.")
    )
    work = "kernels" if is_gpu else "operators"
    for record in records:
        if record.name in counts:
            lines += ["", f"{record.name}: {work} that took longest", *_top(counts[record.name])]
    return "\n".join(lines) + "\n"


def _top(counts: TraceCounts) -> list[str]:
    total = sum(seconds for seconds, _ in counts.names.values()) or 1.0
    largest = sorted(counts.names.items(), key=lambda item: -item[1][0])[:TOP]
    return [
        f"{seconds * 1e3:>10.2f} ms {seconds / total:>4.0%} {calls:>7} x  {name[:NAME_WIDTH]}"
        for name, (seconds, calls) in largest
    ]
