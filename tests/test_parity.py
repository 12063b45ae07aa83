"""`foveal check --parity`: agreement within the bound, and faults that it must see."""

from __future__ import annotations

import json
import math
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from foveal.cli import main
from foveal.config.schema_model import LoraConfig
from foveal.models.lora import add_lora, lora_layers
from foveal.parity import LARGEST_FLOAT32, change_weights
from foveal.rollout.transformers_engine import TransformersEngine
from tests.rollout_models import tiny_model
from tests.small_run import small_run

SCIENTIFIC = r"([\d.e+-]+|nan)"


def run_check(root: Path, family: Any, *overrides: str, rows: int = 4) -> int:
    """With some rows that have a picture and some that have none, and no reward function."""
    arguments = [a for a in small_run(root, family) if not a.startswith("worker.reward")]
    path = root / "data" / "rows.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[1::2]:
        line |= {"problem": "Which color is the sky?", "images": []}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return main(["check", "--parity", "--rows", str(rows), *arguments, "data.shuffle=false", *overrides])


def gaps(output: str) -> list[tuple[float, float]]:
    """(mean, max) as loaded and after the update."""
    found = re.findall(rf": mean {SCIENTIFIC}, max {SCIENTIFIC} over", output)
    return [(float(mean), float(largest)) for mean, largest in found]


class StaleEngine(TransformersEngine):
    """Samples with the weights that it was started with."""

    def __init__(self, model: Any, *args: Any, **options: Any) -> None:
        super().__init__(deepcopy(model), *args, **options)


class WrongEngine(TransformersEngine):
    """Takes another head than the trainer."""

    def __init__(self, model: Any, *args: Any, **options: Any) -> None:
        model = deepcopy(model)
        change_weights(model.lm_head)
        super().__init__(model, *args, **options)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3"])
