"""An EasyR1 shell script runs from the checkout as it is, and its checkpoint becomes a model that anyone can load."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from foveal.quickstart.tiny import build_tiny
from foveal.train.checkpoint import load_trained
from tests.small_run import REWARD, write_rows

ROOT = Path(__file__).resolve().parents[1]


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a copy of what a checkout holds, with `python3` being this interpreter."""
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    shim = binaries / "python3"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    shim.chmod(0o755)
    variables = {
        **os.environ,
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        **environment,
    }
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=540, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the project's own files, so that the run's outputs land outside the real checkout."""
    for name in ("foveal", "verl", "examples", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_qwen3_vl_4b_script_trains_and_merges(checkout: Path, dtype: str) -> None:
    model = build_tiny(checkout / "model", "qwen3_vl", dtype=dtype)
    rows = write_rows(checkout / "rows", count=16)
    overrides = f"""data.train_files={rows} data.val_files={rows} data.image_dir={rows.parent}
        trainer.n_gpus_per_node=1 trainer.max_steps=2 data.rollout_batch_size=8 worker.actor.global_batch_size=4
        data.max_response_length=32 data.val_batch_size=8 worker.rollout.name=transformers
        worker.actor.entropy_coef=0.1""".split()  # a gradient, also where no answer scores
    done = run(["bash", "examples/qwen3_vl_4b_geo3k_grpo.sh", *overrides], checkout, MODEL_PATH=str(model))
    assert done.returncode == 0, done.stdout + done.stderr
    experiment = checkout / "checkpoints" / "easy_r1" / "qwen3_vl_4b_geo_grpo"
    records = [json.loads(line) for line in (experiment / "experiment_log.jsonl").read_text().splitlines()]
    steps = [r for r in records if "actor" in r]
    assert [r["step"] for r in steps] == [1, 2]
    assert {"overall", "accuracy", "format"} <= steps[-1]["reward"].keys()
    assert [r["step"] for r in records if "val" in r] == [0, 2]

    actor = experiment / "global_step_2" / "actor"
    done = run(["python3", "scripts/model_merger.py", "--local_dir", str(actor)], checkout)
    assert done.returncode == 0, done.stdout + done.stderr

    merged = AutoModelForImageTextToText.from_pretrained(actor / "huggingface", dtype="auto").eval()
    processor = AutoProcessor.from_pretrained(actor / "huggingface")
    assert merged.dtype == getattr(torch, dtype)
    trained = load_trained(actor, dtype=torch.float32)
    before = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), before.parameters(), strict=True)), (
        "training moved nothing"
    )
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which color?"}]}
    prompt = processor.apply_chat_template([message], add_generation_prompt=True)
    inputs = processor(text=[prompt], images=[Image.new("RGB", (64, 64), "red")], return_tensors="pt")
    # Not `trained.to(dtype)`: that would round the rotary frequencies too, which no loader does.
    reference = AutoModelForImageTextToText.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    reference.load_state_dict({name: value.to(reference.dtype) for name, value in trained.state_dict().items()})
    with torch.no_grad():
        expected = reference(**inputs).logits
        found = merged(**inputs).logits
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cispo", "dapo", "gspo", "reinforce", "sapo"])
def test_the_scripts_of_the_other_algorithms_run(checkout: Path, name: str) -> None:
    model = build_tiny(checkout / "model", "qwen2_5_vl")
    rows = write_rows(checkout / "rows", count=8)
    (checkout / "reward.py").write_text(REWARD)
    overrides = f"""data.train_files={rows} data.val_files={rows} data.image_dir={rows.parent} data.min_pixels=784
        trainer.n_gpus_per_node=1 trainer.max_steps=1 data.rollout_batch_size=4 worker.actor.global_batch_size=4
        data.mini_rollout_batch_size=4 data.max_response_length=16 data.val_batch_size=8 trainer.val_before_train=false
        trainer.val_freq=-1 worker.reward.reward_function=reward.py:score worker.rollout.name=transformers""".split()
    script = f"examples/qwen2_5_vl_7b_geo3k_{name}.sh"
    done = run(["bash", script, *overrides], checkout, MODEL_PATH=str(model))
    assert done.returncode == 0, done.stdout + done.stderr
    (log,) = checkout.glob("checkpoints/easy_r1/*/experiment_log.jsonl")
    (record,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert record["actor"]["grad_norm"] > 0
