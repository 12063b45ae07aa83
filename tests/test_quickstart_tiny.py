from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from foveal.quickstart.tiny import Family, build_tiny

VISION_FAMILIES = [family for family in get_args(Family) if "vl" in family]


def _chat(processor: Any, content: Any) -> str:
    return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_vision_family_reads_a_picture(family: Family, tmp_path: Path) -> None:
    folder = build_tiny(tmp_path, family)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    assert model.config.model_type == family
    text = _chat(processor, [{"type": "image"}, {"type": "text", "text": "What is it?"}])

    def logits(shade: int) -> torch.Tensor:
        inputs = processor(text=[text], images=[Image.new("RGB", (64, 64), (shade, 0, 0))], return_tensors="pt")
        return model(**inputs).logits[0, -1]

    assert not torch.equal(logits(20), logits(200))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_text_family_answers_a_chat(family: Family, tmp_path: Path) -> None:
    folder = build_tiny(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(
        _chat_text := tokenizer.apply_chat_template(
            [{"role": "user", "content": "2 + 2"}], add_generation_prompt=True, tokenize=False
        ),
        return_tensors="pt",
    )
    assert _chat_text == "<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n"
    assert torch.isfinite(model(**ids).logits).all()


@pytest.mark.parametrize(("size", "low", "high"), [("micro", 100_000, 300_000), ("quickstart", 1_000_000, 4_000_000)])
def test_size_of_qwen3_vl(size: Any, low: int, high: int, tmp_path: Path) -> None:
    weights = load_file(build_tiny(tmp_path, "qwen3_vl", size=size) / "model.safetensors")
    assert low <= sum(tensor.numel() for tensor in weights.values()) <= high


def test_seed_decides_the_weights(tmp_path: Path) -> None:
    first, again, other = (
        load_file(build_tiny(tmp_path / name, "qwen3_vl", seed=seed) / "model.safetensors")
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_tied_model_has_no_head_of_its_own(tmp_path: Path) -> None:
    tied = build_tiny(tmp_path / "tied", "qwen2_5_vl", tie=True)
    own = build_tiny(tmp_path / "own", "qwen2_5_vl", tie=False)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    assert "lm_head.weight" in load_file(own / "model.safetensors")


def test_weights_are_stored_in_the_asked_type(tmp_path: Path) -> None:
    weights = load_file(build_tiny(tmp_path, "qwen3_vl", dtype="bfloat16") / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_any_text_survives_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(build_tiny(tmp_path, "qwen3_vl", size="quickstart"))
    text = "Größe 12 px: 红色 <answer>4 red</answer>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
