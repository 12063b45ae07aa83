"""Memory of the process that loads data, over the steps of a run: it must not grow.

Usage: python -m benchmarks.loader_memory [STEPS] [--batch N] [--rows N] [--out FILE]

Takes batch after batch as a trainer does (features made, then dropped with the batch), of rows with photographs-like
pictures of 200x200 to 1200x1200 pixels, through several epochs. What is reported is the resident memory after every
fiftieth step, and the slope of a line through its second half.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from foveal.config import Config
from foveal.data.loader import open_loader
from foveal.data.processing import load_processing
from foveal.quickstart.tiny import build_tiny

EVERY = 10


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def write_rows(folder: Path, count: int) -> Path:
    random = np.random.default_rng(0)
    rows = []
    for number in range(count):
        height, width = (int(side) for side in random.integers(200, 1200, 2))
        coarse = random.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg")
        rows.append({"prompt": "<image>What is it?", "answer": str(number), "images": [f"{number}.jpg"]})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def measure(steps: int, batch: int, rows: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = Config()
        config.data.train_files = str(write_rows(folder, rows))
        config.data.image_dir = temporary
        config.data.rollout_batch_size = batch
        config.data.max_prompt_length = 4096
        config.data.min_pixels, config.data.max_pixels = 3136, 1_048_576
        limits = {"min_pixels": config.data.min_pixels, "max_pixels": config.data.max_pixels}
        processing = load_processing(str(build_tiny(folder / "model", "qwen2_5_vl")), **limits)
        loader = open_loader(config, processing, "train")
        begin, resident, encoded, features = time.perf_counter(), [], 0, 0
        for step in range(1, steps + 1):
            prompts = loader.take(batch)
            encoded = max(encoded, sum(len(medium.data) for prompt in prompts for medium in prompt.media))
            features = max(features, sum(_bytes(processing.features(prompt)) for prompt in prompts))
            if step % EVERY == 0:
                gc.collect()
                resident.append(resident_bytes())
        seconds = time.perf_counter() - begin
    half = len(resident) // 2
    late = np.array(resident[half:], dtype=float)
    slope = np.polyfit(np.arange(len(late)) * EVERY, late, 1)[0]
    return {
        "steps": steps,
        "prompts_per_step": batch,
        "rows": rows,
        "epochs": round(steps * batch / rows, 1),
        "seconds": round(seconds, 1),
        "largest_batch_encoded_mb": round(encoded / 1e6, 1),
        "largest_batch_features_mb": round(features / 1e6, 1),
        "resident_mb_every_50_steps": [round(value / 1e6) for value in resident[4::5]],
        "mean_resident_mb_third_and_last_quarter": [
            round(float(part.mean()) / 1e6) for part in (late[: len(late) // 2], late[len(late) // 2 :])
        ],
        "slope_kb_per_step": round(float(slope) / 1e3, 1),
    }


def _bytes(features: dict[str, object]) -> int:
    return sum(value.nbytes for value in features.values())  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int, nargs="?", default=500)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = json.dumps(measure(options.steps, options.batch, options.rows), indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
