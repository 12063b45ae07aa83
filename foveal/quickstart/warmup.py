"""Supervised steps before the reinforcement: the model learns to answer at all, and is stopped half-trained.

    python -m foveal.quickstart.warmup MODEL OUT [--target 0.4] config=FILE data.train_files=ROWS [KEY=VALUE …]

The configuration is that of the GRPO run that follows, so that prompts and pictures are the same in both.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModelForImageTextToText, PreTrainedModel

from foveal.config import Config, load_config
from foveal.data.processing import Processing, load_processing
from foveal.data.prompts import PromptBuilder
from foveal.data.source import open_rows
from foveal.errors import DataError, FovealError
from foveal.track.console import note
from foveal.types import Prompt

CHECK_EVERY = 5
CHECK_ROWS = 256
RAMP_STEPS = 20


@dataclass
class Recipe:
    """Supervised training.

    Attributes:
        target: training stops at the first check at which at least this share of answers is right.
        max_steps: and at this step at the latest.
        batch: rows per step.
        lr: peak learning rate of AdamW, reached after a linear rise over `RAMP_STEPS` steps.
        seed: of the order of the rows.
    """

    target: float = 0.4
    max_steps: int = 400
    batch: int = 32
    lr: float = 1e-3
    seed: int = 1


@dataclass
class Batch:
    """Chats with their answers, padded on the right.

    Attributes:
        inputs: what the model's forward takes; `input_ids` is (rows, length) int64.
        answer: (rows, length) bool, True at the tokens of the answers, the end token included.
    """

    inputs: dict[str, torch.Tensor]
    answer: torch.Tensor


def warm_up(config: Config, model_path: str | Path, out: str | Path, recipe: Recipe) -> float:
    """Trains a vision-language model on the answers of `data.train_files` until it is half-trained, and saves it.

    The last `CHECK_ROWS` rows are kept for the checks. An answer counts as right there when each of its tokens is the
    likeliest one, which is when greedy decoding writes it.

    Args:
        config: its `data` section says where rows are and how prompts are made.
        out: gets weights, tokenizer and processor.

    Returns:
        The share of right answers at the last check.

    Raises:
        DataError: no rows are named, or there are too few.
    """
    data = config.data
    if not data.train_files:
        raise DataError("data.train_files is not set. Give the warm-up's rows, as PATH_OR_HUB_ID@split.")
    processing = load_processing(
        str(model_path),
        tokenizer_path=None,
        trust_remote_code=False,
        min_pixels=data.min_pixels,
        max_pixels=data.max_pixels,
        chat_template=None,
    )
    builder = PromptBuilder(data, processing, open_rows(data, data.train_files))
    rows = len(builder.rows)
    if rows < recipe.batch + CHECK_ROWS:
        raise DataError(
            f"{data.train_files} has {rows} rows; the warm-up needs {recipe.batch + CHECK_ROWS} or more: {CHECK_ROWS} "
            f"for its checks and {recipe.batch} a step. Give more rows, or a smaller --batch."
        )
    model = AutoModelForImageTextToText.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr)
    check = make_batch([builder.build(row, f"check-{row}") for row in range(rows - CHECK_ROWS, rows)], processing)
    generator = np.random.default_rng(recipe.seed)
    order = np.concatenate(
        [generator.permutation(rows - CHECK_ROWS) for _ in range(1 + recipe.max_steps * recipe.batch // rows)]
    )
    accuracy = 0.0
    for step in range(1, recipe.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * min(1.0, step / RAMP_STEPS)
        chosen = order[(step - 1) * recipe.batch : step * recipe.batch]
        batch = make_batch([builder.build(int(row), f"warmup-{row}") for row in chosen], processing)
        loss = _step(model, optimizer, batch)
        if step % CHECK_EVERY == 0:
            accuracy = greedy_accuracy(model, check)
            note(f"warm-up step {step}: loss {loss:.3f}, accuracy {accuracy:.3f}")
            if accuracy >= recipe.target:
                break
    model.save_pretrained(out)
    processing.save(out)
    return accuracy


def make_batch(prompts: list[Prompt], processing: Processing) -> Batch:
    """Chats of the prompts, each followed by its answer and the end token."""
    tokenizer = processing.tokenizer
    ends = [
        [*tokenizer(str(prompt.answer), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for prompt in prompts
    ]
    length = max(len(prompt.expanded_ids) + len(end) for prompt, end in zip(prompts, ends, strict=True))
    ids = torch.full((len(prompts), length), processing.pad_id)
    attended = torch.zeros_like(ids)
    answer = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
        first, last = len(prompt.expanded_ids), len(prompt.expanded_ids) + len(end)
        ids[row, :last] = torch.tensor([*prompt.expanded_ids, *end])
        attended[row, :last] = 1
        answer[row, first:last] = True
    inputs = {
        "input_ids": ids,
        "attention_mask": attended,
        "mm_token_type_ids": ids.eq(processing.image_token_id or -1).long(),
    }
    features = [processing.features(prompt) for prompt in prompts]
    for name in ("pixel_values", "image_grid_thw"):
        parts = [feature[name] for feature in features if name in feature]
        if parts:
            inputs[name] = torch.cat(parts)
    return Batch(inputs, answer)


def _step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """One update on the loss summed over an answer's tokens and averaged over answers; returns the loss."""
    logits, targets = _answer_logits(model, batch)
    loss = functional.cross_entropy(logits, targets, reduction="sum") / len(batch.answer)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def greedy_accuracy(model: PreTrainedModel, batch: Batch) -> float:
    """The share of answers that greedy decoding would write exactly."""
    logits, targets = _answer_logits(model, batch)
    right = torch.ones_like(batch.answer)
    right[batch.answer] = logits.argmax(-1) == targets
    return right.all(1).float().mean().item()


def _answer_logits(model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (tokens, vocabulary) before each answer token, and these tokens (tokens,)."""
    logits = model(**batch.inputs, use_cache=False).logits
    return logits[:, :-1][batch.answer[:, 1:]].float(), batch.inputs["input_ids"][batch.answer]


def main() -> int:
    parser = argparse.ArgumentParser(description="Supervised warm-up; KEY=VALUE as for `foveal train`.")
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("out", help="folder for the half-trained model")
    parser.add_argument("--target", type=float, default=Recipe.target, help="stop at this accuracy")
    parser.add_argument("--max-steps", type=int, default=Recipe.max_steps)
    parser.add_argument("--batch", type=int, default=Recipe.batch)
    parser.add_argument("--lr", type=float, default=Recipe.lr)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    options, overrides = parser.parse_known_args()
    recipe = Recipe(options.target, options.max_steps, options.batch, options.lr, options.seed)
    try:
        warm_up(load_config(overrides), options.model, options.out, recipe)
    except FovealError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
