"""An export answers as the trainer's engine did: loaded by transformers, and by vLLM, as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from foveal.config.schema_model import LoraConfig
from foveal.data.processing import Processing, load_processing
from foveal.models.loading import load_model
from foveal.models.lora import add_lora
from foveal.quickstart.tiny import Family, build_tiny
from foveal.rollout.transformers_engine import TransformersEngine
from foveal.train.export import export
from foveal.types import Media, Prompt, Sampling
from tests.lora_support import shake
from tests.model_helpers import load, save_actor, train_step

TOKENS = 16
QUESTIONS = ["<|im_start|>What is this?<|im_end|>", "How many shapes are there in the pictures? " * 3]


def picture(seed: int, folder: Path) -> Path:
    path = folder / f"{seed}.png"
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (64, 96, 3), dtype=np.uint8)).save(path)
    return path


class Run:
    """A trained checkpoint, its export, and the trainer's greedy answers to prompts with one and two pictures."""

    def __init__(self, root: Path, family: Family, *, lora: bool) -> None:
        source = build_tiny(root / "model", family, tie=True, initializer_range=0.2)
        model: Any = load_model(str(source), dtype=torch.float32, device=torch.device("cpu"))
        if lora:
            add_lora(model, LoraConfig(rank=4, alpha=8))
            shake(model)
        else:
            train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), seed=0)
        self.processing: Processing = load_processing(str(source))
        save_actor(root / "actor", model, None, source_path=str(source), save_processing=self.processing.save)
        self.folder = export(root / "actor")
        self.pictures = [[picture(1, root)], [picture(2, root), picture(3, root)]]
        self.texts = [
            "<|vision_start|><|image_pad|><|vision_end|>" * len(pictures) + question
            for pictures, question in zip(self.pictures, QUESTIONS, strict=True)
        ]
        self.forbidden = [*self.processing.forbidden_ids, *self.processing.eos_ids]
        engine = TransformersEngine(
            model,
            self.processing.features,
            forbidden_ids=self.forbidden,
            eos_ids=self.processing.eos_ids,
            pad_id=self.processing.pad_id,
        )
        prompts = [self._prompt(number) for number in range(len(self.texts))]
        groups = engine.generate(prompts, Sampling(temperature=0.0, max_tokens=TOKENS), 0)
        self.answers = [group.responses[0].token_ids.tolist() for group in groups]

    def _prompt(self, number: int) -> Prompt:
        media = [Media("image", path.read_bytes(), path.name) for path in self.pictures[number]]
        ids, expanded, features = self.processing.encode(self.texts[number], media)
        return Prompt(f"{number}", ids, expanded, media, {}, number, "", features)


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_transformers_gives_the_trainer_s_answers(tmp_path: Path, family: Family, lora: bool) -> None:
    run = Run(tmp_path, family, lora=lora)
    model, processor = load(run.folder, "auto"), AutoProcessor.from_pretrained(run.folder)
    for text, pictures, expected in zip(run.texts, run.pictures, run.answers, strict=True):
        inputs = processor(text=text, images=[Image.open(path) for path in pictures], return_tensors="pt")
        given = model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS, suppress_tokens=run.forbidden)
        assert given[0, inputs["input_ids"].shape[1] :].tolist() == expected


_VLLM = """
import json, sys
from PIL import Image
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    asked = json.loads(sys.stdin.read())
    limits = {"max_model_len": 512, "limit_mm_per_prompt": {"image": 2}}
    engine = LLM(asked["model"], dtype="float32", enforce_eager=True, **limits)
    prompts = [
        {"prompt": text, "multi_modal_data": {"image": [Image.open(path) for path in pictures]}}
        for text, pictures in asked["prompts"]
    ]
    sampling = SamplingParams(temperature=0, max_tokens=asked["tokens"], allowed_token_ids=asked["allowed"])
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    print("ANSWERS", json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
def test_vllm_gives_the_trainer_s_answers(tmp_path: Path, lora: bool) -> None:
    run = Run(tmp_path, "qwen2_5_vl", lora=lora)
    size = json.loads((run.folder / "config.json").read_text())["text_config"]["vocab_size"]
    asked = {
        "model": str(run.folder),
        "prompts": list(zip(run.texts, [[str(path) for path in pictures] for pictures in run.pictures], strict=True)),
        "tokens": TOKENS,
        "allowed": sorted(set(range(size)) - set(run.forbidden)),
    }
    script = tmp_path / "answer.py"
    script.write_text(_VLLM)
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | settings,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("ANSWERS"))
    assert json.loads(line.removeprefix("ANSWERS")) == run.answers
