"""How many tokens go into a pass, and what is said about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from foveal.config import Config, load_config
from foveal.config.schema_model import OptimConfig
from foveal.models.loading import load_model
from foveal.models.parts import freeze_parts
from foveal.quickstart.tiny import build_tiny
from foveal.train import budget
from foveal.train.budget import MOST, ON_CPU, learned_budget, set_budgets, state_bytes
from foveal.train.layout import PromptLayouts
from foveal.train.optim import build_optimizer
from foveal.train.scorer import TokenScorer
from foveal.train.scoring import Packer

CPU = torch.device("cpu")


@dataclass
class Model:
    scorer: TokenScorer
    optimizer: torch.optim.Optimizer
    packer: Packer
    experience_packer: Packer


def make(folder: Path, config: Config) -> Model:
    if not (folder / "config.json").exists():
        build_tiny(folder, "qwen2_5_vl")
    model: Any = load_model(str(folder), dtype=torch.float32, device=CPU)
    freeze_parts(model, config.worker.actor.model)
    scorer = TokenScorer(model, forbidden_ids=[], temperature=1.0, autocast=None)
    layouts = PromptLayouts(model, lambda prompt: {})
    packers = [Packer(1, True, layouts, CPU) for _ in range(2)]
    return Model(scorer, build_optimizer(model, config.worker.actor.optim), *packers)


def load(*argv: str) -> Config:
    return load_config(["worker.rollout.n=2", "data.max_prompt_length=100", "data.max_response_length=50", *argv])


@pytest.mark.parametrize(
    ("argv", "budgets", "said"),
    [
        ([], (ON_CPU, ON_CPU), "token_budget=auto on a CPU"),
        (["worker.actor.token_budget=777"], (777, 777), "token_budget=777"),
        (
            [
                "worker.actor.token_budget=easyr1",
                "worker.actor.micro_batch_size_per_device_for_update=2",
                "worker.actor.micro_batch_size_per_device_for_experience=3",
            ],
            (300, 450),
            "token_budget=easyr1",
        ),
    ],
)
def test_the_start_line_says_which_budget_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], budgets: tuple[int, int], said: str
) -> None:
    config = load(*argv)
    model = make(tmp_path, config)
    set_budgets(config, {"actor": model}, CPU)
    assert (model.packer.budget, model.experience_packer.budget) == budgets
    line = capsys.readouterr().out
    assert line.startswith(f"actor: passes of up to {budgets[0]:,} tokens with gradient and {budgets[1]:,} without")
    assert said in line


def test_no_budget_comes_above_what_memory_did_not_suffice_for(tmp_path: Path) -> None:
    config = load("worker.actor.token_budget=easyr1", "worker.actor.micro_batch_size_per_device_for_update=1")
    model = make(tmp_path, config)
    set_budgets(config, {"actor": model}, CPU, 200)
    assert (model.packer.budget, model.experience_packer.budget) == (150, 200)
    model.packer.largest = 150
    assert learned_budget(model.packer, 150, 10**9) == 200


def largest(tmp_path: Path, free: int, *argv: str) -> tuple[int, int, str]:
    config = load(*argv)
    return budget._largest(config, config.worker.actor, make(tmp_path, config).scorer, free)


def test_the_largest_budget_grows_with_memory_and_with_what_is_computed_again(tmp_path: Path) -> None:
    model = "worker.actor.model"
    free = 2**31 + 2**27
    full, forward, said = largest(tmp_path, free)
    assert 256 < full < forward
    assert "0.1 GiB are left for activations" in said  # two GiB are kept for the head's logits
    selective, *_ = largest(tmp_path, free, f"{model}.enable_gradient_checkpointing=selective")
    none, *_ = largest(tmp_path, free, f"{model}.enable_gradient_checkpointing=false")
    assert none < selective < full < largest(tmp_path, free + 2**27)[0]
    assert largest(tmp_path, free, f"{model}.activation_offload=true")[0] > full


def test_without_room_for_the_head_each_answer_goes_alone(tmp_path: Path) -> None:
    assert largest(tmp_path, 2**30)[:2] == (256, 256)


@pytest.mark.parametrize(("free", "warned"), [(2**30, True), (2**33, False)])
def test_a_device_without_room_for_activations_is_told_before_a_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, free: int, warned: bool
) -> None:
    monkeypatch.setattr(budget, "_free_bytes", lambda models, device: free)
    config = load()
    set_budgets(config, {"actor": make(tmp_path, config)}, torch.device("cuda"))
    said = "".join(capsys.readouterr())
    assert ("hardly any memory is left" in said) == ("adamw_8bit" in said) == warned


def test_states_are_counted_as_the_optimizer_holds_them() -> None:
    weights = [torch.nn.Parameter(torch.zeros(100, dtype=torch.bfloat16))]
    module = torch.nn.ParameterList(weights)
    sizes = [
        state_bytes(build_optimizer(module, OptimConfig(strategy=s)), weights) for s in ("adamw_bf16", "adamw_8bit")
    ]
    assert sizes == [400, 200]
    whole = [torch.nn.Parameter(torch.zeros(100))]
    assert state_bytes(build_optimizer(torch.nn.ParameterList(whole), OptimConfig()), whole) == 800


@pytest.mark.parametrize(
    ("taken", "free", "learned"),
    [
        (2**30, 10 * 2**30, 8000),  # 9 times as many would fit, but no more than twice as many are believed
        (2**30, 2**30 / 2, 1536),  # half of 4,000 × 0.9 / 1.1, in whole 256s
        (2**30, 1.8 * 2**30, 5888),
        (2**30, 1.6 * 2**30, 5000),  # 5,120 would be, which is not worth a change
        (0, 2**30, 5000),  # nothing was measured
    ],
)
def test_a_pass_teaches_how_many_tokens_fit(taken: float, free: float, learned: int) -> None:
    packer = Packer(budget=5000, shared_prefix=True, layouts=None, device=CPU)  # type: ignore[arg-type]
    packer.largest = 4000
    assert learned_budget(packer, taken, free) == learned


def test_what_ran_out_of_memory_once_is_not_tried_again() -> None:
    packer = Packer(budget=5000, shared_prefix=True, layouts=None, device=CPU)  # type: ignore[arg-type]
    packer.largest, packer.ceiling = 4000, 2500
    assert learned_budget(packer, 2**30, 10 * 2**30) == 2500
    packer.largest = MOST
    assert learned_budget(packer, 2**30, 10 * 2**30) == 2500
