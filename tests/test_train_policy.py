"""One trainer step: the gradient is the plain GRPO gradient, whatever the micro-batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from foveal.algorithm import KLController
from foveal.config import load_config
from foveal.config.schema_worker import POLICY_LOSSES
from foveal.models.loading import load_model
from foveal.models.vision import vision_tower
from foveal.quickstart.tiny import build_tiny
from foveal.train.credit import assign_credit, needs_old_logprobs
from foveal.train.layout import PromptLayouts
from foveal.train.optim import learning_rate
from foveal.train.policy import Policy
from foveal.train.scorer import TokenScorer
from foveal.train.scoring import Packer
from foveal.types import Group
from tests.random_groups import naive_logprobs, random_groups

CPU = torch.device("cpu")
FORBIDDEN = [201, 202]
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model"), "qwen3_vl")


class Recorder(torch.optim.SGD):
    """Keeps the gradient of the last step instead of moving along it."""

    def step(self, closure: Any = None) -> None:
        self.taken = {id(p): p.grad.clone() for group in self.param_groups for p in group["params"]}


def make_policy(folder: Path, *overrides: str, budget: int = 10**6, shared: bool = True) -> Policy:
    config = load_config(
        [
            "worker.rollout.n=3",
            "data.rollout_batch_size=4",
            "worker.actor.global_batch_size=4",
            "algorithm.use_kl_loss=true",
            "algorithm.kl_penalty=low_var_kl",
            "algorithm.kl_coef=0.5",
            "worker.actor.max_grad_norm=1.0e9",
            *overrides,
        ]
    )
    model: Any = load_model(str(folder), dtype=torch.float32, device=CPU)
    scorer = TokenScorer(model, forbidden_ids=FORBIDDEN, temperature=TEMPERATURE, autocast=None)
    packer = Packer(budget, shared, PromptLayouts(model, lambda p: p.features or {}), CPU)
    policy = Policy(config, scorer, packer, packer)
    policy.optimizer = Recorder(model.parameters(), lr=1.0)
    return policy


def prepared_groups(policy: Policy) -> list[Group]:
    """Groups with advantages, and old and reference log-probabilities some way off the policy's."""
    groups = random_groups(policy.model, [1, 0, 2, 0])
    policy.logprobs(groups)
    rng = np.random.default_rng(1)
    for group in groups:
        for response in group.responses:
            exact = response.columns["old_logprobs"]
            response.columns["old_logprobs"] = exact + rng.normal(0, 0.3, exact.shape).astype(np.float32)
            response.columns["ref_logprobs"] = exact + rng.normal(0, 0.3, exact.shape).astype(np.float32)
    assign_credit(groups, policy.config, KLController(0.5))
    return groups


def step_taken(policy: Policy, groups: list[Group]) -> dict[str, torch.Tensor]:
    """The gradient of the one optimizer step, empty if none was taken."""
    policy.update(groups, step=1, total_steps=1, kl_coef=0.5)
    taken = getattr(policy.optimizer, "taken", {})
    return {name: taken[id(p)] for name, p in policy.model.named_parameters() if id(p) in taken}


def furthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(float((found[k] - expected[k]).norm() / expected[k].norm().clamp(min=1e-9)) for k in expected)


@pytest.mark.parametrize("mode", ["token", "seq"])
def test_the_gradient_is_that_of_a_plain_implementation(folder: Path, mode: str) -> None:
    policy = make_policy(folder, f"worker.actor.loss_avg_mode={mode}")
    groups = prepared_groups(policy)
    found = step_taken(policy, groups)

    plain: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    actor = policy.config.worker.actor
    token_losses, means = [], []
    for group in groups:
        scores = torch.tensor([r.rewards["overall"] for r in group.responses], dtype=torch.float64)
        for response, advantage in zip(group.responses, (scores - scores.mean()) / (scores.std() + 1e-6), strict=True):
            logp = naive_logprobs(plain, group, response, FORBIDDEN, TEMPERATURE)
            old, ref = (torch.from_numpy(response.columns[c]) for c in ("old_logprobs", "ref_logprobs"))
            ratio = (logp - old).exp()
            clipped = ratio.clamp(1 - actor.clip_ratio_low, 1 + actor.clip_ratio_high)
            loss = torch.maximum(-advantage * ratio, -advantage * clipped)
            if advantage < 0:
                loss = torch.minimum(loss, -advantage * actor.clip_ratio_dual)
            loss = loss + 0.5 * ((ref - logp).exp() - (ref - logp) - 1)
            token_losses.append(loss)
            means.append(loss.mean())
    (torch.cat(token_losses).mean() if mode == "token" else torch.stack(means).mean()).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert furthest(found, expected) < 1e-5


