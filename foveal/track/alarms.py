"""Signs that a run has gone wrong: one line with the likely cause and the key to change, and `alarm/*` in the trackers.

An alarm is said when it begins, not at every step that it lasts; the metric is 1 as long as it does. The bounds are set
for being right rather than early: a run that learns raises none.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median

import numpy as np

from foveal.track import console
from foveal.types import Group, IntArray, Metrics, trained_responses

WINDOW = 60
"""Steps that are remembered."""
QUIET = 10
"""Steps that an alarm must have been off to be said again."""
RUN = 4
"""Tokens of a run whose repetition counts."""
LOOKED_AT = 256
"""Answers of a step that are looked through for repetitions, evenly spread."""
LONG_ENOUGH = 32
"""Tokens from which an answer can repeat itself."""

FORMAT = re.compile(r"reward/(.*_)?form(at)?(_(reward|score|acc|accuracy))?")
"""Parts of a reward that are higher for better form; `format_error` and the like are not."""
NO_VARIANCE = "reward/groups_without_variance"
REWARD = ("reward/overall", "critic/score/mean")
KL = ("actor/kl_loss", "actor/kl_penalty", "actor/ppo_kl")
ENTROPY = ("actor/entropy", "actor/entropy_loss")


def signs(groups: Sequence[Group]) -> Metrics:
    """What the alarms need and no other metric says.

    Returns:
        `reward/groups_without_variance`: share of the groups whose answers all have the same score, of those with two
        or more; `response_length/repeating`: share of the answers most of whose runs of four tokens they had before.
    """
    metrics: Metrics = {}
    scores = [[r.rewards["overall"] for r in group.trained if "overall" in r.rewards] for group in groups]
    several = [one for one in scores if len(one) > 1]
    if several:
        flat = sum(max(one) - min(one) < 1e-6 for one in several)
        metrics[NO_VARIANCE] = flat / len(several)
    answers = [response.token_ids for _, response in trained_responses(list(groups))]
    if answers:
        taken = answers[:: max(1, len(answers) // LOOKED_AT)]
        metrics["response_length/repeating"] = float(np.mean([repeated(one) > 0.6 for one in taken]))
    return metrics


def repeated(token_ids: IntArray) -> float:
    """Share of the runs of four tokens that the answer had before; 0 for a short one.

    Args:
        token_ids: (L,) int64.
    """
    count = len(token_ids) - RUN + 1
    if len(token_ids) < LONG_ENOUGH:
        return 0.0
    mixed = np.zeros(count, np.uint64)
    for place in range(RUN):
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + token_ids[place : place + count].astype(np.uint64)
    return 1 - len(np.unique(mixed)) / count


class Alarms:
    """Looks at the metrics of each step.

    Args:
        say: takes the line of an alarm that begins.
    """

    def __init__(self, say: Callable[[str], None] = console.warn) -> None:
        self._say = say
        self._past: dict[str, deque[float]] = {}
        self._first: dict[str, list[float]] = {}
        self._best: dict[str, float] = {}
        self._last_on: dict[str, int] = {}

    def look(self, step: int, metrics: Metrics) -> Metrics:
        """`alarm/NAME`, 1 or 0, for each alarm whose metrics are there."""
        for name, value in metrics.items():
            self._remember(name, value)
        found: Metrics = {}
        for name, check in self._checks().items():
            said = check(metrics)
            if said is None:
                continue
            found[f"alarm/{name}"] = float(bool(said))
            if said and step - self._last_on.get(name, -QUIET - 1) > QUIET:
                self._say(f"step {step}: {said}")
            if said:
                self._last_on[name] = step
        return found

    def _checks(self) -> dict[str, Callable[[Metrics], str | None]]:
        """Each says "" for no alarm, None where it has nothing to look at."""
        return {
            "reward_stuck": self._reward_stuck,
            "no_variance": self._no_variance,
            "cut_off": self._cut_off,
            "format_collapse": self._format_collapse,
            "entropy_collapse": self._entropy_collapse,
            "kl_explosion": self._kl_explosion,
            "repeated_text": self._repeated_text,
        }

    def _remember(self, name: str, value: float) -> None:
        self._past.setdefault(name, deque(maxlen=WINDOW)).append(value)
        first = self._first.setdefault(name, [])
        if len(first) < 5:
            first.append(value)
        if len(self._past[name]) >= 5:
            self._best[name] = max(self._best.get(name, -math.inf), fmean(self._last(name, 5)))

    def _last(self, name: str, steps: int) -> list[float]:
        return list(self._past[name])[-steps:]

    def _for_steps(self, name: str, least: float, steps: int = 3) -> bool:
        """Whether a metric has been at least so high in each of the last steps."""
        last = self._last(name, steps)
        return len(last) == steps and min(last) >= least

    def _reward_stuck(self, metrics: Metrics) -> str | None:
        name = _present(metrics, REWARD)
        if name is None:
            return None
        last = self._last(name, 20)
        if len(last) < 20 or max(last) - min(last) > 1e-6 * max(1.0, abs(last[-1])):
            return ""
        if metrics.get(NO_VARIANCE, 1.0) < 0.5:  # scores that compare the answers of a group: always the same mean
            return ""
        return (
            f"the mean reward has been {last[-1]:g} for 20 steps. Prompt and reward function may disagree, or the "
            "task is solved: try `foveal check`, look at generations.log, change worker.reward.reward_function or data"
        )

    def _no_variance(self, metrics: Metrics) -> str | None:
        if NO_VARIANCE not in metrics:
            return None
        if not self._for_steps(NO_VARIANCE, 0.98, steps=5):  # fewer would be chance where a step has a few groups
            return ""
        return (
            f"in {metrics[NO_VARIANCE]:.0%} of the groups all answers have had the same score for 5 steps, so that "
            "comparing them teaches nothing. The task is too easy or too hard for this model, or the reward is "
            "constant: change the data, or raise worker.rollout.n or worker.rollout.temperature"
        )

    def _cut_off(self, metrics: Metrics) -> str | None:
        name = "response_length/clip_ratio"
        if name not in metrics:
            return None
        if not self._for_steps(name, 0.95):
            return ""
        return (
            f"{metrics[name]:.0%} of the answers have been cut off at the limit for 3 steps. They don't fit, or never "
            "end: raise data.max_response_length, ask for shorter answers, or see that the model's end token is right"
        )

    def _format_collapse(self, metrics: Metrics) -> str | None:
        names = [name for name in metrics if FORMAT.fullmatch(name)]
        if not names:
            return None
        for name in names:
            last, best = self._last(name, 5), self._best.get(name)
            if best is not None and len(self._past[name]) >= 10 and fmean(last) < min(0.5 * best, best - 0.3):
                return (
                    f"{name} has fallen from {best:.2f} to {fmean(last):.2f}: answers lose the form that the prompt "
                    "asks for. Lower worker.actor.optim.lr, raise algorithm.kl_coef, or give the format more weight"
                )
        return ""

    def _entropy_collapse(self, metrics: Metrics) -> str | None:
        name = _present(metrics, ENTROPY)
        if name is None:
            return None
        now, first = fmean(self._last(name, 5)), fmean(self._first[name])
        if len(self._past[name]) < 10 or not now <= min(0.02, 0.1 * first):  # NaN is none of this
            return ""
        return (
            f"the entropy has fallen from {first:.3f} to {now:.4f}: the answers to a prompt are nearly all the same. "
            "Raise worker.actor.clip_ratio_high or worker.rollout.temperature, lower worker.actor.optim.lr, or set "
            "worker.actor.entropy_coef"
        )

    def _kl_explosion(self, metrics: Metrics) -> str | None:
        name = _present(metrics, KL)
        if name is None:
            return None
        last, before = self._last(name, 3), list(self._past[name])[:-3][-20:]
        if math.isfinite(metrics[name]):
            usual = median(before) if len(before) >= 5 else math.inf
            if len(last) < 3 or min(last) < 0.5 or (min(last) < 10 * usual and min(last) < 10):
                return ""
        if name == "actor/ppo_kl":
            away, more = "an update takes the model far from the one that sampled", "worker.actor.ppo_epochs"
        else:
            away, more = "the model runs away from the reference", "worker.actor.max_grad_norm, raise algorithm.kl_coef"
        return (
            f"{name} is {metrics[name]:.3g}: {away}. Lower worker.actor.optim.lr or {more}, or go back to an earlier "
            "checkpoint"
        )

    def _repeated_text(self, metrics: Metrics) -> str | None:
        name = "response_length/repeating"
        if name not in metrics:
            return None
        if not self._for_steps(name, 0.3):
            return ""
        return (
            f"{metrics[name]:.0%} of the answers have repeated themselves for 3 steps. Lower worker.actor.optim.lr, "
            "see that the reward gives nothing for length, or add foveal.rewards.shape:repetition to "
            "worker.reward.functions"
        )


def _present(metrics: Metrics, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in metrics), None)
