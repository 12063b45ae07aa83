"""Adapters: the mathematics of LoRA on the packed trainer, against peft and against plain weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from foveal.config.schema_model import LoraConfig
from foveal.errors import ConfigError, ModelError
from foveal.models.adapter_files import pairs
from foveal.models.compiling import compile_layers
from foveal.models.feature_store import FeatureStore
from foveal.models.flops import FlopCounter, Work
from foveal.models.loading import load_model
from foveal.models.lora import (
    LoraLinear,
    adapter_config,
    adapter_tensors,
    add_lora,
    has_lora,
    lora_layers,
    restore_lora,
    surviving_share,
    without_adapter,
)
from foveal.models.lora_setup import summary
from foveal.models.named_tensors import named_tensors
from foveal.models.recompute import set_checkpointing
from foveal.models.vision import vision_tower
from foveal.models.widths import align_vision_mlps
from foveal.quickstart.tiny import Family, build_tiny
from foveal.train.layout import PromptLayouts
from foveal.train.scorer import StartScorer, TokenScorer
from foveal.train.scoring import Packer, write_logprobs
from foveal.types import Group
from tests.double_precision import DoublePrecision
from tests.lora_support import CPU, adapted, shake, write_adapter
from tests.named_tensors_support import tiny_config
from tests.random_groups import naive_logprobs, random_groups

FORBIDDEN = [201, 202]
TINY: tuple[Family, ...] = ("qwen2_5_vl", "qwen3_vl", "qwen3")
FAMILIES = (*TINY, "qwen3_vl_moe")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    found = {family: build_tiny(root / family, family) for family in TINY}
    for name, family in (("qwen3_vl_moe", "qwen3_vl_moe"), ("padded", "qwen2_5_vl")):
        config: Any = tiny_config(family)
        config.text_config.vocab_size = 264
        config.vision_config.intermediate_size = 61 if name == "padded" else 48
        config.vision_start_token_id, config.vision_end_token_id = 2, 3
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).save_pretrained(root / name)
        found[name] = root / name
    return found


def scorer_of(model: Any) -> TokenScorer:
    return TokenScorer(model, forbidden_ids=FORBIDDEN, temperature=0.8, autocast=None)


def packed_gradients(model: Any, groups: list[Group]) -> dict[str, torch.Tensor]:
    """Gradients of the adapters, under peft's names, of the sum of all log-probabilities in one packed pass."""
    model.zero_grad()
    packer = Packer(10**6, True, PromptLayouts(model, lambda p: p.features or {}), CPU)
    for pack in packer.packs(groups):
        scorer_of(model)(pack).logprobs.sum().backward()
    names = {
        f"{name}.{factor}": getattr(layer, factor)
        for name, layer in lora_layers(model).items()
        for factor in ("lora_A", "lora_B")
    }
    return {f"base_model.model.{name}.default.weight": factor.grad for name, factor in names.items()}


def peft_gradients(folder: Path, model: Any, groups: list[Group], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same by peft's own layers, sample by sample."""
    peft = pytest.importorskip("peft")
    auto = AutoModelForImageTextToText if hasattr(model.config, "vision_config") else AutoModelForCausalLM
    plain: Any = auto.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", experts_implementation="eager")
    config = {name: value for name, value in adapter_config(model).items() if name not in ("inference_mode",)}
    theirs = peft.get_peft_model(plain, peft.LoraConfig(**config)).eval()
    report = peft.set_peft_model_state_dict(theirs, adapter_tensors(model))
    assert not report.unexpected_keys
    for group in groups:
        for response in group.responses:
            naive_logprobs(theirs, group, response, FORBIDDEN, 0.8).sum().backward()
    return {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}


@pytest.fixture
def double_precision() -> Iterator[None]:
    with DoublePrecision():
        yield


@pytest.mark.parametrize("case", [*FAMILIES, "output layer", "selective", "padded"])
def test_gradients_are_those_of_peft(folders: dict[str, Path], case: str) -> None:
    folder = folders.get(case, folders["qwen2_5_vl"])
    targets = ["q_proj", "lm_head", "qkv"] if case == "output layer" else "all-linear"
    model = adapted(folder, torch.float64, target_modules=targets)
    if case == "selective":
        set_checkpointing(model.train(), "selective")
    if case == "padded":
        assert align_vision_mlps(vision_tower(model)) == 2
    groups = random_groups(model, [0, 0] if case == "qwen3" else [1, 0, 2])
    with DoublePrecision():
        found = packed_gradients(model, groups)
        expected = peft_gradients(folder, model, groups, torch.float64)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-9 * float(gradient.abs().max()), msg=name)


