"""Tiny models with the real classes: a few layers, random weights, a small tokenizer and real processor files.

python -m foveal.quickstart.tiny FOLDER --family qwen3_vl --size quickstart --seed 1
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3Config,
    Qwen3VLConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

Family: TypeAlias = Literal["qwen3_vl", "qwen2_5_vl", "qwen2_vl", "qwen3", "llama"]
Size: TypeAlias = Literal["micro", "quickstart"]

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
# Words whose merges make the questions and answers of the picture tasks short.
CORPUS = (
    "How tall is the bar and what colour is it? How many shapes are there? <answer>4 red</answer>",
    "red green blue yellow purple orange teal brown gray black white one two three four five six",
    "a circle square triangle rectangle star bar picture image number height answer question count name",
    "What is the colour of the shape? Which shape is in the image? Is there a green square? yes no",
    "Does the picture contain a triangle? Is no circle present? Tell me what you see. Answer with one word.",
    "Think first, then give the final answer in the tags <think> </think> <answer> </answer> \\boxed{12}",
)
HEAD_DIM = 32  # the smallest that vLLM's CPU attention takes

_PROCESSORS: dict[Family, Any] = {
    "qwen3_vl": Qwen3VLProcessor,
    "qwen2_5_vl": Qwen2_5_VLProcessor,
    "qwen2_vl": Qwen2VLProcessor,
}


@dataclass(frozen=True)
class _Shape:
    width: int
    layers: int
    kv_heads: int
    vision_width: int
    vision_layers: int
    positions: int
    vocabulary: int


_SHAPES: dict[Size, _Shape] = {
    "micro": _Shape(
        width=64,
        layers=2,
        kv_heads=1,
        vision_width=32,
        vision_layers=2,
        positions=16,
        vocabulary=256 + len(SPECIAL_TOKENS),
    ),
    "quickstart": _Shape(
        width=128, layers=3, kv_heads=2, vision_width=96, vision_layers=3, positions=36, vocabulary=1000
    ),
}


def build_tiny(
    folder: str | Path,
    family: Family = "qwen3_vl",
    *,
    size: Size = "micro",
    seed: int = 0,
    tie: bool = False,
    dtype: torch.dtype | str = "float32",
    initializer_range: float = 0.06,
) -> Path:
    """Writes a random-weight model with tokenizer, chat template, processor and generation config.

    The folder loads with `AutoProcessor` and `AutoModelForImageTextToText` (`AutoTokenizer` and `AutoModelForCausalLM`
    for the text families). The same arguments give the same weights.

    Args:
        folder: made when absent; files of the same names are replaced.
        family: the `model_type` to build.
        size: "micro", 0.1–0.3M parameters and one token per byte, for tests; "quickstart", 0.6–1.5M parameters and a
            byte-level BPE of up to 1,000 entries.
        seed: of the weights.
        tie: whether the output head is the token embedding.
        dtype: in which the weights are stored, as "float32" or `torch.bfloat16`.
        initializer_range: standard deviation of the weights. At these widths training is slow to start with the usual
            0.02; 0.05 to 0.08 works.

    Returns:
        The folder.
    """
    folder = Path(folder)
    tokenizer = _tokenizer(_SHAPES[size].vocabulary)
    config = _config(family, _SHAPES[size], tokenizer, tie, initializer_range)
    is_text = family in ("qwen3", "llama")
    auto_class: Any = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class.from_config(config)
    model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    stop, pad = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))
    model.generation_config = GenerationConfig(eos_token_id=[stop, pad], pad_token_id=pad, do_sample=True)
    model.save_pretrained(folder)
    (tokenizer if is_text else _processor(family, tokenizer)).save_pretrained(folder)
    return folder


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in ("<|im_end|>", "<|endoftext|>")],
        chat_template=CHAT_TEMPLATE,
    )


def _config(
    family: Family, shape: _Shape, tokenizer: PreTrainedTokenizerFast, tie: bool, initializer_range: float
) -> PreTrainedConfig:
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    common: dict[str, Any] = {
        "pad_token_id": ids["<|endoftext|>"],
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "tie_word_embeddings": tie,
    }
    text: dict[str, Any] = {
        "vocab_size": -(-len(tokenizer) // 8) * 8,
        "hidden_size": shape.width,
        "intermediate_size": 2 * shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.width // HEAD_DIM,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 8192,
        "initializer_range": initializer_range,
        **common,
    }
    if family == "qwen3":
        return Qwen3Config(**text)
    if family == "llama":
        return LlamaConfig(**text)

    vision: dict[str, Any] = {
        "depth": shape.vision_layers,
        "num_heads": shape.vision_width // HEAD_DIM,
        "initializer_range": initializer_range,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    media: dict[str, Any] = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    if family == "qwen3_vl":
        vision |= {
            "hidden_size": shape.vision_width,
            "out_hidden_size": shape.width,
            "intermediate_size": 2 * shape.vision_width,
            "num_position_embeddings": shape.positions,
            "deepstack_visual_indexes": [0, 1],
        }
        text["rope_parameters"] = {**rope, "mrope_interleaved": True}
        return Qwen3VLConfig(text_config=text, vision_config=vision, **media, **common)

    del text["head_dim"]
    text |= {"rope_parameters": rope, "use_sliding_window": False}
    if family == "qwen2_5_vl":
        vision |= {
            "hidden_size": shape.vision_width,
            "out_hidden_size": shape.width,
            "intermediate_size": 2 * shape.vision_width - 4,  # as in the published sizes, not a multiple of 8
            "fullatt_block_indexes": [shape.vision_layers - 1],
        }
        return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **media, **common)
    vision |= {"embed_dim": shape.vision_width, "hidden_size": shape.width, "mlp_ratio": 2}
    return Qwen2VLConfig(text_config=text, vision_config=vision, **media, **common)


def _processor(family: Family, tokenizer: PreTrainedTokenizerFast) -> Any:
    patch = 16 if family == "qwen3_vl" else 14
    options: dict[str, Any] = {
        "patch_size": patch,
        "size": {"shortest_edge": (2 * patch) ** 2, "longest_edge": (64 * patch) ** 2},
    }
    if family == "qwen3_vl":
        options |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    image = Qwen2VLImageProcessor(**options)
    video = (Qwen3VLVideoProcessor if family == "qwen3_vl" else Qwen2VLVideoProcessor)(**options)
    return _PROCESSORS[family](image, tokenizer, video, chat_template=CHAT_TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random-weight model folder.")
    parser.add_argument("folder")
    parser.add_argument("--family", choices=get_args(Family), default="qwen3_vl")
    parser.add_argument("--size", choices=get_args(Size), default="micro")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tie", action="store_true", help="make the output head the token embedding")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    options = parser.parse_args()
    print(build_tiny(**vars(options)))


if __name__ == "__main__":
    main()
