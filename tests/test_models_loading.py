"""Model folders whose weights or overrides do not fit are refused, not filled with random numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foveal.errors import ModelError
from foveal.models.loading import load_model
from foveal.quickstart.tiny import build_tiny

CPU = torch.device("cpu")
NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_tiny(tmp_path, "qwen3", tie=True)


def without(weights: dict[str, torch.Tensor]) -> None:
    del weights[NAME]


def narrower(weights: dict[str, torch.Tensor]) -> None:
    weights[NAME] = weights[NAME][:-1].contiguous()


@pytest.mark.parametrize(("change", "fault"), [(without, "are missing"), (narrower, "have another shape")])
def test_weights_that_do_not_fit_are_named(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], None], fault: str
) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"1 weights {fault}.*{NAME}"):
        load_model(str(folder), dtype=torch.float32, device=CPU)


def test_a_cut_file_is_an_error_with_the_folder(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=str(folder)):
        load_model(str(folder), dtype=torch.float32, device=CPU)


def test_an_override_replaces_a_value(folder: Path) -> None:
    model = load_model(str(folder), dtype=torch.float32, device=CPU, override_config={"attention_dropout": 0.25})
    assert model.config.attention_dropout == 0.25  # type: ignore[union-attr]


def test_an_override_of_a_whole_section_is_refused(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path, "qwen3_vl")
    with pytest.raises(ModelError, match="text_config is a section"):
        load_model(
            str(folder), dtype=torch.float32, device=CPU, override_config={"text_config": {"num_hidden_layers": 1}}
        )
