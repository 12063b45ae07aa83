"""Model folders of real sizes with random weights, and rows with pictures, for measurements without a hub."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from foveal.quickstart.tiny import Family, build_tiny

CHAT_TOKENS = 21
"""What the chat template and the vision marks add to one picture and a question."""
IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
TEXT_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class RealSize:
    """A published model: dimensions as in its config.json.

    Attributes:
        model_type: as in config.json.
        like: the tiny family whose tokenizer and processor files serve it.
    """

    name: str
    model_type: str
    like: Family
    tied: bool
    text: dict[str, Any]
    vision: dict[str, Any]


_QWEN2_5_TEXT = {
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
_QWEN2_5_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "patch_size": 14,
    "tokens_per_second": 2,
}
_QWEN3_TEXT = {
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "head_dim": 128,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}
_QWEN3_VISION = {"num_heads": 16, "patch_size": 16, "num_position_embeddings": 2304}

SIZES = {
    "3B": RealSize(
        "Qwen2.5-VL-3B",
        "qwen2_5_vl",
        like="qwen2_5_vl",
        tied=True,
        text={
            **_QWEN2_5_TEXT,
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
        },
        vision={**_QWEN2_5_VISION, "out_hidden_size": 2048},
    ),
    "7B": RealSize(
        "Qwen2.5-VL-7B",
        "qwen2_5_vl",
        like="qwen2_5_vl",
        tied=False,
        text={
            **_QWEN2_5_TEXT,
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
        vision={**_QWEN2_5_VISION, "out_hidden_size": 3584},
    ),
    "4B": RealSize(
        "Qwen3-VL-4B",
        "qwen3_vl",
        like="qwen3_vl",
        tied=True,
        text={
            **_QWEN3_TEXT,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
        },
        vision={
            **_QWEN3_VISION,
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "out_hidden_size": 2560,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    ),
    "30B-A3B": RealSize(
        "Qwen3-VL-30B-A3B",
        "qwen3_vl_moe",
        like="qwen3_vl",
        tied=False,
        text={
            **_QWEN3_TEXT,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
        vision={
            **_QWEN3_VISION,
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "out_hidden_size": 2048,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    ),
}


def build_model(folder: Path, size: str, *, layers: int | None = None, weights: bool = True) -> Path:
    """Writes a model folder of a published size: configuration, a small byte-level tokenizer, processor, weights.

    Args:
        size: a key of `SIZES`.
        layers: so many decoder and vision layers, few experts and a small vocabulary, for trying a script on a CPU.
        weights: False leaves the weights out, for engines that start with random ones anyway.
    """
    from transformers import AutoConfig

    real = SIZES[size]
    build_tiny(folder, real.like)
    tiny = AutoConfig.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    text = {**real.text, **{name: getattr(tiny.text_config, name) for name in TEXT_IDS}}
    vision = dict(real.vision)
    if layers is not None:
        text |= {"num_hidden_layers": layers, "vocab_size": tiny.text_config.vocab_size}
        vision["depth"] = layers
        places = "fullatt_block_indexes" if "fullatt_block_indexes" in vision else "deepstack_visual_indexes"
        vision[places] = [layers - 1]
        if "num_experts" in text:
            text["num_experts"] = 2 * text["num_experts_per_tok"]
    config = AutoConfig.for_model(
        real.model_type,
        text_config={**text, "tie_word_embeddings": real.tied},
        vision_config=vision,
        tie_word_embeddings=real.tied,
        **{name: getattr(tiny, name) for name in IDS},
    )
    config.dtype = torch.bfloat16
    config.architectures = [type(config).__name__.replace("Config", "ForConditionalGeneration")]
    config.save_pretrained(folder)
    if weights:
        random_module(folder, torch.device("cuda" if torch.cuda.is_available() else "cpu")).save_pretrained(folder)
    return folder


def random_module(folder: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The transformers module of the folder's configuration, with random weights made on `device`."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    with device:
        return AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)


def picture_rows(folder: Path, count: int, *, width: int = 672, height: int = 448, characters: int = 168) -> Path:
    """Writes `count` rows as JSONL, each with one picture of noise and a question of so many characters.

    At 672×448 a picture is 384 tokens for Qwen2.5-VL and 294 for Qwen3-VL; a character is a token of the small
    tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    question = ("What does this show? " * (1 + characters // 21))[:characters]

    def write(index: int) -> dict[str, Any]:
        pixels = np.random.default_rng(index).integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png", compress_level=1)
        return {"problem": "<image>" + question, "answer": str(index % 7), "images": [f"{index}.png"]}

    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(write, range(count)))
    out = folder / "rows.jsonl"
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def models_asked_for(parser: argparse.ArgumentParser, names: str) -> str:
    """The one model of a comma-separated list; several run one after the other, each in a process of its own, and then
    the script ends."""
    sizes = names.split(",")
    if unknown := set(sizes) - SIZES.keys():
        parser.error(f"--models: no {', '.join(sorted(unknown))}; there are {', '.join(SIZES)}")
    if len(sizes) > 1:
        commands = [[sys.executable, *sys.argv, "--models", size] for size in sizes]
        sys.exit(max(subprocess.run(command, check=False).returncode != 0 for command in commands))
    return sizes[0]
