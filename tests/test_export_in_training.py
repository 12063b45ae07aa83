"""`trainer.save_hf`: checkpoints hold Hugging Face weights at once, the same that a merge makes of them later."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from foveal.cli import main
from foveal.errors import CheckpointError
from foveal.train import snapshot
from foveal.train.export import export
from tests.model_helpers import load, same_tensors
from tests.small_run import small_run


@pytest.mark.parametrize("more", [[], ["worker.actor.model.lora.rank=4"]], ids=["all weights", "LoRA"])
def test_every_checkpoint_holds_what_a_merge_would_make(tmp_path: Path, more: list[str]) -> None:
    options = ["trainer.save_hf=true", "trainer.save_freq=1", "trainer.max_steps=2", *more]
    assert main(["train", *small_run(tmp_path, "qwen3_vl", *options)]) == 0
    found = []
    for step in (1, 2):
        actor = tmp_path / "run" / f"global_step_{step}" / "actor"
        load(actor / "huggingface", "auto")
        merged = export(actor, tmp_path / f"merged {step}")
        found.append(load_file(actor / "huggingface" / "model.safetensors"))
        assert same_tensors(found[-1], load_file(merged / "model.safetensors"))
    assert not same_tensors(found[0], found[1])


def test_weights_that_cannot_be_written_leave_the_checkpoint_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(snapshot, "export", full)
    options = ["trainer.save_hf=true", "trainer.max_steps=1"]
    assert main(["train", *small_run(tmp_path, "qwen3_vl", *options)]) == 0
    assert "without Hugging Face weights (trainer.save_hf): the disk is full" in capsys.readouterr().err
    actor = tmp_path / "run" / "global_step_1" / "actor"
    assert not list((actor / "huggingface").glob("*.safetensors"))
    load(export(actor), "auto")
