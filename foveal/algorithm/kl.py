"""KL to the reference policy: estimators from the sampled tokens, and the coefficient's controller."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from foveal.errors import ConfigError

KINDS = ("kl", "abs", "mse", "low_var_kl")
LOG_RATIO_LIMIT = 20.0
LOW_VAR_LIMIT = 10.0


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Estimates KL(π ‖ π_ref) token by token, from the log-probabilities of the tokens that π sampled.

    With d = log π − log π_ref (J. Schulman, "Approximating KL divergence", 2020, http://joschu.net/blog/kl-approx.html):
    `kl` (k1) d · `abs` |d| · `mse` (k2) d²/2 · `low_var_kl` (k3) exp(−d) − 1 + d, as in GRPO (arXiv 2402.03300, eq. 4).
    As in EasyR1, k3 clamps d to ±20 and the result to at most 10; beyond these it has no gradient. k1 in a loss has a
    gradient of mean zero on the policy's own samples: it is meant for the reward.

    Args:
        logprobs, ref_logprobs: (N,) float; half precision is computed in float32.
        kind: as in `algorithm.kl_penalty`.

    Returns:
        (N,) float32, or float64 if given so.

    Raises:
        ConfigError: the kind is not one of those.
    """
    if kind not in KINDS:
        reason = "needs the whole distribution, not only the sampled tokens'" if kind == "full" else "is not known"
        raise ConfigError(f"algorithm.kl_penalty={kind} {reason}. Allowed: {', '.join(KINDS)}")
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    difference = logprobs.to(dtype) - ref_logprobs.to(dtype)
    if kind == "kl":
        return difference
    if kind == "abs":
        return difference.abs()
    if kind == "mse":
        return 0.5 * difference.square()
    difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # expm1 keeps the digits that exp(−d) − 1 loses near d = 0.
    return (torch.expm1(-difference) + difference).clamp(max=LOW_VAR_LIMIT)


class KLController:
    """The coefficient of the KL that is taken from the reward: fixed, or steered towards a target.

    Adaptive: coef ← coef · (1 + clip(KL / target − 1, −0.2, 0.2) · responses / horizon) once a step; Ziegler et al.,
    arXiv 1909.08593, section 2.2. (A KL in the loss has a constant coefficient, as in EasyR1.)

    Args:
        kl_coef: where it starts. kl_type: "fixed" or "adaptive". kl_target: KL per token, above 0.
        kl_horizon: in responses, above 0.

    Raises:
        ConfigError: an adaptive one without a positive target and horizon, or another type.
    """

    def __init__(
        self,
        kl_coef: float,
        kl_type: Literal["fixed", "adaptive"] = "fixed",
        kl_target: float = 0.1,
        kl_horizon: float = 10000.0,
    ):
        if kl_type not in ("fixed", "adaptive"):
            raise ConfigError(f"algorithm.kl_type={kl_type} is not known. Allowed: fixed, adaptive")
        if kl_type == "adaptive" and not (kl_target > 0 and kl_horizon > 0):
            raise ConfigError(
                "algorithm.kl_type=adaptive needs kl_target and kl_horizon above 0; "
                f"given: kl_target={kl_target}, kl_horizon={kl_horizon}"
            )
        self.kl_coef = kl_coef
        self.kl_type = kl_type
        self.kl_target = kl_target
        self.kl_horizon = kl_horizon

    def update(self, current_kl: float, responses: int) -> None:
        """Moves an adaptive coefficient after a step.

        Args:
            current_kl: mean over the step's responses of the mean KL over the response's tokens.
            responses: how many responses the step trained on.
        """
        if self.kl_type == "adaptive":
            error = min(max(current_kl / self.kl_target - 1.0, -0.2), 0.2)
            self.kl_coef *= 1.0 + error * responses / self.kl_horizon

    def state_dict(self) -> dict[str, float]:
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Goes on from a saved coefficient; a fixed one keeps what the configuration says."""
        if self.kl_type == "adaptive":
            self.kl_coef = state["kl_coef"]