@pytest.mark.parametrize("mode", ["token", "seq"])
@pytest.mark.parametrize(("budget", "shared"), [(40, True), (20, True), (60, False)])
def test_the_step_does_not_depend_on_the_micro_batches(folder: Path, mode: str, budget: int, shared: bool) -> None:
    option = f"worker.actor.loss_avg_mode={mode}"
    whole = make_policy(folder, option)
    groups = prepared_groups(whole)
    expected = step_taken(whole, groups)
    cut = make_policy(folder, option, budget=budget, shared=shared)
    assert len(list(cut.packer.packs(groups))) > 1
    assert furthest(step_taken(cut, groups), expected) < 1e-5


@pytest.mark.parametrize("mode", ["token", "seq", "seq_sum_norm"])
@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_no_loss_depends_on_micro_batches_or_on_the_order(folder: Path, loss: str, mode: str) -> None:
    options = [
        f"worker.actor.loss_type={loss}",
        f"worker.actor.loss_avg_mode={mode}",
        "worker.actor.entropy_coef=0.1",
        "algorithm.correction=tis",
    ]
    whole = make_policy(folder, *options)
    groups = prepared_groups(whole)
    expected = step_taken(whole, groups)
    cut = make_policy(folder, *options, budget=25)
    reordered = [groups[i] for i in (2, 0, 3, 1)]
    assert furthest(step_taken(cut, reordered), expected) < 1e-5


def test_zero_advantages_without_kl_move_nothing(folder: Path) -> None:
    policy = make_policy(folder, "algorithm.disable_kl=true")
    groups = prepared_groups(policy)
    for group in groups:
        for response in group.responses:
            response.columns["advantages"][:] = 0
    taken = step_taken(policy, groups)
    assert taken and all(float(d.abs().max()) == 0 for d in taken.values())


def test_without_an_old_pass_the_ratio_starts_at_one(folder: Path) -> None:
    policy = make_policy(folder)
    groups = prepared_groups(policy)
    for group in groups:
        for response in group.responses:
            del response.columns["old_logprobs"]
    metrics = policy.update(groups, step=1, total_steps=1, kl_coef=0.5)
    assert metrics["actor/ppo_kl"] == 0 and metrics["actor/pg_clipfrac_higher"] == 0
    assert all("old_logprobs" in r.columns for g in groups for r in g.responses)


def test_a_gradient_that_is_not_finite_is_not_stepped_along(folder: Path) -> None:
    policy = make_policy(folder)
    groups = prepared_groups(policy)
    groups[0].responses[0].columns["advantages"][:] = np.nan
    assert not step_taken(policy, groups)


def test_a_batch_with_every_answer_left_out_is_skipped(folder: Path) -> None:
    policy = make_policy(folder)
    groups = prepared_groups(policy)
    for group in groups:
        for response in group.responses:
            response.role = "left_out"
    metrics = policy.update(groups, step=1, total_steps=1, kl_coef=0.5)
    assert metrics["actor/empty_steps"] == 1


