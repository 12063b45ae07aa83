"""A step of several optimizer steps against a plain loop over tokens: weights and metrics, for every loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from foveal.algorithm import KLController
from foveal.config import Config, load_config
from foveal.models.loading import load_model
from foveal.quickstart.tiny import build_tiny
from foveal.train.credit import assign_credit
from foveal.train.layout import PromptLayouts
from foveal.train.policy import Policy
from foveal.train.scorer import TokenScorer
from foveal.train.scoring import Packer
from foveal.types import Group, Metrics, Response, trained_responses
from tests.random_groups import naive_logprobs, random_groups

CPU = torch.device("cpu")
KL_COEF, RATE = 0.3, 0.02
COMBINATIONS = [
    ("default", "token", "low_var_kl", "none", 0.0),
    ("default", "seq", "mse", "tis", 0.1),
    ("gspo", "seq", "abs", "none", 0.0),
    ("gspo_token", "seq", "kl", "mis", 0.0),
    ("cispo", "token", "low_var_kl", "icepop", 0.1),
    ("sapo", "seq_sum_norm", "mse", "tis_seq", 0.0),
    ("policy_gradient", "seq_sum_norm", "low_var_kl", "tis", 0.1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


def settings(loss: str, mode: str, kl: str, correction: str, entropy: float) -> Config:
    """Batches of three prompts, each gone through twice."""
    return load_config(
        [
            "worker.rollout.n=3",
            "data.rollout_batch_size=6",
            "worker.actor.global_batch_size=3",
            "worker.actor.ppo_epochs=2",
            "worker.actor.max_grad_norm=1.0e9",
            f"worker.actor.optim.lr={RATE}",
            f"worker.actor.loss_type={loss}",
            f"worker.actor.loss_avg_mode={mode}",
            f"worker.actor.entropy_coef={entropy}",
            "worker.actor.loss_sum_norm=5",
            "worker.actor.clip_ratio_dual=1.5",
            "algorithm.use_kl_loss=true",
            f"algorithm.kl_penalty={kl}",
            f"algorithm.correction={correction}",
        ]
    )


def prepared_groups(policy: Policy) -> list[Group]:
    """Four groups, fewer than a step has; one has an answer that was left out, and the second answers of one token."""
    groups = random_groups(policy.model, [1, 0, 0, 2])
    groups[0].responses[1].role = "left_out"
    for response in groups[1].responses:
        response.token_ids, response.logprobs = response.token_ids[:1], response.logprobs[:1]
    policy.logprobs(groups)
    rng = np.random.default_rng(1)
    for _, response in trained_responses(groups):
        exact = response.columns["old_logprobs"]
        response.columns["old_logprobs"] = exact + rng.normal(0, 0.3, exact.shape).astype(np.float32)
        response.columns["ref_logprobs"] = exact + rng.normal(0, 0.3, exact.shape).astype(np.float32)
        response.logprobs = exact + rng.normal(0, 0.5, exact.shape).astype(np.float32)
    assign_credit(groups, policy.config, KLController(KL_COEF))
    return groups


def clipped(config: Config, ratio: torch.Tensor, advantage: float, value: float) -> torch.Tensor:
    """Of one token; `value` is that of the ratio."""
    actor = config.worker.actor
    low, high = 1 - actor.clip_ratio_low, 1 + actor.clip_ratio_high
    bound = min(max(value, low), high)
    if advantage < 0 and max(-advantage * value, -advantage * bound) > -advantage * actor.clip_ratio_dual:
        return torch.tensor(-advantage * actor.clip_ratio_dual)
    return -advantage * ratio if -advantage * value >= -advantage * bound else torch.tensor(-advantage * bound)


def token_loss(config: Config, new: torch.Tensor, old: torch.Tensor, advantage: float, t: int) -> torch.Tensor:
    """The loss of token `t` of an answer with these log-probabilities."""
    actor = config.worker.actor
    kind, ratio = actor.loss_type, (new[t] - old[t]).exp()
    if kind == "policy_gradient":
        return -advantage * new[t]
    if kind == "cispo":
        return -advantage * min(max(ratio.item(), 1 - actor.clip_ratio_low), 1 + actor.clip_ratio_high) * new[t]
    if kind == "sapo":
        tau = actor.tau_negative if advantage < 0 else actor.tau_positive
        return -advantage * 4 / tau / (1 + (-tau * (ratio - 1)).exp())
    if kind == "gspo":
        ratio = (new - old).mean().exp()
    elif kind == "gspo_token":
        ratio = (new - old).mean().exp().item() * (new[t] - new[t].item()).exp()
    return clipped(config, ratio, advantage, ratio.item())


def weight(config: Config, response: Response, t: int) -> float:
    """Of token `t`, for what the sampler's probabilities differ."""
    kind, (low, high) = config.algorithm.correction, config.algorithm.correction_bounds
    if kind == "none":
        return 1.0
    gaps = (response.columns["old_logprobs"] - response.logprobs).astype(np.float64)
    ratio = math.exp(gaps.sum() if kind in ("tis_seq", "mis") else gaps[t])
    if kind.startswith("tis"):
        return min(ratio, high)
    return ratio if low <= ratio <= high else 0.0


