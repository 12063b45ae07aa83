"""Generate, score, filter, until the batch of a step is full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from foveal.algorithm import get_advantage
from foveal.cluster.group import Workers
from foveal.config import Config
from foveal.data.loader import PromptLoader
from foveal.errors import DataError, RewardError
from foveal.reward.overlong import overlong_penalty
from foveal.reward.runner import RewardRunner
from foveal.track.console import note
from foveal.track.metrics import mean_rewards
from foveal.track.timing import timer
from foveal.train.credit import take_sampled_logprobs
from foveal.types import Group, Metrics, Prompt, Response, Sampling


def training_sampling(config: Config) -> Sampling:
    """How training answers are sampled."""
    rollout = config.worker.rollout
    return Sampling(
        n=rollout.n,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=config.data.max_response_length,
        seed=rollout.seed,
        ignore_eos=rollout.ignore_eos,
    )


def validation_sampling(config: Config) -> Sampling:
    """The same for validation: `val_override_config` over the training values, one answer unless it says otherwise."""
    values = {"max_tokens": config.data.max_response_length, **config.worker.rollout.val_sampling}
    names = Sampling.__dataclass_fields__.keys() - {"extra"}
    known = {name: values.pop(name) for name in list(values) if name in names}
    return Sampling(**known, extra=values)


def generate_and_score(
    prompts: list[Prompt],
    sampling: Sampling,
    workers: Workers,
    rewards: RewardRunner,
    timings: dict[str, float],
    advance: Callable[[int], None],
    *,
    with_baseline: bool = False,
) -> tuple[list[Group], Metrics]:
    """Answers all prompts and scores the answers, scoring while others are generated where the reward allows it.

    Args:
        with_baseline: each group also gets a greedy answer with the role "baseline", scored like any other (ReMax).
        timings: seconds are added under "gen" and "reward"; the latter is what scoring took beyond generation.
        advance: called for each finished group.

    Returns:
        groups in the order of `prompts`, and the reward runner's counts.
    """
    order = {prompt.uid: index for index, prompt in enumerate(prompts)}
    groups: list[Group] = []
    baselines: dict[str, Response] = {}
    with timer(timings, "gen"):
        if with_baseline:
            for group in workers.rollout(prompts, replace(sampling, n=1, temperature=0.0)):
                baselines[group.prompt.uid] = replace(group.responses[0], role="baseline")
        for group in workers.rollout(prompts, sampling):
            if group.prompt.uid in baselines:
                group.responses.append(baselines[group.prompt.uid])
            groups.append(group)
            rewards.submit(group)
            advance(1)
    groups.sort(key=lambda group: order[group.prompt.uid])
    with timer(timings, "reward"):
        metrics = rewards.finish(groups)
    return groups, metrics


@dataclass
class Account:
    """What online filtering saw, for its metrics and for the message when nothing was kept."""

    tries: int = 0
    seen: int = 0
    kept: int = 0
    too_low: int = 0
    too_high: int = 0
    unscored: int = 0
    keys: set[str] = field(default_factory=set)
    sample: str = ""

    def explain(self, config: Config) -> str:
        a = config.algorithm
        reasons = [
            f"{self.too_high} all-one (mean ≥ {a.filter_high})",
            f"{self.too_low} all-zero (mean ≤ {a.filter_low})",
        ]
        if self.unscored:
            reasons.append(f"{self.unscored} without the key (what was scored has {', '.join(sorted(self.keys))})")
        return (
            f"online filtering kept {self.kept} of {self.seen} groups in {self.tries} tries "
            f"(trainer.max_try_make_batch={config.trainer.max_try_make_batch}): {', '.join(reasons)}, "
            f"by the mean of {a.filter_key!r} strictly between {a.filter_low} and {a.filter_high}."
        )


@dataclass
class Collector:
    """Collects the groups of one training step after the other.

    With `algorithm.online_filtering` (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2) groups whose answers are
    all alike are dropped, and generation goes on until the batch is full. What is left over waits for the next step.
    """

    config: Config
    loader: PromptLoader
    workers: Workers
    rewards: RewardRunner
    surplus: list[Group] = field(default_factory=list)
    _key_was_seen: bool = field(default=False, init=False)

    @property
    def with_baseline(self) -> bool:
        return get_advantage(self.config.algorithm.adv_estimator).needs_baseline

    def position(self) -> tuple[dict[str, Any], list[Group]]:
        """Where the data stands, and the groups that are left over: what a resumed run goes on from."""
        return self.loader.state_dict(), list(self.surplus)

    def collect(
        self, step: int, timings: dict[str, float], advance: Callable[[int], None]
    ) -> tuple[list[Group], Metrics]:
        """The groups to train on in this step.

        Returns:
            these, and metrics: `reward/KEY` over all answers that were sampled, whether they are trained on or not, the
            reward runner's counts, and what was filtered.

        Raises:
            DataError: filtering kept nothing within `trainer.max_try_make_batch` tries.
            RewardError: no answer has the number that decides what is kept.
        """
        config = self.config
        wanted = config.data.rollout_batch_size
        self.rewards.step = step
        sampling = training_sampling(config)
        sampling = sampling.with_seed(sampling.seed * 1_000_003 + step)
        groups, self.surplus = self.surplus, []
        if sampling.full_distribution:
            take_sampled_logprobs(groups)  # an earlier policy wrote them: the ratio must be to that one, not to today's
        account = Account()
        metrics: Metrics = {}
        rewards: list[dict[str, float]] = []
        while len(groups) < wanted:
            prompts = self.loader.take(config.data.mini_rollout_batch_size or wanted)
            fresh, counts = generate_and_score(
                prompts, sampling, self.workers, self.rewards, timings, advance, with_baseline=self.with_baseline
            )
            for name, value in counts.items():
                metrics[name] = metrics.get(name, 0.0) + value
            account.tries += 1
            groups += self._filter(fresh, account)
            self._check_key(account, failed=counts.get("reward/errors", 0) + counts.get("reward/timeouts", 0) > 0)
            self._punish_overlong(fresh)  # after the filter, which judges what the reward function said
            rewards += [response.rewards for group in fresh for response in group.trained]
            limit = config.trainer.max_try_make_batch
            if config.algorithm.online_filtering and 0 < limit <= account.tries and len(groups) < wanted:
                self._give_up_filling(groups, account)
                break
        metrics |= {f"reward/{name}": value for name, value in mean_rewards(rewards).items()}
        if config.algorithm.online_filtering and account.seen:
            metrics["filter/kept_share"] = account.kept / account.seen
            metrics["filter/tries"] = float(account.tries)
        self.surplus = groups[wanted:]
        return groups[:wanted], metrics

    def _punish_overlong(self, groups: Sequence[Group]) -> None:
        """DAPO's soft overlong punishment on top of any reward function, also as a number of its own.

        Greedy answers are scored like any other, so they are punished too; those without a score have none to lower.
        """
        reward, limit = self.config.worker.reward, self.config.data.max_response_length
        if not reward.overlong_buffer:
            return
        for group in groups:
            for response in (r for r in group.responses if "overall" in r.rewards):
                penalty = overlong_penalty(
                    len(response.token_ids), limit, reward.overlong_buffer, reward.overlong_penalty
                )
                response.rewards["overlong_penalty"] = penalty
                response.rewards["overall"] += penalty

    def _filter(self, groups: Sequence[Group], account: Account) -> list[Group]:
        algorithm = self.config.algorithm
        if not algorithm.online_filtering:
            return list(groups)
        kept = []
        for group in groups:
            account.seen += 1
            account.keys.update(*(r.rewards for r in group.trained))
            values = [r.rewards[algorithm.filter_key] for r in group.trained if algorithm.filter_key in r.rewards]
            if not account.sample and group.responses:
                account.sample = group.responses[0].text
            mean = float(np.mean(values)) if values else None
            if mean is None:
                account.unscored += 1
            elif mean <= algorithm.filter_low:
                account.too_low += 1
            elif mean >= algorithm.filter_high:
                account.too_high += 1
            else:
                account.kept += 1
                kept.append(group)
        return kept

    def _check_key(self, account: Account, *, failed: bool) -> None:
        """Raises RewardError where no answer of the run has the number that decides: its name may be mistyped, and
        nothing would ever be kept.

        Args:
            failed: whether some calls of the reward function failed, which leave an answer with `overall` alone.
        """
        key = self.config.algorithm.filter_key
        self._key_was_seen |= key in account.keys
        routed = self.config.worker.reward.route_by is not None  # rows to come may be scored by another function
        if self._key_was_seen or not account.keys or failed or routed:
            return
        raise RewardError(
            f"algorithm.filter_key={key}: none of the answers to {account.seen} prompts has it; they have "
            f"{', '.join(sorted(account.keys))}. Name one of these, or return it for every answer."
        )

    def _give_up_filling(self, groups: Sequence[Group], account: Account) -> None:
        explanation = account.explain(self.config)
        if groups:
            note(f"{explanation} Training on the {len(groups)} groups there are.")
            return
        raise DataError(
            f"{explanation}\nOne of the answers: {account.sample[:300]!r}\n"
            "When every answer is wrong, the prompt's format and the reward function may disagree; when every answer "
            "is right, the data is too easy. Otherwise widen algorithm.filter_low / filter_high, choose another "
            "algorithm.filter_key, or raise worker.rollout.n."
        )
