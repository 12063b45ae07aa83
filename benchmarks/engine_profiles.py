"""Where the time of a rollout goes: the main thread's functions, and the device's kernels."""

from __future__ import annotations

import cProfile
import io
import pstats
from collections import defaultdict
from dataclasses import replace

import torch

from foveal.rollout.engine import RolloutEngine
from foveal.types import Prompt, Sampling


def host_profile(engine: RolloutEngine, prompts: list[Prompt], sampling: Sampling) -> str:
    """Where the main thread spends a rollout, by the functions' own time and with what they call."""
    profiler = cProfile.Profile()
    profiler.runcall(engine.generate, prompts, sampling, 0)
    text = io.StringIO()
    stats = pstats.Stats(profiler, stream=text)
    for order in ("tottime", "cumtime"):
        stats.sort_stats(order).print_stats(40)
    return text.getvalue()


def kernel_profile(engine: RolloutEngine, prompts: list[Prompt], sampling: Sampling, steps: int) -> str:
    """The kernels of about `steps` decode steps of the whole batch, and the share of time that the device is busy.

    The two prompts that are submitted last are the clock: all others are past their prefill when the first of them is
    answered, which opens the window, and the second closes it.
    """
    *others, opening, closing = prompts
    engine.submit(others, sampling, 0)
    engine.submit([opening], replace(sampling, max_tokens=16), 0)
    engine.submit([closing], replace(sampling, max_tokens=16 + steps), 0)
    on = "CUDA" if torch.cuda.is_available() else "CPU"
    profiler = torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, on)], acc_events=True)
    for group in engine.collect():
        if group.prompt is opening:
            profiler.start()
        if group.prompt is closing:
            profiler.stop()
            engine.abort({prompt.uid for prompt in others})
    busy, window, table = kernel_table(profiler)
    if not table:
        return "the profiler saw no kernels\n"
    return f"about {steps} decode steps: {window / 1e3:.1f} ms, device busy {busy / window:.1%}\n{table}\n"


def kernel_table(profiler: torch.profiler.profile) -> tuple[float, float, str]:
    """Microseconds in which the device was busy, those from the first kernel to the last, and the 25 costliest ones."""
    on = getattr(torch.autograd.DeviceType, "CUDA" if torch.cuda.is_available() else "CPU")
    spans = []
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or []:
        if event.device_type == on:
            spans.append((event.time_range.start, event.time_range.end))
            by_name[event.name].append(event.time_range.elapsed_us())
    if not spans:
        return 0.0, 0.0, ""
    busy, covered = 0.0, min(spans)[0]
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    total = sum(map(sum, by_name.values()))
    lines = [
        f"{sum(times) / 1e3:9.2f} ms {sum(times) / total:6.1%} {len(times):6d} × {name[:110]}"
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:25]
    ]
    return busy, covered - min(spans)[0], "\n".join(lines)
