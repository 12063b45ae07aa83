"""What is trained, and at which rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foveal.config.schema_model import ModelConfig, OptimConfig
from foveal.errors import ModelError
from foveal.models.parts import freeze_parts, part_of
from foveal.quickstart.tiny import Family, build_tiny
from foveal.train.clipping import clip_gradients
from foveal.train.optim import build_optimizer, set_learning_rate
from foveal.train.state import load_state, take_state, write_state
from tests.model_helpers import load, same_tensors, train_step


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    families: tuple[Family, ...] = ("qwen3_vl", "qwen2_5_vl", "llama")
    return {family: build_tiny(tmp_path_factory.mktemp(family), family) for family in families}


def parts(model: Any, trained: bool = True) -> set[str]:
    return {part_of(name) for name, p in model.named_parameters() if p.requires_grad == trained}


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_the_projector_is_what_the_decoder_is_fed_by(folders: dict[str, Path], family: str) -> None:
    model = load(folders[family], torch.float32)
    tower = model.model.visual
    expected = {id(p) for m in (tower.merger, *getattr(tower, "deepstack_merger_list", [])) for p in m.parameters()}
    assert {id(p) for name, p in model.named_parameters() if part_of(name) == "projector"} == expected
    assert parts(model) == {"vision", "projector", "language"}


@pytest.mark.parametrize(
    ("keys", "frozen"),
    [
        ({"freeze_vision_tower": True}, {"vision", "projector"}),
        ({"freeze_vision_tower": True, "freeze_projector": False}, {"vision"}),
        ({"freeze_projector": True}, {"projector"}),
        ({"freeze_language_model": True}, {"language"}),
    ],
)
def test_parts_are_frozen_as_the_keys_say(folders: dict[str, Path], keys: dict[str, bool], frozen: set[str]) -> None:
    model = load(folders["qwen3_vl"], torch.float32)
    freeze_parts(model, ModelConfig(**keys))
    assert parts(model, trained=False) == frozen
    assert parts(model) == {"vision", "projector", "language"} - frozen


def test_a_model_without_anything_to_train_is_refused(folders: dict[str, Path]) -> None:
    model = load(folders["llama"], torch.float32)
    freeze_parts(model, ModelConfig(freeze_language_model=True))
    with pytest.raises(ModelError, match="every weight of the model is frozen"):
        build_optimizer(model, OptimConfig())


def test_every_part_follows_the_schedule_at_its_own_rate(folders: dict[str, Path]) -> None:
    model = load(folders["qwen3_vl"], torch.float32)
    optim = OptimConfig(lr=1.0, lr_vision=0.1, lr_projector=4.0, lr_warmup_steps=4)
    optimizer = build_optimizer(model, optim)
    assert set_learning_rate(optimizer, 1, 10, optim) == 0.25
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    by_part = {part_of(name): rates[id(p)] for name, p in model.named_parameters()}
    assert by_part == pytest.approx({"vision": 0.025, "projector": 1.0, "language": 0.25})


def test_without_rates_of_their_own_all_parts_share_a_group(folders: dict[str, Path]) -> None:
    model = load(folders["qwen3_vl"], torch.float32)
    assert len(build_optimizer(model, OptimConfig()).param_groups) == 1


def test_rates_of_their_own_may_come_and_go_at_a_resume(folders: dict[str, Path], tmp_path: Path) -> None:
    def fresh(**rates: float) -> tuple[Any, torch.optim.Optimizer]:
        model = load(folders["qwen3_vl"], torch.float32)
        return model, build_optimizer(model, OptimConfig(lr=1e-2, **rates))

    model, optimizer = fresh(lr_vision=1e-2)
    train_step(model, optimizer, seed=0)
    manifest = write_state(tmp_path, take_state(model, optimizer))
    resumed, other = fresh(lr_projector=1e-2)
    load_state(tmp_path, manifest, resumed, other)
    train_step(model, optimizer, seed=1)
    train_step(resumed, other, seed=1)
    assert same_tensors(model.state_dict(), resumed.state_dict())


def test_the_norm_of_a_long_gradient_is_exact() -> None:
    weight = torch.nn.Parameter(torch.empty(1 << 24))
    weight.grad = torch.rand(1 << 24)
    assert clip_gradients([weight], 1e9) == pytest.approx(float(weight.grad.double().norm()), rel=1e-6)
