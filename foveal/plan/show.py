"""The plan in a terminal."""

from __future__ import annotations

import io
import shutil
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from foveal.cluster.room import KEPT_FREE
from foveal.config import Config
from foveal.plan.cures import KINDS, MOST_TOGETHER, Cure
from foveal.plan.memory import Side, actor_sizes
from foveal.track.lines import duration

if TYPE_CHECKING:
    from foveal.plan.command import Plan

_GIB = 2**30
_OF_A_KIND = 3
_NAMES = {
    "gen": "rollout",
    "old": "log-probabilities",
    "ref": "reference",
    "values": "critic's values",
    "update_critic": "update of the critic",
    "update_actor": "update",
    "save_checkpoint": "save",
    "hand over": "new weights",
}


def show(plan: Plan) -> str:
    """One kind of GPU: memory by phase and part, what fits, cures, times, assumptions."""
    memory, seconds = plan.memory, plan.seconds
    lines = [_head(plan), ""]
    sides = dict.fromkeys(phase.side for phase in memory.phases)
    for side in sides:
        lines += [_text(_memory_table(plan, side)), *([""] if len(sides) > 1 else [])]
    peak = memory.peak
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    lines.append(
        f"{verdict} on {_count(plan)}: {peak.total / _GIB:.1f} of {peak.limit / _GIB:.1f} GiB in the phase that leaves "
        f"least ({_NAMES[peak.name]}); {100 * KEPT_FREE:.0f} % of {plan.gpu.gib:g} GiB stay free"
    )
    lines += [f"  {reason}" for reason in memory.short]
    if memory.fits:
        lines += _how_it_runs(plan)
    else:
        lines += ["", *_cures(plan.cures)]
    lines += ["", "assumed:", *_assumptions(plan)]
    lines += [f"  - {line}" for line in seconds.assumptions]
    return "\n".join(lines)


def _how_it_runs(plan: Plan) -> list[str]:
    """Passes, batches, host memory and times."""
    memory = plan.memory
    update, experience = memory.budgets["actor"]
    lines = [
        "",
        f"passes: {update:,} tokens with gradient, {experience:,} without; up to {memory.largest_budget:,} fit",
    ]
    if memory.engine:
        lines.append(
            f"vLLM: keys of {memory.engine.cache_tokens:,} tokens, {memory.engine.sequences:,} answers side by side; "
            f"data.rollout_batch_size={plan.one_wave:,} would be sampled in one wave"
        )
    if memory.host:
        parts = ", ".join(f"{name} {size / _GIB:.0f} GiB" for name, size in memory.host.items())
        lines.append(f"host memory for each GPU: {parts}")
    return [*lines, "", _text(_time_table(plan)), *_who_waits(plan), _run_line(plan)]


def _who_waits(plan: Plan) -> list[str]:
    """How the times of both sides make a step, where engines have GPUs of their own."""
    seconds, config = plan.seconds, plan.config
    if not seconds.apart:
        return []
    sampling = f"sampling ({_seconds(seconds.phases['gen'])})"
    training = f"training ({_seconds(seconds.training)})"
    if seconds.ahead:
        line = f"{sampling} goes on beside {training}: a step takes the longer one, then weights are handed over"
    else:
        line = f"{sampling} and {training} take turns: trainer.async_rollout=true has them at the same time"
    shares = {side: idle / seconds.step for side, idle in seconds.idle.items()}
    lines = [line]
    for side, count in (("engine", config.engine_devices), ("trainer", config.training_devices)):
        if shares[side] >= 0.005:
            does = {"engine": "sample", "trainer": "train"}[side]
            who = f"{count} GPUs that {does} are" if count > 1 else f"GPU that {does}s is"
            lines.append(f"the {who} idle for {100 * shares[side]:.0f} % of a step")
    gen = plan.memory.phases[0]
    if gen.total < 0.9 * gen.limit:
        lines.append(
            "nothing else is on a GPU that samples: worker.rollout.gpu_memory_utilization may be 0.9, for "
            "more answers side by side"
        )
    if plan.split is not None:
        lines.append(
            f"cluster.rollout_devices={plan.split.rollout_devices} instead of {config.cluster.rollout_devices}: "
            f"a step of {_seconds(plan.split.step)}"
        )
    return lines