def test_gradients_in_float32(folders: dict[str, Path]) -> None:
    model = adapted(folders["qwen3_vl"])
    groups = random_groups(model, [1, 0, 2])
    found = packed_gradients(model, groups)
    expected = peft_gradients(folders["qwen3_vl"], model, groups, torch.float32)
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name


def logprobs_of(scorer: TokenScorer | StartScorer, groups: list[Group]) -> torch.Tensor:
    packer = Packer(10**6, True, PromptLayouts(scorer.model, lambda p: p.features or {}), CPU)
    write_logprobs(scorer, packer, groups, "found")
    return torch.cat([torch.as_tensor(r.columns.pop("found")) for g in groups for r in g.responses])


@pytest.mark.parametrize("targets", ["all-linear", ["lm_head"], ".*merger.*", ".*language_model.*"])
def test_the_reference_is_the_model_without_adapters(folders: dict[str, Path], targets: str | list[str]) -> None:
    """Also where features of pictures are kept."""
    model = adapted(folders["qwen3_vl"], target_modules=targets)
    base = load_model(str(folders["qwen3_vl"]), dtype=torch.float32, device=CPU).eval()
    groups = random_groups(model, [1, 0])
    scorer = scorer_of(model)
    scorer.store = FeatureStore()
    policy = logprobs_of(scorer, groups)
    expected = logprobs_of(scorer_of(base), groups)
    assert torch.equal(logprobs_of(StartScorer(scorer), groups), expected)
    assert not torch.equal(policy, expected)
    assert torch.equal(logprobs_of(scorer, groups), policy)  # the adapters are back


def test_new_adapters_change_nothing_and_are_the_same_each_time(folders: dict[str, Path]) -> None:
    models: list[Any] = [load_model(str(folders["qwen3_vl"]), dtype=torch.float32, device=CPU).eval() for _ in range(3)]
    for model in models[1:]:
        add_lora(model, LoraConfig(rank=4))
    groups = random_groups(models[0], [1])
    assert torch.equal(logprobs_of(scorer_of(models[1]), groups), logprobs_of(scorer_of(models[0]), groups))
    first, second = (adapter_tensors(model) for model in models[1:])
    assert all(torch.equal(first[name], second[name]) for name in first)
    factors = [tensor for name, tensor in first.items() if ".lora_A." in name]
    assert all(0 < float(a.abs().max()) <= a.shape[1] ** -0.5 for a in factors)
    assert surviving_share(models[1], torch.bfloat16) == 1.0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_are_cast_once(folders: dict[str, Path], family: str, dtype: torch.dtype) -> None:
    model = adapted(folders[family], dtype)
    plain: Any = load_model(str(folders[family]), dtype=dtype, device=CPU)
    stored = dict(tensor for bucket in named_tensors(plain) for tensor in bucket)
    for name, layer in lora_layers(model).items():
        change = layer.scaling * (layer.lora_B.detach().float() @ layer.lora_A.detach().float())
        weight = plain.get_submodule(name).weight
        weight.data = (weight.data.float() + change).to(torch.bfloat16)
    found = dict(tensor for bucket in named_tensors(model, torch.bfloat16) for tensor in bucket)
    expected = dict(tensor for bucket in named_tensors(plain, torch.bfloat16) for tensor in bucket)
    assert found.keys() == expected.keys() == stored.keys()
    for name in expected:  # of the sum's order a last bit may be left
        torch.testing.assert_close(found[name].float(), expected[name].float(), rtol=2**-8, atol=1e-6)
    assert sum(int((found[n] != expected[n]).sum()) for n in expected) < 10
    base = dict(tensor for bucket in named_tensors(model, merge=False) for tensor in bucket)
    assert all(torch.equal(base[name], stored[name]) for name in stored) and base.keys() == stored.keys()


