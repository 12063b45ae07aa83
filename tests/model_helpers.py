"""Tiny models with real classes, trained for a step or two, for the tests of checkpoints and exports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from foveal.quickstart.tiny import Family, build_tiny
from foveal.train.checkpoint import write_actor
from foveal.train.description import describe_actor
from foveal.train.state import take_state

TEXT = ("qwen3", "llama")


@dataclass
class Trained:
    """A model folder, and the model loaded from it in float32 with an optimizer beside it."""

    source: Path
    model: Any
    optimizer: torch.optim.Optimizer

    def save(self, folder: Path, *, with_optimizer: bool = True) -> None:
        save_actor(
            folder,
            self.model,
            self.optimizer if with_optimizer else None,
            source_path=str(self.source),
            save_processing=self._save_processing,
        )

    def _save_processing(self, folder: Path) -> None:
        text_only = not (self.source / "processor_config.json").exists()
        (AutoTokenizer if text_only else AutoProcessor).from_pretrained(self.source).save_pretrained(folder)


def save_actor(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    source_path: str,
    save_processing: Callable[[Path], None],
) -> None:
    """Writes an actor's folder; with several processes every one must call this."""
    description = describe_actor(model, source_path=source_path, save_processing=save_processing)
    write_actor(folder, take_state(model, optimizer), description)


def trained(
    folder: Path, family: Family = "qwen3_vl", *, tie: bool = False, dtype: str = "float32", steps: int = 1
) -> Trained:
    """Builds a model stored as `dtype`, loads it in float32 and takes optimizer steps along made-up gradients."""
    source = build_tiny(folder, family, tie=tie, dtype=dtype)
    model = load(source, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        train_step(model, optimizer, seed=step)
    return Trained(source, model, optimizer)


def load(folder: Path, dtype: torch.dtype | str) -> Any:
    """Loads a folder as a user would, in eval mode."""
    auto = AutoModelForCausalLM if not (folder / "processor_config.json").exists() else AutoModelForImageTextToText
    return auto.from_pretrained(folder, dtype=dtype)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    optimizer.zero_grad()


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two dictionaries hold the same names, dtypes and numbers, bit for bit."""
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)
