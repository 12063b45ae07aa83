"""What the curves show: which metrics, under which titles, and the numbers, as plain JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foveal.view.runs import Run

TITLES = {
    "reward/overall": "Reward of training answers",
    "val/reward_score": "Reward on the validation set",
    "val/accuracy_reward": "Accuracy on the validation set",
    "reward/accuracy": "Accuracy of training answers",
    "response_length/mean": "Length of answers (tokens)",
    "response_length/clip_ratio": "Share of answers cut off at the limit",
    "actor/entropy_loss": "Entropy: how undecided the model is",
    "actor/kl_loss": "KL: distance from the model at the start",
    "actor/kl_penalty": "KL: distance from the model at the start",
    "actor/grad_norm": "Size of the gradient",
    "actor/pg_clipfrac_higher": "Share of tokens whose update was clipped above",
    "reward/groups_without_variance": "Share of prompts whose answers all scored the same",
    "rollout/logprob_gap/mean": "Engine against trainer: mean difference of log-probabilities",
    "perf/throughput": "Tokens per second and device",
}
USUAL = (
    "reward/overall",
    "val/reward_score",
    "val/accuracy_reward",
    "response_length/mean",
    "actor/entropy_loss",
    "actor/kl_loss",
    "actor/kl_penalty",
    "actor/grad_norm",
    "reward/groups_without_variance",
)
"""Shown where nothing else is asked for, as far as a run has them."""

PHASES = {
    "gen": "writing answers",
    "reward": "scoring answers",
    "old": "old log-probabilities",
    "ref": "reference model",
    "values": "critic's values",
    "adv": "advantages",
    "update_critic": "training the critic",
    "update_actor": "training the model",
    "other": "everything else in the step",
    "validation": "validation",
    "save_checkpoint": "saving",
}
_IN_STEP = tuple(name for name in PHASES if name not in ("other", "validation", "save_checkpoint"))

ALARMS = {
    "reward_stuck": "The mean reward did not change for 20 steps. Prompt and reward function may disagree.",
    "no_variance": "Nearly all prompts had answers with the same score, so there was nothing to learn from.",
    "cut_off": "Nearly all answers were cut off at the length limit.",
    "format_collapse": "Answers lost the form that the prompt asks for.",
    "entropy_collapse": "The answers to a prompt became nearly all the same.",
    "kl_explosion": "The model moved very far from where it started.",
    "repeated_text": "Many answers repeat themselves.",
}


def usual(runs: Sequence[Run]) -> list[str]:
    """Metrics to show where none are asked for: the usual ones, or else the first few that there are."""
    there = set().union(*(run.metric_names() for run in runs))
    return [name for name in USUAL if name in there] or sorted(name for name in there if "/" in name)[:6]


def by_section(runs: Sequence[Run]) -> dict[str, list[str]]:
    """All metrics, by the first part of their names."""
    sections: dict[str, list[str]] = {}
    for name in sorted(set().union(*(run.metric_names() for run in runs))):
        sections.setdefault(name.partition("/")[0], []).append(name)
    return sections


def curves(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """One chart per metric that some run has, with a series per run."""
    charts = []
    for name in names:
        series = [
            {"name": run.name, "colour": run.number, "x": x, "y": y} for run in runs for x, y in [run.series(name)]
        ]
        if any(one["x"] for one in series):
            charts.append({"name": name, "title": TITLES.get(name, name), "series": series})
    return charts


def times(run: Run) -> dict[str, Any]:
    """Seconds of every step by phase, for bars on top of each other; what is outside a step's phases is "other"."""
    rows = {step: _phases(metrics) for step, metrics in run.steps.items()}
    rows = {step: phases for step, phases in rows.items() if phases}
    names = [name for name in PHASES if any(phases.get(name, 0.0) > 0 for phases in rows.values())]
    parts = [
        {"name": PHASES[name], "colour": list(PHASES).index(name), "y": [p.get(name, 0.0) for p in rows.values()]}
        for name in names
    ]
    return {"name": run.name, "x": list(rows), "parts": parts}


def _phases(metrics: dict[str, float]) -> dict[str, float]:
    found = {name: metrics[f"timing_s/{name}"] for name in PHASES if f"timing_s/{name}" in metrics}
    step = metrics.get("timing_s/step")
    if step is not None:
        found["other"] = max(0.0, step - sum(found.get(name, 0.0) for name in _IN_STEP))
    return found


def time_table(run: Run) -> list[tuple[str, float, float]]:
    """(phase, seconds in all, share of all) over the whole run, the longest first."""
    totals = {part["name"]: sum(part["y"]) for part in times(run)["parts"]}
    everything = sum(totals.values()) or 1.0
    return sorted(((name, total, total / everything) for name, total in totals.items()), key=lambda row: -row[1])
