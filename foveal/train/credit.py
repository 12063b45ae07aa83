"""From scores to advantages: what each token of each response is credited with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from foveal.algorithm import KLController, StepBatch, get_advantage, kl_penalty, rewards_per_token
from foveal.algorithm.batch import mean_per_response
from foveal.config import Config
from foveal.types import Group, Metrics, Response, trained_responses


def needs_old_logprobs(config: Config) -> bool:
    """Whether a separate pass must compute the log-probabilities of the policy before the update.

    With one optimizer step per batch and no KL in the reward, the update's own first forward gives the same numbers.
    """
    actor, algorithm = config.worker.actor, config.algorithm
    one_step = config.data.rollout_batch_size <= actor.global_batch_size and actor.ppo_epochs == 1
    kl_in_reward = not algorithm.disable_kl and not algorithm.use_kl_loss
    return not one_step or kl_in_reward


def assign_credit(groups: Sequence[Group], config: Config, kl: KLController) -> Metrics:
    """Stores the columns `token_rewards`, `advantages` and `returns` of every trained response.

    The token rewards hold the score at the last token, minus the KL penalty where it is taken from the reward (then the
    columns `old_logprobs` and `ref_logprobs` must be there).

    Returns:
        `actor/kl_penalty` and `actor/kl_coef` where the KL is taken from the reward, as EasyR1 names them.
    """
    pairs = [(index, response) for index, response in trained_responses(list(groups)) if len(response.token_ids)]
    if not pairs:
        return {}
    responses = [response for _, response in pairs]
    lengths = torch.tensor([len(r.token_ids) for r in responses])
    scores = torch.tensor([r.rewards["overall"] for r in responses], dtype=torch.float32)
    mask = torch.ones(int(lengths.sum()), dtype=torch.bool)
    metrics: Metrics = {}
    penalty = None
    algorithm = config.algorithm
    if not algorithm.disable_kl and not algorithm.use_kl_loss:
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
    )
    result = get_advantage(algorithm.adv_estimator)(batch, algorithm)
    for name, values in (
        ("token_rewards", token_rewards),
        ("advantages", result.advantages),
        ("returns", result.returns),
    ):
        for response, piece in zip(responses, values.split(lengths.tolist()), strict=True):
            response.columns[name] = piece.to(torch.float32).numpy().copy()
    return metrics


def logprob_gap(groups: Sequence[Group]) -> Metrics:
    """How far the engine's log-probabilities lie from the trainer's, over the tokens that have both."""
    pairs = [(r.logprobs, r.columns["old_logprobs"]) for g in groups for r in g.trained if "old_logprobs" in r.columns]
    if not pairs:
        return {}
    gap = np.abs(np.concatenate([engine - trainer for engine, trainer in pairs]))
    return {"rollout/logprob_gap/mean": float(gap.mean()), "rollout/logprob_gap/max": float(gap.max())}


def _column(responses: Sequence[Response], name: str) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([r.columns[name] for r in responses]))