def test_of_a_small_adapter_little_survives_bfloat16(folders: dict[str, Path]) -> None:
    model = adapted(folders["qwen3_vl"], torch.bfloat16)
    shake(model, 1e-5)
    assert surviving_share(model, torch.bfloat16) < 0.5
    assert surviving_share(model, torch.float32) > 0.99
    shake(model, 0.1)
    assert surviving_share(model, torch.bfloat16) > 0.9


def test_an_adapter_starts_a_run_and_is_its_reference(folders: dict[str, Path], tmp_path: Path) -> None:
    first = adapted(folders["qwen3_vl"], exclude_modules=".*visual.*")
    groups = random_groups(first, [1, 0])
    before = logprobs_of(scorer_of(first), groups)
    model: Any = load_model(str(folders["qwen3_vl"]), dtype=torch.float32, device=CPU).eval()
    add_lora(model, LoraConfig(rank=0), write_adapter(first, tmp_path))
    assert lora_layers(model).keys() == lora_layers(first).keys()
    scorer = scorer_of(model)
    assert torch.equal(logprobs_of(scorer, groups), before)
    shake(model, 0.3)
    assert torch.equal(logprobs_of(StartScorer(scorer), groups), before)
    assert not torch.equal(logprobs_of(scorer, groups), before)


def test_the_configuration_of_an_adapter_is_exact_and_short(folders: dict[str, Path]) -> None:
    model = adapted(folders["qwen3_vl"], rank=7, alpha=29)  # 29 / 7 · 7 isn't 29 in floating point
    config = adapter_config(model)
    assert (config["r"], config["lora_alpha"]) == (7, 29)
    assert "attn.proj" in config["target_modules"]  # not `proj`, which the tower's first layer is called too
    assert not any("blocks" in name for name in config["target_modules"])


def test_adapters_with_the_names_of_transformers_4_are_found(folders: dict[str, Path], tmp_path: Path) -> None:
    first = adapted(folders["qwen2_5_vl"])
    folder = write_adapter(first, tmp_path)
    path = folder / "adapter_model.safetensors"
    renamed = {
        name.replace("model.model.language_model.", "model.model.").replace("model.model.visual.", "model.visual."): t
        for name, t in load_file(path).items()
    }
    from safetensors.torch import save_file

    save_file(renamed, path)
    model: Any = load_model(str(folders["qwen2_5_vl"]), dtype=torch.float32, device=CPU)
    add_lora(model, LoraConfig(), folder)
    ours, theirs = adapter_tensors(model), adapter_tensors(first)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "change",
    [
        {"use_dora": True},
        {"use_qalora": True},
        {"init_lora_weights": "pissa_niter_16"},
        {"peft_type": "IA3"},
        {"r": 3},
        {"modules_to_save": ["norm"]},
    ],
)
def test_adapters_of_another_kind_are_refused(folders: dict[str, Path], tmp_path: Path, change: dict[str, Any]) -> None:
    folder = write_adapter(adapted(folders["qwen3"]), tmp_path, **change)
    model = load_model(str(folders["qwen3"]), dtype=torch.float32, device=CPU)
    with pytest.raises(ModelError, match=next(iter(change)) if "r" not in change else "rank 3"):
        add_lora(model, LoraConfig(), folder)


def test_an_adapter_of_another_model_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = write_adapter(adapted(folders["qwen3_vl"]), tmp_path)
    with pytest.raises(ModelError, match="no linear layer of this model"):
        add_lora(load_model(str(folders["qwen3"]), dtype=torch.float32, device=CPU), LoraConfig(), folder)


