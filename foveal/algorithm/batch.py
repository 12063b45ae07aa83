"""What advantages and losses are computed from: flat ragged tensors, nothing padded.

N is the number of all response tokens, R the number of responses. The tokens of response 0 come first, then those of
response 1, and so on; `lengths` says where each ends. A response may be empty (length 0). `mask` is True on tokens that
the model wrote; a response may also hold others (tool results), which take no part in any loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


class AdvantageConfig(Protocol):
    """The settings that estimators read; `config.algorithm` has them."""

    @property
    def gamma(self) -> float: ...
    @property
    def lam(self) -> float: ...
    @property
    def reward_parts(self) -> Mapping[str, float]: ...


class LossConfig(Protocol):
    """The settings that policy losses read; `config.worker.actor` has them."""

    @property
    def clip_ratio_low(self) -> float: ...
    @property
    def clip_ratio_high(self) -> float: ...
    @property
    def clip_ratio_dual(self) -> float: ...
    @property
    def tau_positive(self) -> float: ...
    @property
    def tau_negative(self) -> float: ...


@dataclass
class StepBatch:
    """All trained responses of one step, of every group and every process.

    Attributes:
        scores: (R,) float, the overall reward of each response.
        group: (R,) int64, which group (prompt) a response belongs to; any numbers, in any order.
        lengths: (R,) int64, tokens per response; their sum is N.
        token_rewards: (N,) float, as `rewards_per_token` makes them. Its dtype is that of the results.
        mask: (N,) bool, True on tokens that the model wrote.
        baselines: (R,) float, ReMax: the score of the greedy answer to the response's prompt, NaN where it has none.
        values: (N,) float, the critic's value of the state before each token.
        parts: GDPO: by name, further numbers of the reward function, each (R,) float, NaN where an answer has none.

    Raises:
        ValueError: the shapes do not fit together.
    """

    scores: Tensor
    group: Tensor
    lengths: Tensor
    token_rewards: Tensor
    mask: Tensor
    baselines: Tensor | None = None
    values: Tensor | None = None
    parts: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        responses, tokens = self.lengths.shape[0], int(self.lengths.sum())
        _check_shapes("StepBatch", responses, scores=self.scores, group=self.group, baselines=self.baselines)
        _check_shapes("StepBatch.parts", responses, **(self.parts or {}))
        _check_shapes("StepBatch", tokens, token_rewards=self.token_rewards, mask=self.mask, values=self.values)

    @cached_property
    def sequence(self) -> Tensor:
        """(N,) int64: the index of each token's response."""
        return sequence_index(self.lengths, self.token_rewards.shape[0])

    @cached_property
    def totals(self) -> Tensor:
        """(R,) float64: the sum of a response's token rewards, so less any KL; of an empty response its score."""
        totals = torch.zeros_like(self.scores, dtype=torch.float64)
        totals.index_add_(0, self.sequence, self.token_rewards.double())
        return torch.where(self.lengths > 0, totals, self.scores.double())


@dataclass
class Advantages:
    """What an estimator returns.

    Attributes:
        advantages: (N,) in the dtype of `token_rewards`; 0 on tokens that the model did not write.
        returns: (N,) likewise: what a critic is trained towards. Estimators that give every token of a response the
            same advantage repeat it here.
    """

    advantages: Tensor
    returns: Tensor


@dataclass
class LossBatch:
    """The responses of one micro-batch, each of them whole.

    Attributes:
        logprobs: (N,) float, under the policy that is being trained; carries the gradient.
        old_logprobs: (N,) float, under the policy that the step began with.
        advantages: (N,) float.
        lengths: (R,) int64, tokens per response; their sum is N.
        mask: (N,) bool, True on tokens that the model wrote.

    Raises:
        ValueError: the (N,) tensors differ in shape.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    lengths: Tensor
    mask: Tensor

    def __post_init__(self) -> None:
        # The sum of the lengths is not compared with N here: on a GPU that would wait for the device in every
        # micro-batch.
        tokens = self.logprobs.shape[0]
        _check_shapes("LossBatch", tokens, old_logprobs=self.old_logprobs, advantages=self.advantages, mask=self.mask)


def sequence_index(lengths: Tensor, tokens: int) -> Tensor:
    """(N,) int64: the index of each token's response, from lengths (R,) int64 that sum to N = `tokens`."""
    responses = torch.arange(lengths.shape[0], device=lengths.device)
    return responses.repeat_interleave(lengths, output_size=tokens)


def mean_per_response(values: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    """(R,): the mean of `values` (N,) over each response's masked-in tokens; 0 where it has none. Differentiable.

    Sums in float64, so that the result hardly depends on which responses share a micro-batch.
    """
    sequence = sequence_index(lengths, values.shape[0])
    kept = torch.where(mask, values, 0.0).double()
    sums = torch.zeros(lengths.shape[0], dtype=torch.float64, device=values.device).index_add(0, sequence, kept)
    return (sums / written_tokens(lengths, mask).clamp(min=1)).to(values.dtype)


def written_tokens(lengths: Tensor, mask: Tensor) -> Tensor:
    """(R,) int64: how many tokens of each response the model wrote."""
    counts = torch.zeros_like(lengths)
    return counts.index_add_(0, sequence_index(lengths, mask.shape[0]), mask.to(lengths.dtype))


def rewards_per_token(
    scores: Tensor, lengths: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Places each response's score on its last token, and takes the KL from the reward where that is asked for.

    r_t = score · [t is the last token] − kl_coef · kl_t, the last token being the last that the model wrote (the last
    of all when it wrote none). This is the reward of InstructGPT (arXiv 2203.02155, eq. 2), token by token.

    Args:
        scores: (R,) float. lengths: (R,) int64. mask: (N,) bool.
        kl: (N,) float from `kl_penalty`, between the step's old policy and the reference; None when not in the reward.
        kl_coef: the coefficient, from a `KLController`.

    Returns:
        (N,) in the dtype of `scores`. The score of an empty response has no token to stand on.
    """
    tokens = mask.shape[0]
    sequence = sequence_index(lengths, tokens)
    position = torch.arange(tokens, device=scores.device)
    # A written token outranks every token that is not, whatever their positions.
    rank = torch.where(mask, position + tokens, position)
    last = torch.full_like(lengths, -1).scatter_reduce(0, sequence, rank, "amax")
    rewards = torch.where(rank == last[sequence], scores[sequence], torch.zeros_like(scores[sequence]))
    if kl is not None:
        rewards = rewards - kl_coef * torch.where(mask, kl, 0.0).to(scores.dtype)
    return rewards


def _check_shapes(owner: str, size: int, /, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != (size,):
            raise ValueError(f"{owner}.{name} has shape {tuple(tensor.shape)}, but must have ({size},)")