def test_the_transformers_engine_agrees(tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    if family == "qwen3":
        rows = tmp_path / "text.jsonl"
        rows.write_text('{"problem": "Which color?", "answer": "red"}\n' * 4)
        assert run_check(tmp_path, family, f"data.train_files={rows}") == 0
    else:
        assert run_check(tmp_path, family) == 0
    found = gaps(capsys.readouterr().out)
    assert len(found) == 2 and all(0 <= mean <= largest < LARGEST_FLOAT32 for mean, largest in found)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_vllm_agrees_before_and_after_an_update(tmp_path: Path, family: str, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm")
    assert run_check(tmp_path, family, "worker.rollout.name=vllm", rows=6) == 0
    output = capfd.readouterr().out
    assert "parity of vllm engine and trainer: 6 prompts (3 with pictures), 4 answers each" in output
    found = gaps(output)
    assert len(found) == 2 and all(0 <= mean <= largest < LARGEST_FLOAT32 for mean, largest in found)


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["all-linear", "lm_head,q_proj"])
def test_vllm_agrees_before_and_after_a_change_of_the_adapter(
    tmp_path: Path, targets: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    adapter = ("worker.actor.model.lora.rank=4", f"worker.actor.model.lora.target_modules={targets}")
    assert run_check(tmp_path, "qwen3_vl", "worker.rollout.name=vllm", *adapter) == 0
    output = capfd.readouterr().out
    assert ("merged into them: vLLM applies none to lm_head" in output) == (targets != "all-linear")
    assert "after a change of the adapters" in output
    assert all(0 <= mean <= largest < LARGEST_FLOAT32 for mean, largest in gaps(output))
    (told,) = re.findall(rf"old weights would be off by {SCIENTIFIC}", output)
    assert float(told) > 10 * LARGEST_FLOAT32


@pytest.mark.slow
def test_a_vllm_engine_that_ignores_the_update_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    from foveal.rollout.vllm_engine import VllmEngine

    take_over = VllmEngine.update_weights

    def only_the_first(self: VllmEngine, buckets: Any, version: int) -> None:
        if version == 0:
            take_over(self, buckets, version)

    monkeypatch.setattr(VllmEngine, "update_weights", only_the_first)
    assert run_check(tmp_path, "qwen2_5_vl", "worker.rollout.name=vllm") == 1
    captured = capfd.readouterr()
    (_, before), (_, after) = gaps(captured.out)
    assert before < LARGEST_FLOAT32 < after and "something stale" in captured.err


def test_a_change_of_the_adapters_leaves_other_weights() -> None:
    model = tiny_model("qwen2_5_vl")
    add_lora(model, LoraConfig(rank=4))
    before = deepcopy(model.state_dict())
    change_weights(model)
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {f"{path}.lora_B" for path in lora_layers(model)}


def test_stale_weights_are_found_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("foveal.cluster.worker.TransformersEngine", StaleEngine)
    assert run_check(tmp_path, "qwen2_5_vl") == 1
    captured = capsys.readouterr()
    (_, before), (mean, after) = gaps(captured.out)
    assert before < LARGEST_FLOAT32 < after
    assert "something stale" in captured.err
    (told,) = re.findall(rf"old weights would be off by {SCIENTIFIC}", captured.out)
    assert mean == pytest.approx(float(told), rel=0.3)


def test_an_engine_that_computes_otherwise_is_found_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("foveal.cluster.worker.TransformersEngine", WrongEngine)
    assert run_check(tmp_path, "qwen2_5_vl") == 1
    error = capsys.readouterr().err
    assert "Largest difference in prompts with pictures: " in error and "stale" not in error


def test_numbers_that_are_none_are_beyond_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("foveal.parity.NOISE", float("nan"))
    monkeypatch.setattr("foveal.cluster.worker.TransformersEngine", StaleEngine)
    assert run_check(tmp_path, "qwen2_5_vl") == 1
    (_, before), (_, after) = gaps(capsys.readouterr().out)
    assert before < LARGEST_FLOAT32 and math.isnan(after)


def test_the_worst_token_is_named_with_what_both_sides_give_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_check(tmp_path, "qwen2_5_vl", "worker.rollout.temperature=0.7") == 0
    output = capsys.readouterr().out
    assert "4 prompts (2 with pictures), 4 answers each, temperature 0.7" in output
    lines = re.findall(
        r"worst: prompt train-0-(\d) \(row (\d), pictures: (\d)\), answer [0-3], token \d of \d, '.+' \(id \d+\): "
        r"engine (-[\d.]+), trainer (-[\d.]+)",
        output,
    )
    assert len(lines) == 2
    for uid_row, row, pictures, engine, trainer in lines:
        assert uid_row == row and int(pictures) == 1 - int(row) % 2
        assert float(engine) == pytest.approx(float(trainer), abs=LARGEST_FLOAT32)


def test_a_cut_distribution_is_compared_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check(tmp_path, "qwen2_5_vl", "worker.rollout.top_p=0.8", "worker.rollout.top_k=5") == 0
    output = capsys.readouterr().out
    assert "instead of worker.rollout.top_p=0.8 and top_k=5" in output


def test_every_weight_changes_a_little_and_always_alike() -> None:
    models = [tiny_model("qwen2_5_vl") for _ in range(3)]
    for model in models[1:]:
        change_weights(model)
    for (name, weight), once, again in zip(
        models[0].named_parameters(), *(m.parameters() for m in models[1:]), strict=True
    ):
        assert torch.equal(once, again)
        assert not torch.isclose(weight, once, rtol=1e-4, atol=1e-7).all(), name
        assert (once - weight).norm() < 0.2 * weight.norm().clamp(min=0.01), name


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "usage: foveal check"),
        (["--parity", "--rows", "0"], "--rows: 0 given"),
        (["--parity", "--rows"], "--rows: expected one argument"),
        (["--parity", "--rowz=3"], "no option --rowz=3"),
    ],
)
def test_wrong_usage_says_how(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["check", *arguments])
    except SystemExit as exit_:  # as argparse ends
        status = int(str(exit_.code))
    assert status == 2
    captured = capsys.readouterr()
    assert told in captured.out + captured.err


def test_what_a_run_lacks_is_told_without_asking_for_a_reward(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--parity", "trainer.n_gpus_per_node=1", "worker.rollout.n=2"]) == 1
    error = capsys.readouterr().err
    assert "data.train_files is not set" in error and "reward_function" not in error
