"""What is refused before data or model are opened: the user's own algorithm, and how validation samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foveal.config import load_config
from foveal.errors import ConfigError
from foveal.preflight import check_runnable

OWN = """
from foveal.algorithm import register_advantage


@register_advantage("preflight_values", needs_values=True)
def with_values(batch, config): ...


@register_advantage("preflight_baseline", needs_baseline=True)
def with_baseline(batch, config): ...


@register_advantage("preflight_group", needs_group=True)
def with_group(batch, config): ...


def plain(batch, config): ...
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own_algorithm.py"
    path.write_text(OWN)
    return path


def check(*overrides: str) -> None:
    base = [
        "data.train_files=rows.jsonl",
        "worker.actor.model.model_path=model",
        "worker.reward.reward_function=reward.py",
        "worker.rollout.n=1",
        "worker.rollout.name=transformers",
        "trainer.n_gpus_per_node=1",
    ]
    check_runnable(load_config([*base, *overrides]))


def test_an_estimator_that_compares_answers_needs_several(own: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.n: 1"):
        check(f"algorithm.adv_estimator={own}:with_group")


@pytest.mark.parametrize("function", ["plain", "with_values", "with_baseline"])
def test_an_estimator_that_gets_what_it_needs_passes(own: Path, function: str) -> None:
    check(f"algorithm.adv_estimator={own}:{function}")


@pytest.mark.parametrize("key", ["algorithm.adv_estimator", "worker.actor.loss_type"])
def test_a_file_of_ones_own_that_is_not_there(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}=.*there is no file"):
        check(f"{key}={tmp_path}/none.py:mine", "algorithm.disable_kl=true", "worker.rollout.n=2")


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of a run whose engine is vLLM 0.26, as far as these checks can tell."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("foveal.rollout.vllm_available.vllm_version", lambda: "0.26.0")
    return ["worker.rollout.name=vllm", "worker.rollout.n=2"]


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize("value", ["max_tokens: 0", "max_tokens: many", "stop_token_ids: 5", "extra: {seed: 1}"])
def test_validation_sampling_that_no_engine_can_do(value: str, engine: str, vllm: list[str]) -> None:
    with pytest.raises(ConfigError, match=value.split(":")[0]):
        check(f"worker.rollout.val_override_config={{{value}}}", *vllm, f"worker.rollout.name={engine}")


def test_validation_may_use_what_the_chosen_engine_knows(vllm: list[str]) -> None:
    change = "worker.rollout.val_override_config={min_p: 0.1}"
    check(change, *vllm)
    with pytest.raises(ConfigError, match="min_p"):
        check(change, "worker.rollout.n=2")


def test_a_training_temperature_that_the_engine_would_replace(vllm: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"Temperature 0\.001"):
        check(*vllm, "worker.rollout.temperature=0.001")


def test_a_version_that_nobody_tested_is_one_warning(vllm: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    check(*vllm)
    assert capsys.readouterr().err == "warning: vLLM 0.26.0 has not been tested; tested: 0.25.x, 0.32.x\n"
