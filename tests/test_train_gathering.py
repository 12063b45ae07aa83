"""How long weights of other processes stay gathered, and what that takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foveal.config.schema_model import FsdpConfig
from foveal.models.loading import load_model
from foveal.quickstart.tiny import build_tiny
from foveal.train.scorer import TokenScorer
from foveal.train.sharding import WHOLE_SHARE, gathers_once, held_bytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> TokenScorer:
    folder: Path = build_tiny(tmp_path_factory.mktemp("model"), "qwen3")
    model: Any = load_model(str(folder), dtype=torch.float32, device=CPU)
    return TokenScorer(model, forbidden_ids=[], temperature=1.0, autocast=None)


def device_of(monkeypatch: pytest.MonkeyPatch, memory: float) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory))


def test_auto_keeps_weights_that_take_little_of_the_device(
    scorer: TokenScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 2 * sum(p.numel() for p in scorer.parameters())  # bfloat16
    device_of(monkeypatch, needed / WHOLE_SHARE * 1.01)
    assert gathers_once(scorer, FsdpConfig(), CUDA)
    assert not gathers_once(scorer, FsdpConfig(enable_cpu_offload=True), CUDA)
    assert not gathers_once(scorer, FsdpConfig(gather_weights="layer"), CUDA)
    assert not gathers_once(scorer, FsdpConfig(mp_param_dtype="fp32"), CUDA)
    device_of(monkeypatch, needed / WHOLE_SHARE * 0.99)
    assert not gathers_once(scorer, FsdpConfig(), CUDA)
    assert gathers_once(scorer, FsdpConfig(gather_weights="step"), CUDA)
    assert gathers_once(scorer, FsdpConfig(enable_full_shard=False), CUDA)


def test_what_is_held_besides_the_shards(scorer: TokenScorer) -> None:
    model: Any = scorer.model
    everything = sum(p.numel() for p in model.parameters())
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    vocabulary = model.lm_head.weight.numel()
    largest = max(layer, vocabulary)
    by_layer = held_bytes(scorer, FsdpConfig(), gathers_once=False, sums_at_end=False)
    assert by_layer == 2 * 2 * largest + 4 * largest
    whole = held_bytes(scorer, FsdpConfig(), gathers_once=True, sums_at_end=True)
    assert whole == 2 * everything + 4 * everything
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert held_bytes(scorer, FsdpConfig(), gathers_once=True, sums_at_end=True) == 2 * everything
