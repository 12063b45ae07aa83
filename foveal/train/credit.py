"""From scores to advantages: what each token of each response is credited with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from foveal.algorithm import (
    KLController,
    StepBatch,
    gap_metrics,
    get_advantage,
    kl_penalty,
    mean_per_response,
    rewards_per_token,
)
from foveal.config import Config
from foveal.errors import RewardError
from foveal.types import Group, Metrics, Response, trained_responses


def needs_old_logprobs(config: Config) -> bool:
    """Whether a separate pass must compute the log-probabilities of the policy before the update.

    With one optimizer step per batch and no KL in the reward, the update's own first forward gives the same numbers.
    """
    actor, algorithm = config.worker.actor, config.algorithm
    if algorithm.old_logprobs != "auto":
        return algorithm.old_logprobs == "recompute"
    one_step = config.data.rollout_batch_size <= actor.global_batch_size and actor.ppo_epochs == 1
    return not one_step or algorithm.kl_in_reward


def take_sampled_logprobs(groups: Sequence[Group]) -> None:
    """Makes the engine's log-probabilities the old ones: where the user wants that, or an earlier policy sampled."""
    for group in groups:
        for response in group.responses:
            response.columns["old_logprobs"] = response.logprobs


def assign_credit(groups: Sequence[Group], config: Config, kl: KLController) -> Metrics:
    """Stores the columns `token_rewards`, `advantages` and `returns` of every trained response.

    The token rewards hold the score at the last token, minus the KL penalty where it is taken from the reward (then the
    columns `old_logprobs` and `ref_logprobs` must be there).

    Returns:
        `actor/kl_penalty` and `actor/kl_coef` where the KL is taken from the reward, as EasyR1 names them.

    Raises:
        RewardError: the reward function doesn't give a part that the estimator needs.
    """
    pairs = list(trained_responses(list(groups)))
    if not pairs:
        return {}
    responses = [response for _, response in pairs]
    lengths = torch.tensor([len(r.token_ids) for r in responses])
    scores = torch.tensor([r.rewards["overall"] for r in responses], dtype=torch.float32)
    mask = torch.ones(int(lengths.sum()), dtype=torch.bool)
    metrics: Metrics = {}
    penalty = None
    algorithm = config.algorithm
    estimator = get_advantage(algorithm.adv_estimator)
    if algorithm.kl_in_reward:
        old, ref = _column(responses, "old_logprobs"), _column(responses, "ref_logprobs")
        penalty = kl_penalty(old, ref, algorithm.kl_penalty)
        current = float(mean_per_response(penalty, lengths, mask).mean())
        metrics = {"actor/kl_penalty": current, "actor/kl_coef": kl.kl_coef}
    token_rewards = rewards_per_token(scores, lengths, mask, penalty, kl.kl_coef)
    if penalty is not None:
        kl.update(metrics["actor/kl_penalty"], len(responses))
    batch = StepBatch(
        scores=scores,
        group=torch.tensor([index for index, _ in pairs]),
        lengths=lengths,
        token_rewards=token_rewards,
        mask=mask,
        values=_column(responses, "values") if estimator.needs_values else None,
        baselines=_baselines(groups, [index for index, _ in pairs]),
        parts=_parts(responses, config),
    )
    result = estimator(batch, algorithm)
    for name, values in (
        ("token_rewards", token_rewards),
        ("advantages", result.advantages),
        ("returns", result.returns),
    ):
        for response, piece in zip(responses, values.split(lengths.tolist()), strict=True):
            response.columns[name] = piece.to(torch.float32).numpy().copy()
    return metrics


def logprob_gap(groups: Sequence[Group]) -> Metrics:
    """How far the engine's log-probabilities lie from the trainer's (`rollout/…`), over the answers that have both.

    The trainer's are `trainer_logprobs`, which the update leaves where the old ones are the engine's own, or else
    `old_logprobs`. Answers of an earlier policy, whose old ones are the engine's too, don't count.
    """
    responses, trainer = [], []
    for _, response in trained_responses(list(groups)):
        found = response.columns.get("trainer_logprobs", response.columns.get("old_logprobs"))
        if found is not None and found is not response.logprobs:
            responses.append(response)
            trainer.append(found)
    if not responses:
        return {}
    lengths = torch.tensor([len(r.token_ids) for r in responses])
    sampled = torch.from_numpy(np.concatenate([r.logprobs for r in responses]))
    mask = torch.ones_like(sampled, dtype=torch.bool)
    return gap_metrics(torch.from_numpy(np.concatenate(trainer)), sampled, lengths, mask)


def _baselines(groups: Sequence[Group], group_of: Sequence[int]) -> torch.Tensor:
    """(R,): the score of the greedy answer to each response's prompt (ReMax), NaN where there is none."""
    scores = [
        next((r.rewards["overall"] for r in g.responses if r.role == "baseline" and "overall" in r.rewards), np.nan)
        for g in groups
    ]
    return torch.tensor([scores[index] for index in group_of], dtype=torch.float32)


def _parts(responses: Sequence[Response], config: Config) -> dict[str, torch.Tensor]:
    """The numbers that `algorithm.reward_parts` names, each (R,), NaN where an answer has none.

    Raises:
        RewardError: the estimator needs them, and no answer of the step has one of them, though calls have succeeded.
    """
    names = config.algorithm.reward_parts
    given = set[str]().union(*(r.rewards for r in responses))
    absent = [name for name in names if name not in given]
    # a call that fails may be scored, which gives `overall` alone
    failed = config.worker.reward.on_error == "score" and given <= {"overall", "overlong_penalty"}
    if absent and not failed and get_advantage(config.algorithm.adv_estimator).needs_parts:
        raise RewardError(
            f"algorithm.reward_parts: no answer of this step has {', '.join(absent)}; the answers have "
            f"{', '.join(sorted(given))}. Name numbers that the reward function returns."
        )
    return {name: torch.tensor([r.rewards.get(name, np.nan) for r in responses]) for name in names}


def _column(responses: Sequence[Response], name: str) -> torch.Tensor:
    """(N,): a column of the responses; those without a token have none."""
    return torch.from_numpy(np.concatenate([r.columns[name] for r in responses if len(r.token_ids)]))
