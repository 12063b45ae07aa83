"""The policy: the model that is trained, and one step of training it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from foveal.algorithm import LossBatch, aggregate, get_advantage, get_loss, importance_weights, kl_penalty
from foveal.config import Config
from foveal.train.optim import build_optimizer, set_learning_rate
from foveal.train.packing import Pack, store
from foveal.train.scorer import Reference, TokenScorer
from foveal.train.scoring import Packer, write_logprobs
from foveal.train.sharding import reshard
from foveal.train.step import optimizer_batches, optimizer_step
from foveal.types import Group, Metrics


class Policy:
    """Holds the trained model and its optimizer.

    Args:
        config: the whole configuration.
        scorer: the model, ready to score packed responses.
        packer: how to lay groups out for the update pass.
        experience_packer: the same for passes without gradients, which can take more tokens at once.
        reference: the reference policy, where the exact KL to it is part of the loss.
    """

    def __init__(
        self,
        config: Config,
        scorer: TokenScorer,
        packer: Packer,
        experience_packer: Packer,
        reference: Reference | None = None,
    ) -> None:
        self.config = config
        self.scorer = scorer
        self.packer = packer
        self.experience_packer = experience_packer
        self.reference = reference
        self._untouched = True  # the weights are still those that the step began with
        self.optimizer = build_optimizer(scorer.model, config.worker.actor.optim)
        self.loss = get_loss(config.worker.actor.loss_type)
        has_critic = get_advantage(config.algorithm.adv_estimator).needs_values
        self._waits = config.trainer.critic_warmup if has_critic else 0

    @property
    def model(self) -> nn.Module:
        return self.scorer.model

    def logprobs(self, groups: Sequence[Group]) -> None:
        """Stores the current policy's log-probabilities as the column `old_logprobs` where there is none yet."""
        write_logprobs(self.scorer, self.experience_packer, groups, "old_logprobs")

    def update(
        self,
        groups: Sequence[Group],
        step: int,
        total_steps: int,
        kl_coef: float,
        sizes: Sequence[int] | None = None,
    ) -> Metrics:
        """Trains on one step's groups: `ppo_epochs` passes, one optimizer step per `global_batch_size` prompts.

        Every trained response needs the column `advantages`, with `use_kl_loss` also `ref_logprobs`. Where
        `old_logprobs` is absent the current log-probabilities take its place, which is the same thing as long as the
        step has one optimizer step.

        Args:
            step, total_steps: of the run. Warm-up and schedule of the learning rate begin after `critic_warmup`.
            sizes: among several processes, how many of this one's groups go into each optimizer step, as many steps in
                each process; None for `global_batch_size` of them in each.

        Returns:
            means over the step, under EasyR1's names (`actor/pg_loss`, `actor/ppo_kl`, …).
        """
        actor = self.config.worker.actor
        rate = set_learning_rate(self.optimizer, step - self._waits, total_steps - self._waits, actor.optim)
        loss_of = partial(self._loss, kl_coef)
        self.scorer.train()
        sums: dict[str, float] = {}
        for epoch in range(actor.ppo_epochs):
            for number, batch in optimizer_batches(groups, actor.global_batch_size, sizes):
                self._untouched = epoch == 0 and number == 0
                stats = optimizer_step(
                    self.optimizer, self.packer, batch, loss_of, actor.max_grad_norm, "the policy's update"
                )
                for name, value in stats.items():
                    sums[name] = sums.get(name, 0.0) + value
        self.scorer.eval()
        if self.reference is not None:
            reshard(self.reference)
        return self._means(sums, rate, kl_coef)

    def _loss(
        self, kl_coef: float, pack: Pack, total_tokens: int, total_sequences: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The pack's contribution to the loss of the optimizer step, and sums over its tokens for the metrics."""
        actor, algorithm = self.config.worker.actor, self.config.algorithm
        scores = self.scorer(
            pack,
            with_entropy=True,
            reference=self.reference.head(pack) if algorithm.exact_kl_in_loss and self.reference is not None else None,
        )
        logprobs = scores.logprobs
        if any("old_logprobs" not in r.columns for r in pack.responses):
            store(pack.responses, "old_logprobs", logprobs)
        elif self._untouched and algorithm.old_logprobs == "rollout":
            store(pack.responses, "trainer_logprobs", logprobs)  # so that the gap to the engine's can be told
        assert scores.entropy is not None
        if self._untouched and self.config.trainer.log_training_samples:
            store(pack.responses, "entropies", scores.entropy)
        old, lengths = pack.column("old_logprobs"), pack.lengths
        mask = torch.ones_like(logprobs, dtype=torch.bool)

        def mean(values: torch.Tensor) -> torch.Tensor:
            norm = actor.loss_sum_norm or self.config.data.max_response_length
            return aggregate(values, lengths, mask, actor.loss_avg_mode, total_tokens, total_sequences, norm)

        token_losses, sums = self.loss(LossBatch(logprobs, old, pack.column("advantages"), lengths, mask), actor)
        if algorithm.correction != "none":
            low, high = algorithm.correction_bounds
            weights, counts = importance_weights(
                old, pack.sampled_logprobs, lengths, mask, algorithm.correction, low, high
            )
            token_losses = token_losses * weights
            sums = {**sums, **counts}
        loss = mean(token_losses)
        sums = {**sums, "pg_loss": loss, "entropy": scores.entropy.sum()}
        if actor.entropy_coef:
            loss = loss - actor.entropy_coef * mean(scores.entropy)
        if algorithm.kl_in_loss:
            token_kl = scores.kl
            if token_kl is None:
                token_kl = kl_penalty(logprobs, pack.column("ref_logprobs"), algorithm.kl_penalty)
            kl = mean(token_kl)
            loss = loss + kl_coef * kl
            sums["kl_loss"] = kl
        return loss, sums

    def _means(self, sums: dict[str, float], rate: float, kl_coef: float) -> Metrics:
        steps, tokens = sums.pop("steps", 0.0), sums.pop("tokens", 0.0)
        metrics: Metrics = {"actor/lr": rate}
        for name in ("not_finite_steps", "empty_steps"):
            if name in sums:
                metrics[f"actor/{name}"] = sums.pop(name)
        for name in ("grad_norm", "pg_loss", "kl_loss"):  # one number an optimizer step
            if name in sums and steps:
                metrics[f"actor/{name}"] = sums.pop(name) / steps
        for name, value in sums.items():  # sums over tokens
            if tokens:
                metrics[f"actor/{name}"] = value / tokens
        if "actor/kl_loss" in metrics:
            metrics["actor/kl_coef"] = kl_coef
        return metrics