def test_a_vision_tower_alone_learns_from_answers_to_pictures_only(folder: Path) -> None:
    policy = make_policy(folder, budget=20)  # most micro-batches hold text alone
    for parameter in policy.model.parameters():
        parameter.requires_grad_(False)
    trained = list(vision_tower(policy.model).parameters())  # type: ignore[union-attr]
    for parameter in trained:
        parameter.requires_grad_(True)
    policy.optimizer = torch.optim.SGD(trained, lr=0.1)
    groups = prepared_groups(policy)
    before = [parameter.clone() for parameter in trained]
    metrics = policy.update(groups[1::2], 1, 10, 0.5)
    assert metrics["actor/grad_norm"] == 0 and all(map(torch.equal, trained, before))
    assert policy.update(groups, 1, 10, 0.5)["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ([], False),
        (["worker.actor.global_batch_size=2"], True),
        (["worker.actor.ppo_epochs=2"], True),
        (["algorithm.use_kl_loss=false"], True),
        (["algorithm.use_kl_loss=false", "algorithm.disable_kl=true"], False),
    ],
)
def test_the_old_pass_is_skipped_only_where_it_changes_nothing(overrides: list[str], needed: bool) -> None:
    base = ["data.rollout_batch_size=4", "worker.actor.global_batch_size=4", "worker.rollout.n=2"]
    assert needs_old_logprobs(load_config([*base, "algorithm.use_kl_loss=true", *overrides])) is needed


def test_learning_rate_warms_up_then_follows_the_schedule() -> None:
    base = ["worker.rollout.n=2", "worker.actor.optim.lr=1.0", "worker.actor.optim.lr_warmup_steps=2"]
    constant = load_config(base)
    assert [learning_rate(s, 6, constant.worker.actor.optim) for s in (1, 2, 3, 6)] == [0.5, 1.0, 1.0, 1.0]
    cosine = load_config([*base, "worker.actor.optim.lr_scheduler_type=cosine", "worker.actor.optim.min_lr_ratio=0.1"])
    rates = [learning_rate(s, 6, cosine.worker.actor.optim) for s in (1, 2, 3, 5, 6)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.55 - 0.45 * math.sqrt(0.5)])
    ratio = load_config([*base[:2], "worker.actor.optim.lr_warmup_ratio=0.5"])
    assert learning_rate(3, 8, ratio.worker.actor.optim) == 0.75


@pytest.mark.parametrize("total", [1, 2, 7])
def test_no_step_of_a_cosine_is_wasted_at_rate_zero(total: int) -> None:
    config = load_config(["worker.rollout.n=2", "worker.actor.optim.lr_scheduler_type=cosine"])
    optim = config.worker.actor.optim
    found = [learning_rate(step, total, optim) for step in range(1, total + 1)]
    expected = [optim.lr * 0.5 * (1 + math.cos(math.pi * done / total)) for done in range(total)]
    assert found == pytest.approx(expected) and min(found) > 0


def test_the_policys_warm_up_begins_after_that_of_the_critic(folder: Path) -> None:
    argv = ["trainer.critic_warmup=3", "worker.actor.optim.lr=1.0", "worker.actor.optim.lr_warmup_steps=2"]
    gae = ["algorithm.adv_estimator=gae", "worker.critic.global_batch_size=4"]
    for estimator, expected in ((gae, [0.5, 1.0, 1.0]), ([], [1.0, 1.0, 1.0])):
        policy = make_policy(folder, *argv, *estimator)
        assert [policy.update([], step, 6, 0.5)["actor/lr"] for step in (4, 5, 6)] == expected


def test_answers_of_an_earlier_policy_keep_its_log_probabilities(folder: Path) -> None:
    """What dynamic sampling left over from the step before is off-policy, and the ratio must say so."""
    policy = make_policy(folder)
    groups = prepared_groups(policy)
    for group in groups[1:]:
        for response in group.responses:
            del response.columns["old_logprobs"]
    kept = [r.columns["old_logprobs"].copy() for r in groups[0].responses]
    metrics = policy.update(groups, step=1, total_steps=1, kl_coef=0.5)
    assert metrics["actor/ppo_kl"] != 0
    found = [r.columns["old_logprobs"] for r in groups[0].responses]
    assert all(np.array_equal(a, b) for a, b in zip(found, kept, strict=True))


def test_what_an_update_takes_is_told_by_passes_beside_gradients(tmp_path: Path) -> None:
    """At the peak of an optimizer step's first micro-batch no gradient has taken memory yet."""
    policy = make_policy(build_tiny(tmp_path, "qwen3_vl"), "algorithm.disable_kl=true", budget=60)
    groups = prepared_groups(policy)
    sizes = [policy.packer.tokens(parts) for parts in policy.packer.split(groups)]
    assert len(sizes) > 1
    step_taken(policy, groups)
    assert policy.packer.largest == max(sizes[1:])
