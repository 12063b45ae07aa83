"""The critic: packed values are the plain ones, and its step does not depend on the micro-batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from foveal.config import load_config
from foveal.data.processing import Processing, load_processing
from foveal.errors import CheckpointError, ModelError
from foveal.quickstart.tiny import Family, build_tiny
from foveal.train.critic import Critic, load_critic
from foveal.train.state import take_state, write_manifest, write_state
from foveal.types import Group
from tests.model_helpers import same_tensors
from tests.random_groups import random_groups

CPU = torch.device("cpu")
PICTURES = {"qwen3_vl": [1, 0, 2, 0], "qwen2_5_vl": [1, 0, 2, 0], "qwen3": [0, 0, 0, 0], "llama": [0, 0, 0, 0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model"), "qwen3_vl", tie=True)


def open_processing(folder: Path) -> Processing:
    return load_processing(
        str(folder),
        tokenizer_path=None,
        trust_remote_code=False,
        min_pixels=None,
        max_pixels=None,
        chat_template=None,
    )


def make_critic(folder: Path, *overrides: str, trained_head: bool = True) -> Critic:
    """A critic whose head, unless new, is not zero."""
    config = load_config(
        [
            f"worker.actor.model.model_path={folder}",
            "algorithm.adv_estimator=gae",
            "data.rollout_batch_size=4",
            "worker.actor.global_batch_size=4",
            "worker.critic.global_batch_size=4",
            "worker.critic.max_grad_norm=1.0e9",
            "worker.critic.optim.lr=1.0e-2",
            "worker.actor.token_budget=1000000",
            *overrides,
        ]
    )
    critic = load_critic(config, open_processing(folder), CPU)
    if trained_head:
        weight = critic.scorer.head.weight
        weight.data.copy_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
        torch.nn.init.constant_(critic.scorer.head.bias, 0.25)
    return critic


def prepared_groups(critic: Critic, pictures: list[int]) -> list[Group]:
    """Groups with returns, which don't cancel in the gradient of the bias, and old values off the critic's."""
    groups = random_groups(critic.scorer.model, pictures)
    critic.values(groups)
    rng = np.random.default_rng(1)
    for response in (r for g in groups for r in g.responses):
        exact = response.columns["values"]
        response.columns["values"] = exact + rng.normal(0, 0.5, exact.shape).astype(np.float32)
        response.columns["returns"] = rng.normal(2, 1, exact.shape).astype(np.float32)
    return groups


class Recorder(torch.optim.SGD):
    """Keeps the gradient of the last step instead of moving along it."""

    def step(self, closure: Any = None) -> None:
        self.taken = {id(p): p.grad.clone() for group in self.param_groups for p in group["params"]}


def step_taken(critic: Critic, groups: list[Group]) -> dict[str, torch.Tensor]:
    """The gradient of the one optimizer step, empty if none was taken."""
    critic.optimizer = Recorder(critic.scorer.parameters(), lr=1.0)
    critic.update(groups, step=1, total_steps=1)
    taken = getattr(critic.optimizer, "taken", {})
    return {name: taken[id(p)] for name, p in critic.scorer.named_parameters() if id(p) in taken}


def furthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(float((found[k] - expected[k]).norm() / expected[k].norm().clamp(min=1e-9)) for k in expected)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen3", "llama"])
def test_values_are_those_of_a_plain_forward(tmp_path: Path, family: Family, shared: bool) -> None:
    folder = build_tiny(tmp_path, family)
    critic = make_critic(folder, f"worker.actor.shared_prefix={str(shared).lower()}")
    groups = random_groups(critic.scorer.model, PICTURES[family])
    critic.values(groups)
    auto: Any = AutoModelForImageTextToText if "vl" in family else AutoModelForCausalLM
    plain = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    for group in groups:
        prompt = group.prompt
        for response in group.responses:
            ids = torch.tensor([[*prompt.expanded_ids, *response.token_ids.tolist()]])
            extra = dict(prompt.features or {})
            if extra:
                extra["mm_token_type_ids"] = (ids == plain.config.image_token_id).int()
            with torch.no_grad():
                states = plain.model(input_ids=ids, **extra).last_hidden_state[0, len(prompt.expanded_ids) - 1 : -1]
                expected = critic.scorer.head(states)[:, 0].numpy()
            np.testing.assert_allclose(response.columns["values"], expected, rtol=0, atol=2e-5)


def test_a_new_critic_values_everything_at_zero(folder: Path) -> None:
    critic = make_critic(folder, trained_head=False)
    groups = random_groups(critic.scorer.model, [1, 0])
    critic.values(groups)
    columns = [r.columns["values"] for g in groups for r in g.responses]
    assert all(c.dtype == np.float32 and not c.any() for c in columns)


@pytest.mark.parametrize("tie", [True, False])
def test_the_language_model_head_is_not_held(tmp_path: Path, tie: bool) -> None:
    critic = make_critic(build_tiny(tmp_path, tie=tie))
    vocabulary = critic.scorer.model.config.get_text_config().vocab_size
    assert sum(vocabulary in p.shape for p in critic.scorer.parameters()) == 1  # the token embedding


def test_weights_in_bfloat16_have_a_value_head_in_float32(folder: Path) -> None:
    critic = make_critic(folder, "worker.critic.fsdp.torch_dtype=bf16")
    groups = prepared_groups(critic, [1, 0])
    head = critic.scorer.head.weight.clone()
    metrics = critic.update(groups, step=1, total_steps=1)
    assert critic.scorer.model.dtype == torch.bfloat16 and critic.scorer.head.weight.dtype == torch.float32
    assert metrics["critic/grad_norm"] > 0 and not torch.equal(critic.scorer.head.weight, head)


@pytest.mark.parametrize("mode", ["token", "seq"])
def test_the_gradient_is_that_of_the_clipped_loss(folder: Path, mode: str) -> None:
    critic = make_critic(folder, f"worker.critic.loss_avg_mode={mode}", "worker.critic.cliprange_value=0.2")
    groups = prepared_groups(critic, [1, 0, 2, 0])
    found = step_taken(critic, groups)
    pack = next(iter(critic.packer.packs(groups)))
    means, losses = [], []
    for response, values in zip(pack.responses, critic.scorer(pack).split(pack.lengths.tolist()), strict=True):
        old, returns = (torch.from_numpy(response.columns[name]) for name in ("values", "returns"))
        near = values.clamp(old - 0.2, old + 0.2)
        loss = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)
        losses.append(loss)
        means.append(loss.mean())
    (torch.cat(losses).mean() if mode == "token" else torch.stack(means).mean()).backward()
    assert furthest(found, {n: p.grad for n, p in critic.scorer.named_parameters() if p.grad is not None}) < 1e-5


@pytest.mark.parametrize("mode", ["token", "seq"])
@pytest.mark.parametrize(("budget", "shared"), [(40, True), (20, True), (60, False)])
def test_the_step_does_not_depend_on_the_micro_batches(folder: Path, mode: str, budget: int, shared: bool) -> None:
    option = f"worker.critic.loss_avg_mode={mode}"
    whole = make_critic(folder, option)
    groups = prepared_groups(whole, [1, 0, 2, 0])
    layout = [f"worker.actor.token_budget={budget}", f"worker.actor.shared_prefix={str(shared).lower()}"]
    cut = make_critic(folder, option, *layout)
    assert len(list(cut.packer.packs(groups))) > 1
    assert furthest(step_taken(cut, groups), step_taken(whole, groups)) < 1e-5


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3"])
def test_the_value_loss_falls_on_a_fixed_batch(tmp_path: Path, family: Family) -> None:
    critic = make_critic(build_tiny(tmp_path, family), trained_head=False)
    groups = random_groups(critic.scorer.model, PICTURES[family])
    for response in (r for g in groups for r in g.responses):
        response.columns["returns"] = np.full(len(response.token_ids), response.rewards["overall"], np.float32)
    losses = []
    for step in range(1, 16):
        for response in (r for g in groups for r in g.responses):
            response.columns.pop("values", None)
        critic.values(groups)
        metrics = critic.update(groups, step, total_steps=15)
        losses.append(metrics["critic/vf_loss"])
        assert metrics["critic/vf_clipfrac"] == 0  # a single optimizer step starts from the old values
    assert losses[-1] < 0.3 * losses[0]


def test_later_optimizer_steps_are_clipped(folder: Path) -> None:
    options = ["worker.critic.ppo_epochs=4", "worker.critic.cliprange_value=0.001"]
    critic = make_critic(folder, *options, trained_head=False)
    groups = random_groups(critic.scorer.model, [1, 0, 2, 0])
    critic.values(groups)
    for response in (r for g in groups for r in g.responses):
        response.columns["returns"] = np.ones(len(response.token_ids), np.float32)
    metrics = critic.update(groups, step=1, total_steps=1)
    assert 0.5 < metrics["critic/vf_clipfrac"] <= 0.75 and metrics["critic/vpred_mean"] > 0


def test_metrics_have_easyr1s_names(folder: Path) -> None:
    critic = make_critic(folder, "worker.critic.optim.lr_warmup_steps=2", "worker.critic.global_batch_size=2")
    metrics = critic.update(prepared_groups(critic, [1, 0, 2, 0]), step=1, total_steps=4)
    names = {"vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr"}
    assert metrics.keys() == {f"critic/{name}" for name in names}
    assert metrics["critic/lr"] == 5e-3


def test_a_gradient_that_is_not_finite_is_not_stepped_along(folder: Path) -> None:
    critic = make_critic(folder)
    groups = prepared_groups(critic, [1, 0])
    groups[0].responses[0].columns["returns"][:] = np.nan
    before = {name: p.clone() for name, p in critic.scorer.named_parameters()}
    assert critic.update(groups, step=1, total_steps=1)["critic/not_finite_steps"] == 1
    assert same_tensors(before, dict(critic.scorer.named_parameters()))


def test_a_batch_with_every_answer_left_out_is_skipped(folder: Path) -> None:
    critic = make_critic(folder)
    groups = prepared_groups(critic, [0])
    for response in groups[0].responses:
        response.role = "left_out"
    assert critic.update(groups, step=1, total_steps=1) == {"critic/lr": 0.01, "critic/empty_steps": 1}


def test_gradients_are_scaled_down_to_the_limit(folder: Path) -> None:
    critic = make_critic(folder, "worker.critic.max_grad_norm=0.5")
    taken = step_taken(critic, prepared_groups(critic, [1, 0]))
    assert float(torch.stack([g.norm() for g in taken.values()]).norm()) == pytest.approx(0.5, rel=1e-4)


def test_training_goes_on_bit_for_bit_after_loading(folder: Path, tmp_path: Path) -> None:
    critic = make_critic(folder)
    groups = prepared_groups(critic, [1, 0, 2, 0])
    critic.update(groups, step=1, total_steps=2)
    write_manifest(tmp_path / "critic", write_state(tmp_path / "critic", take_state(critic.scorer, critic.optimizer)))
    again = make_critic(folder, trained_head=False)
    again.load(tmp_path / "critic")
    assert same_tensors(again.scorer.state_dict(), critic.scorer.state_dict())
    for one in (critic, again):
        one.update(groups, step=2, total_steps=2)
    assert same_tensors(again.scorer.state_dict(), critic.scorer.state_dict())


def test_a_cut_shard_is_named(folder: Path, tmp_path: Path) -> None:
    critic = make_critic(folder)
    write_manifest(tmp_path / "critic", write_state(tmp_path / "critic", take_state(critic.scorer, None)))
    sizes = json.loads((tmp_path / "critic" / "foveal.json").read_text())["files"]
    with (tmp_path / "critic" / "__0_0.distcp").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match=rf"__0_0\.distcp has 1,000 of {sizes['__0_0.distcp']:,} bytes"):
        critic.load(tmp_path / "critic")


def test_a_checkpoint_without_a_critic_says_what_to_do(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not the critic of a checkpoint.*foveal merge"):
        make_critic(folder).load(tmp_path / "critic")


def test_a_model_of_its_own_may_be_given(folder: Path, tmp_path: Path) -> None:
    other = build_tiny(tmp_path, "qwen3_vl", seed=5)
    critic = make_critic(folder, f"worker.critic.model.model_path={other}")
    expected = AutoModelForImageTextToText.from_pretrained(other, dtype=torch.float32).model.state_dict()
    assert same_tensors(critic.scorer.model.model.state_dict(), expected)


def test_a_model_of_another_family_is_refused(folder: Path, tmp_path: Path) -> None:
    other = build_tiny(tmp_path, "qwen3")
    with pytest.raises(ModelError, match=r"worker\.critic\.model\.model_path: .* is a qwen3, .* qwen3_vl"):
        make_critic(folder, f"worker.critic.model.model_path={other}")


def test_a_frozen_vision_tower_stays(folder: Path) -> None:
    critic = make_critic(folder, "worker.critic.model.freeze_vision_tower=true")
    tower = critic.scorer.model.model.visual
    before = {name: p.clone() for name, p in tower.named_parameters()}
    critic.update(prepared_groups(critic, [1, 0]), step=1, total_steps=1)
    assert same_tensors(before, dict(tower.named_parameters()))


def test_messages_about_the_critics_model_name_its_own_keys(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"worker\.critic\.model\.model_path: there is no folder '/no/such'"):
        make_critic(folder, "worker.critic.model.model_path=/no/such")
    options = [f"worker.critic.model.model_path={folder}", "worker.critic.model.override_config={nonsense: 1}"]
    with pytest.raises(ModelError, match=r"worker\.critic\.model\.override_config: .* no attribute 'nonsense'"):
        make_critic(folder, *options)


def test_a_critic_that_was_never_updated_loads_too(folder: Path, tmp_path: Path) -> None:
    critic = make_critic(folder)
    write_manifest(tmp_path / "critic", write_state(tmp_path / "critic", take_state(critic.scorer, critic.optimizer)))
    again = make_critic(folder, trained_head=False)
    again.load(tmp_path / "critic")
    assert same_tensors(again.scorer.state_dict(), critic.scorer.state_dict()) and not again.optimizer.state
