"""Estimators and losses by name and from the user's own file."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from foveal.algorithm import (
    AdvantageEstimator,
    Advantages,
    LossBatch,
    StepBatch,
    get_advantage,
    get_loss,
    register_advantage,
    register_loss,
)
from foveal.algorithm.registry import ADVANTAGES, LOSSES
from foveal.config.schema_data import ADVANTAGE_ESTIMATORS
from foveal.config.schema_worker import POLICY_LOSSES
from foveal.errors import ConfigError

CONFIG = SimpleNamespace(gamma=1.0, lam=1.0)

USER_FILE = """
from __future__ import annotations

from dataclasses import dataclass

from foveal.algorithm import Advantages, register_advantage


@dataclass
class Doubling:
    factor: float = 2.0


def main(batch, config):
    values = Doubling().factor * batch.scores[batch.sequence]
    return Advantages(values, values)


@register_advantage("needy_{unique}", needs_values=True)
def needy(batch, config):
    return Advantages(batch.values, batch.values)


def loss(batch, config):
    return -batch.advantages * batch.logprobs, {}


limit = 3
"""


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE.replace("{unique}", tmp_path.name))
    yield path
    ADVANTAGES.pop(f"needy_{tmp_path.name}", None)


def batch(**extra):
    scores, rewards = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0, 3.0])
    return StepBatch(scores, torch.tensor([0, 0]), torch.tensor([2, 1]), rewards, torch.ones(3).bool(), **extra)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("grpo", (True, False, False, False)),
        ("dr_grpo", (True, False, False, False)),
        ("grpo_passk", (True, False, False, False)),
        ("rloo", (True, False, False, False)),
        ("opo", (True, False, False, False)),
        ("maxrl", (True, False, False, False)),
        ("gdpo", (True, False, False, True)),
        ("reinforce_plus_plus", (False, False, False, False)),
        ("reinforce_plus_plus_baseline", (True, False, False, False)),
        ("remax", (False, True, False, False)),
        ("gae", (False, False, True, False)),
    ],
)
def test_estimators_say_what_they_need(name, flags):
    entry = get_advantage(name)
    assert (entry.needs_group, entry.needs_baseline, entry.needs_values, entry.needs_parts) == flags


def test_unknown_estimator_lists_the_names_and_suggests_the_nearest():
    with pytest.raises(ConfigError) as error:
        get_advantage("grpoo")
    assert "algorithm.adv_estimator=grpoo" in str(error.value) and "Did you mean grpo?" in str(error.value)
    assert "dr_grpo, gae, gdpo, grpo, grpo_passk, maxrl, opo" in str(error.value)


def test_unknown_loss_lists_the_names():
    with pytest.raises(
        ConfigError, match=r"loss_type=xyz is not known\..*cispo, default, gspo, gspo_token, policy_gradient, sapo"
    ):
        get_loss("xyz")


def test_estimator_from_the_users_file(user_file):
    assert get_advantage(f"{user_file}:main")(batch(), CONFIG).advantages.tolist() == [2.0, 2.0, 6.0]


def test_function_is_called_main_when_not_named(user_file):
    assert get_advantage(str(user_file)).compute is get_advantage(f"{user_file}:main").compute


def test_users_file_says_what_its_estimator_needs(user_file):
    assert get_advantage(f"{user_file}:needy").needs_values
    assert not get_advantage(f"{user_file}:main").needs_values


def test_users_file_runs_once_however_often_it_is_named(user_file):
    assert get_advantage(f"{user_file}:needy") is get_advantage(f"{user_file}:needy")


def test_loss_from_the_users_file(user_file):
    values = torch.tensor([-1.0, -2.0])
    given = LossBatch(values, values, torch.tensor([1.0, 2.0]), torch.tensor([2]), torch.ones(2).bool())
    assert get_loss(f"{user_file}:loss")(given, SimpleNamespace())[0].tolist() == [1.0, 4.0]


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"adv_estimator=.*there is no file .*absent\.py"):
        get_advantage(f"{tmp_path}/absent.py:f")


@pytest.mark.parametrize("name", ["absent", "limit"])
def test_missing_function_lists_those_of_the_file(user_file, name):
    with pytest.raises(ConfigError, match=f"no function '{name}'; it has .*main, needy, loss"):
        get_loss(f"{user_file}:{name}")


def test_file_that_raises_shows_what_it_raised(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("raise KeyError('no such thing')")
    with pytest.raises(ConfigError, match=r"importing .*broken\.py raised KeyError: 'no such thing'"):
        get_loss(f"{path}:f")


def test_taken_names_are_refused():
    with pytest.raises(ConfigError, match="'grpo' is already registered"):
        register_advantage("grpo")(lambda batch, config: None)
    with pytest.raises(ConfigError, match="'default' is already registered"):
        register_loss("default")(lambda batch, config: None)


def test_registered_names_are_found():
    @register_loss("test_registered_names")
    def mine(batch, config):
        return batch.logprobs, {}

    try:
        assert get_loss("test_registered_names") is mine
    finally:
        del LOSSES["test_registered_names"]


@pytest.mark.parametrize(("name", "missing"), [("remax", "baselines"), ("gae", "values"), ("gdpo", "parts")])
def test_batch_without_what_the_estimator_needs_is_refused(name, missing):
    with pytest.raises(ValueError, match=f"{name} needs StepBatch.{missing}"):
        get_advantage(name)(batch(), CONFIG)


def returning(value):
    return AdvantageEstimator("mine", lambda batch, config: value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(3), "mine returned Tensor; it must return foveal.algorithm.Advantages"),
        (Advantages(torch.zeros(2), torch.zeros(3)), r"advantages of shape \(2,\); it must be \(3,\)"),
        (Advantages(torch.zeros(3), torch.tensor([0.0, torch.nan, 0.0])), "returns that are NaN .* on 1 of 3 tokens"),
    ],
)
def test_wrong_results_of_an_estimator_are_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        returning(value)(batch(), CONFIG)


def test_estimators_run_without_gradient():
    values = torch.zeros(3, requires_grad=True)
    result = get_advantage("gae")(batch(values=values), CONFIG)
    assert not result.advantages.requires_grad


def test_configuration_allows_exactly_the_names_that_are_registered():
    """The configuration must not import torch, so it holds the names once more."""
    assert (set(ADVANTAGE_ESTIMATORS), set(POLICY_LOSSES)) == (set(ADVANTAGES), set(LOSSES))
