"""A run's folder as training leaves it, with chosen texts, metrics and answers."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from foveal.track.file import RunFiles
from foveal.track.sample_files import SampleFiles, Split
from foveal.types import Group, Media, Metrics, Prompt, Response


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, as Qwen's, so small that Chinese letters are several tokens each."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["how tall is the bar and what colour is it? 8 green 7 red"] * 3, vocab_size=300)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer)


def picture(color: tuple[int, int, int] = (200, 30, 30), size: int = 24) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), color).save(buffer, "PNG")
    return buffer.getvalue()


def response(text: str, overall: float | None = 1.0, *, trained: bool = True, **changes: Any) -> Response:
    """An answer with numbers for each token, as training leaves them, or as validation does."""
    ids = np.array(byte_tokenizer().encode(text), dtype=np.int64)
    logprobs = -np.linspace(0.001, 3, len(ids), dtype=np.float32)
    columns = {}
    if trained:
        columns = {
            "advantages": np.full(len(ids), (overall or 0) - 0.5, dtype=np.float32),
            "old_logprobs": logprobs + np.float32(0.02),
            "entropies": np.linspace(0, 2, len(ids), dtype=np.float32),
        }
    rewards = {} if overall is None else {"overall": overall, "accuracy": float(overall > 0.5)}
    made = Response(ids, logprobs, "stop", text=text, rewards=rewards, columns=columns)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def group(row: int, responses: list[Response], *, prompt: str = "how tall?", data: bytes | None = None) -> Group:
    ids = byte_tokenizer().encode(prompt)
    media = [Media("image", data or picture(), f"pictures/{row}.png")]
    return Group(Prompt(f"val-0-{row}", ids, ids, media, {}, row, "8 green"), responses)


def write_part(run: Path, split: Split, step: int, groups: list[Group], after: int = 10**6) -> None:
    part = SampleFiles(run, byte_tokenizer(), after=after).part(split, step)
    part.add(groups)
    part.write()


def write_log(run: Path, steps: dict[int, Metrics], config: dict[str, Any] | None = None) -> None:
    files = RunFiles(run, config or {"trainer": {"max_steps": 100}})
    for step, metrics in steps.items():
        files.log(metrics, step)
    files.close()


def write_run(run: Path, **config: Any) -> Path:
    """Two validations of three prompts, one training step of two prompts with four answers each, metrics and times."""
    steps: dict[int, Metrics] = {
        step: {
            "reward/overall": step / 10,
            "actor/grad_norm": 1.0,
            "timing_s/gen": 2.0,
            "timing_s/update_actor": 3.0,
            "timing_s/step": 6.0,
            "alarm/cut_off": float(2 <= step <= 3),
        }
        for step in range(1, 6)
    }
    write_log(run, {0: {"val/reward_score": 0.1}, **steps}, {"trainer": {"max_steps": 100}, **config})
    for step in (0, 5):
        write_part(
            run, "val", step, [group(row, [response(f"{row + step} red", step / 5, trained=False)]) for row in range(3)]
        )
    several = [response(f"{n} high, purple", n / 3) for n in range(4)]
    write_part(run, "train", 5, [group(7, several), group(8, several[::-1], data=picture((0, 200, 0)))])
    return run