def compare(plans: list[Plan]) -> str:
    """All kinds of GPUs, a line for each."""
    table = Table("GPU", "memory", "largest phase", "takes", "fits", "step", "the least costly change", box=None)
    for plan in plans:
        peak, cures = plan.memory.peak, plan.cures
        cure = " ".join(cures[0].arguments) if cures else "none found" if not plan.memory.fits else ""
        table.add_row(
            plan.gpu.name,
            f"{plan.gpu.gib:g} GiB",
            _NAMES[peak.name],
            f"{peak.total / _GIB:.1f} GiB",
            "yes" if plan.memory.fits else "no",
            _seconds(plan.seconds.step) if plan.memory.fits else "",
            cure,
        )
    lines = [_head(plans[0]), "", _text(table), "", "--gpu NAME says more. Assumed:", *_assumptions(plans[0])]
    return "\n".join(lines)


def _head(plan: Plan) -> str:
    sizes, actor = actor_sizes(plan.config), plan.config.worker.actor
    trained = f"{sizes.trained:,} of them trained" if sizes.trained < sizes.parameters else "all trained"
    if sizes.adapters:
        trained = f"and adapters of {sizes.adapters:,}, which alone are trained"
    kept = "adapters in fp32 on " if sizes.adapters else ""
    return (
        f"{plan.model}: {sizes.parameters:,} weights, {trained}; {kept}{actor.weights_dtype('cuda')} weights, "
        f"{actor.optim.strategy}; {_division(plan.config)}"
    )


def _division(config: Config) -> str:
    devices = config.trainer.devices
    if config.cluster.rollout_devices:
        return f"{devices} GPUs, of which {config.training_devices} train and {config.engine_devices} sample"
    return f"{devices} GPU{'s' * (devices > 1)}"


def _count(plan: Plan) -> str:
    devices = plan.config.trainer.devices
    return f"{plan.gpu.name}" if devices == 1 else f"{devices} × {plan.gpu.name}"


def _memory_table(plan: Plan, side: Side) -> Table:
    phases = [phase for phase in plan.memory.phases if phase.side == side]
    whose = {"both": "GiB of a GPU", "trainers": "GiB of one that trains", "engines": "GiB of one that samples"}
    table = Table(whose[side], box=None)
    for phase in phases:
        table.add_column(_NAMES[phase.name], justify="right")
    for part in dict.fromkeys(name for phase in phases for name in phase.parts):
        values = [phase.parts.get(part, 0.0) / _GIB for phase in phases]
        if any(value >= 0.05 for value in values):
            table.add_row(part, *(f"{value:.1f}" if value >= 0.05 else "" for value in values))
    table.add_row("peak", *(f"{phase.total / _GIB:.1f}{'' if phase.fits else ' !'}" for phase in phases), style="bold")
    return table


def _time_table(plan: Plan) -> Table:
    table = Table("seconds of a step", box=None)
    for name in plan.seconds.phases:
        table.add_column(_NAMES.get(name, name), justify="right")
    table.add_column("step", justify="right")
    table.add_column("a save", justify="right")
    numbers = [*plan.seconds.phases.values(), plan.seconds.step, plan.seconds.save]
    table.add_row("expected", *(f"{number:.1f}" for number in numbers))
    return table


def _run_line(plan: Plan) -> str:
    seconds = plan.seconds
    if seconds.run is None:
        epochs = plan.config.trainer.total_epochs
        shown = duration(100 * seconds.step)
        return f"the run: {epochs} epochs of rows that are not counted here (--rows N); 100 steps take {shown}"
    saves = f"{seconds.saves} save{'s' * (seconds.saves != 1)}"
    return f"the run: {seconds.steps:,} steps and {saves} in {duration(seconds.run)}"


def _assumptions(plan: Plan) -> list[str]:
    lengths, n = plan.lengths, plan.config.worker.rollout.n
    visual = f", {lengths.visual:,} of them visual," if lengths.visual else ""
    engine = "vLLM" if plan.memory.engine else "the trainer's own module"
    return [
        f"  - prompts of {lengths.prompt:,} tokens{visual} with {n} answers: {lengths.answer:,} tokens each where "
        f"memory is counted, {lengths.mean_answer:,} in the mean where time is (--prompt, --visual, --answer)",
        f"  - {engine} samples (worker.rollout.name={plan.config.worker.rollout.name})",
    ]


def _cures(cures: list[Cure]) -> list[str]:
    if not cures:
        return [f"no {MOST_TOGETHER} changes of those that are tried make it fit: take GPUs with more memory"]
    lines = ["with any of these lines it fits, the least costly first:"]
    for kind in KINDS:
        for cure in [cure for cure in cures if cure.kind == kind][:_OF_A_KIND]:
            lines += [f"  {' '.join(cure.arguments)}", f"      a step of {_seconds(cure.step)}; {cure.cost}"]
    return lines


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else duration(value)


def _text(renderable: Any) -> str:
    out = io.StringIO()
    width = max(100, shutil.get_terminal_size((120, 24)).columns)
    Console(file=out, width=width, color_system=None).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").splitlines())
