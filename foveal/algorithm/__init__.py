"""Advantages, policy losses, KL and averaging: pure functions of tensors, which know no model, device or process."""

from foveal.algorithm import advantages, losses  # noqa: F401  (importing them registers what they hold)
from foveal.algorithm.aggregate import aggregate, count
from foveal.algorithm.batch import Advantages, LossBatch, StepBatch, mean_per_response, rewards_per_token
from foveal.algorithm.correction import gap_metrics, importance_weights
from foveal.algorithm.distribution import entropy, kl_full
from foveal.algorithm.kl import KLController, kl_penalty
from foveal.algorithm.registry import (
    AdvantageEstimator,
    get_advantage,
    get_loss,
    register_advantage,
    register_loss,
)

__all__ = [
    "AdvantageEstimator",
    "Advantages",
    "KLController",
    "LossBatch",
    "StepBatch",
    "aggregate",
    "count",
    "entropy",
    "gap_metrics",
    "get_advantage",
    "get_loss",
    "importance_weights",
    "kl_full",
    "kl_penalty",
    "mean_per_response",
    "register_advantage",
    "register_loss",
    "rewards_per_token",
]
