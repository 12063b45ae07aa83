"""Model folders of real sizes with random weights, and rows with pictures, for measurements without a hub."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from foveal.quickstart.tiny import build_tiny

# Dimensions as in the models' published config.json files.
QWEN2_5_VL = {
    "3B": {
        "text": {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
        },
        "tie": True,
    },
    "7B": {
        "text": {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
        "tie": False,
    },
}
VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "patch_size": 14,
    "tokens_per_second": 2,
}


def build_qwen2_5_vl(folder: Path, size: str, *, layers: int | None = None) -> Path:
    """Writes a Qwen2.5-VL of a published size with random bf16 weights and a small byte-level tokenizer.

    Args:
        size: "3B" or "7B".
        layers: so many decoder and vision layers and a small vocabulary, for trying a script out on a CPU.
    """
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    build_tiny(folder, "qwen2_5_vl", tie=QWEN2_5_VL[size]["tie"], dtype="bfloat16")
    config = AutoConfig.from_pretrained(folder)
    for name, value in QWEN2_5_VL[size]["text"].items():
        setattr(config.text_config, name, value if name != "num_hidden_layers" else layers or value)
    text = config.text_config
    if layers is None:
        text.vocab_size = 151936
    text.head_dim = 128
    text.layer_types = ["full_attention"] * text.num_hidden_layers
    text.rope_parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text.initializer_range = 0.02
    for name, value in VISION.items():
        setattr(config.vision_config, name, value)
    if layers is not None:
        config.vision_config.depth, config.vision_config.fullatt_block_indexes = layers, [layers - 1]
    config.vision_config.out_hidden_size = text.hidden_size
    config.vision_config.initializer_range = 0.02
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def picture_rows(folder: Path, count: int, *, width: int = 672, height: int = 448) -> Path:
    """Writes `count` rows with one picture each (384 visual tokens at 672×448 for Qwen2.5-VL) as JSONL."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    rows = []
    for index in range(count):
        picture = Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))
        path = folder / f"{index}.png"
        picture.save(path, compress_level=1)
        rows.append(
            {"problem": "<image>" + "What does this show? " * 8, "answer": str(index % 7), "images": [path.name]}
        )
    out = folder / "rows.jsonl"
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out