@pytest.mark.parametrize(
    ("keys", "frozen", "expected"),
    [
        ({}, False, {"language", "visual.blocks", "visual.merger"}),
        ({"exclude_modules": ".*visual.*"}, False, {"language"}),
        ({}, True, {"language"}),
        ({"target_modules": ".*merger.*"}, False, {"visual.merger"}),
        ({"target_modules": ["q_proj", "v_proj"]}, False, {"language"}),
    ],
)
def test_targets(folders: dict[str, Path], keys: dict[str, Any], frozen: bool, expected: set[str]) -> None:
    model = adapted(folders["qwen2_5_vl"], frozen=frozen, **keys)
    names = lora_layers(model)
    parts = ("language", "visual.blocks", "visual.merger", "lm_head")
    assert {part for part in parts if any(part in name for name in names)} == expected
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{name}.{factor}" for name in names for factor in ("lora_A", "lora_B")}
    again = load_model(str(folders["qwen2_5_vl"]), dtype=torch.float32, device=CPU)
    restore_lora(again, json.loads(json.dumps(adapter_config(model))))
    assert lora_layers(again).keys() == names.keys()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"target_modules": ["q_proj", "c_attn"]}, "'c_attn' given, but no linear layer"),
        ({"target_modules": ".*nothing.*"}, "whole path matches it. There are: down_proj.*, as model.layers.0"),
        ({"exclude_modules": ".*"}, "leave no layer"),
    ],
)
def test_targets_that_are_not_there_are_refused(folders: dict[str, Path], keys: dict[str, Any], message: str) -> None:
    model = load_model(str(folders["qwen3"]), dtype=torch.float32, device=CPU)
    with pytest.raises(ConfigError, match=message):
        add_lora(model, LoraConfig(rank=4, **keys))


def test_a_tied_output_layer_has_no_adapter(tmp_path: Path) -> None:
    model = load_model(str(build_tiny(tmp_path, "qwen3", tie=True)), dtype=torch.float32, device=CPU)
    with pytest.raises(ConfigError, match="shares its weights"):
        add_lora(model, LoraConfig(rank=4, target_modules=["lm_head"]))


def test_the_line_on_a_mixture_says_what_is_left_out(folders: dict[str, Path]) -> None:
    model = adapted(folders["qwen3_vl_moe"])
    covered = sum(layer.weight.numel() for layer in lora_layers(model).values())
    plain = load_model(str(folders["qwen3_vl_moe"]), dtype=torch.float32, device=CPU)
    share = covered / sum(p.numel() for p in plain.parameters())
    assert f"{share:.1%}" in summary(model) and "experts" in summary(model)
    assert "experts" not in summary(adapted(folders["qwen3"]))


def test_adapters_are_products_too(folders: dict[str, Path]) -> None:
    model = adapted(folders["qwen3"])
    plain = load_model(str(folders["qwen3"]), dtype=torch.float32, device=CPU)
    factors = sum(layer.lora_A.numel() + layer.lora_B.numel() for layer in lora_layers(model).values())
    work = Work(tokens=10)
    with_adapters, without = FlopCounter(model), FlopCounter(plain.requires_grad_(False))
    assert with_adapters.forward(work) - without.forward(work) == 20 * factors
    weights = sum(layer.weight.numel() for layer in lora_layers(model).values())
    # gradients of the inputs everywhere, of the adapters besides
    assert with_adapters.training(work) - with_adapters.forward(work) == 20 * (weights + 2 * factors)
    with without_adapter(model):
        assert FlopCounter(model).forward(work) == without.forward(work)


def test_adapters_of_bfloat16_models_are_float32(folders: dict[str, Path]) -> None:
    model = adapted(folders["qwen3"], torch.bfloat16)
    layer = next(iter(lora_layers(model).values()))
    assert (
        isinstance(layer, LoraLinear) and layer.lora_A.dtype == torch.float32 and layer.weight.dtype == torch.bfloat16
    )
    logprobs_of(scorer_of(model), random_groups(model, [0]))
    assert has_lora(model) and not has_lora(nn.Linear(2, 2))


def test_compiled_layers_follow_the_adapters(folders: dict[str, Path]) -> None:
    model = adapted(folders["qwen3_vl"])
    groups = random_groups(model, [1, 0])
    scorer = scorer_of(model)
    expected = [logprobs_of(scorer, groups), logprobs_of(StartScorer(scorer), groups)]
    compile_layers(model, vision=True, backend="eager")
    for _ in range(2):
        for policy, values in zip((scorer, StartScorer(scorer)), expected, strict=True):
            torch.testing.assert_close(logprobs_of(policy, groups), values, rtol=0, atol=1e-6)


def test_tensors_under_pefts_names_are_paired_by_the_path_of_their_module() -> None:
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{path}.lora_A.weight": torch.zeros(4, 16), f"{path}.lora_B.weight": torch.zeros(16, 4)}
    assert pairs(tensors) == {"model.layers.0.self_attn.q_proj": tuple(tensors.values())}