def kl(kind: str, difference: torch.Tensor) -> torch.Tensor:
    match kind:
        case "kl":
            return difference
        case "abs":
            return difference.abs()
        case "mse":
            return difference**2 / 2
    return (-difference).exp() - 1 + difference


def entropies(model: Any, group: Group, response: Response) -> torch.Tensor:
    """(L,) by a plain forward of prompt and answer alone."""
    ids = torch.tensor([[*group.prompt.expanded_ids, *response.token_ids.tolist()]])
    extra: dict[str, torch.Tensor] = dict(group.prompt.features or {})
    if extra:
        extra["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    logprobs = model(input_ids=ids, **extra).logits[0, len(group.prompt.expanded_ids) - 1 : -1].log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def plain_step(model: Any, config: Config, groups: list[Group], rate: float) -> tuple[dict[str, float], int]:
    """One optimizer step, tokens one by one; returns what the metrics add up, and the number of tokens."""
    actor = config.worker.actor
    pairs = [(groups[index], response) for index, response in trained_responses(groups)]
    tokens = sum(len(response.token_ids) for _, response in pairs)
    sums = dict.fromkeys(("pg_loss", "kl_loss", "ppo_kl", "entropy_loss", "entropy"), 0.0)
    total = torch.zeros(())
    for group, response in pairs:
        new = naive_logprobs(model, group, response, [], 1.0)
        old, ref = (torch.from_numpy(response.columns[name]) for name in ("old_logprobs", "ref_logprobs"))
        found, length = entropies(model, group, response), len(response.token_ids)
        share = {"token": 1 / tokens, "seq": 1 / length / len(pairs), "seq_sum_norm": 1 / 5 / len(pairs)}
        for t in range(length):
            advantage = float(response.columns["advantages"][t])
            loss = token_loss(config, new, old, advantage, t) * weight(config, response, t) * share[actor.loss_avg_mode]
            distance = kl(config.algorithm.kl_penalty, new[t] - ref[t]) * share[actor.loss_avg_mode]
            total = total + loss + KL_COEF * distance - actor.entropy_coef * found[t] * share[actor.loss_avg_mode]
            parts = (loss, distance, old[t] - new[t], -new[t], found[t])
            for name, part in zip(sums, parts, strict=True):
                sums[name] += part.item()
    model.zero_grad()
    total.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= rate * parameter.grad
    return sums, tokens


def plain_update(model: Any, config: Config, groups: list[Group]) -> Metrics:
    """Two passes over a batch of three groups and one of one."""
    sums: dict[str, float] = {}
    tokens = 0
    for batch in [groups[:3], groups[3:]] * 2:
        found, count = plain_step(model, config, batch, RATE)
        tokens += count
        sums = {name: sums.get(name, 0.0) + value for name, value in found.items()}
    return {f"actor/{name}": value / (4 if name in ("pg_loss", "kl_loss") else tokens) for name, value in sums.items()}


@pytest.mark.parametrize(("loss", "mode", "penalty", "correction", "entropy"), COMBINATIONS)
def test_an_update_is_that_of_a_plain_loop(
    folder: Path, loss: str, mode: str, penalty: str, correction: str, entropy: float
) -> None:
    config = settings(loss, mode, penalty, correction, entropy)
    model: Any = load_model(str(folder), dtype=torch.float32, device=CPU)
    scorer = TokenScorer(model, forbidden_ids=[], temperature=1.0, autocast=None)
    packer = Packer(30, True, PromptLayouts(model, lambda p: p.features or {}), CPU)
    policy = Policy(config, scorer, packer, packer)
    policy.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    groups = prepared_groups(policy)
    plain: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    start = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}

    expected = plain_update(plain, config, groups)
    metrics = policy.update(groups, step=1, total_steps=1, kl_coef=KL_COEF)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    found = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        moved = parameter.detach() - start[name]
        assert (found[name] - parameter).norm().item() <= 1e-3 * moved.norm().item() + 1e-7, name
