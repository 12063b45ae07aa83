"""Seconds that the length filter takes for 100,000 rows with pictures: at the first start and at the second.

Usage: python -m benchmarks.data_filter [ROWS] [--parquet] [--out FILE]

Each start is a process of its own, which times the opening of the loader (rows, lengths, filter) apart from the imports
and the model's tokenizer. The rows hold a question of 30 to 300 characters and a JPEG of their own, between 64x64 and
1600x1600, as a file; --parquet puts the pictures into the rows instead.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

WORDS = ["which", "of", "the", "shapes", "stands", "left", "large", "red", "circle", "nearer", "than", "other"]


def write_rows(folder: Path, count: int, parquet: bool) -> Path:
    """Pictures are blank but for their size: their headers are all that is read."""
    random = np.random.default_rng(0)
    pictures = folder / "pictures"
    pictures.mkdir()
    encoded: dict[tuple[int, int], bytes] = {}
    rows = []
    for number in range(count):
        height, width = (int(side) * 32 for side in random.integers(2, 51, 2))
        if (height, width) not in encoded:
            Image.new("RGB", (width, height)).save(pictures / "one.jpg")
            encoded[height, width] = (pictures / "one.jpg").read_bytes()
        question = " ".join(random.choice(WORDS, int(random.integers(6, 60))))
        name = f"{number:06d}.jpg"
        picture: object = {"bytes": encoded[height, width], "path": name}
        if not parquet:
            (pictures / name).write_bytes(encoded[height, width])
            picture = name
        rows.append({"id": number, "prompt": f"<image>{question}?", "answer": "7", "images": [picture]})
    if parquet:
        from datasets import Dataset

        Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
        return folder / "rows.parquet"
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start(model: str, rows: str, pictures: str) -> None:
    """One start of a run up to its loader; prints what it took as JSON."""
    from foveal.config import Config
    from foveal.data.loader import open_loader
    from foveal.data.processing import load_processing

    config = Config()
    config.data.train_files, config.data.image_dir, config.data.max_prompt_length = rows, pictures, 1536
    processing = load_processing(model, min_pixels=config.data.min_pixels, max_pixels=config.data.max_pixels)
    before = cpu_seconds()
    begin = time.perf_counter()
    loader = open_loader(config, processing, "train")
    seconds = time.perf_counter() - begin
    usable = len(loader)
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds() - before, "rows_used": usable}))


def cpu_seconds() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def measure(rows: int, parquet: bool) -> dict[str, object]:
    from foveal.quickstart.tiny import build_tiny

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = build_tiny(folder / "model", "qwen2_5_vl")
        path = write_rows(folder, rows, parquet)
        environment = {**os.environ, "HF_HOME": str(folder / "cache")}
        command = [sys.executable, "-m", "benchmarks.data_filter", "--start", *map(str, (model, path))]
        if parquet:  # Arrow's own copy of the file is made once, by `datasets`
            from foveal.data.source import load_rows

            os.environ["HF_HOME"] = environment["HF_HOME"]
            load_rows(str(path))
        starts = []
        for _ in range(2):
            load = os.getloadavg()[0]
            output = subprocess.run(
                [*command, str(folder / "pictures")], env=environment, check=True, stdout=subprocess.PIPE, text=True
            ).stdout
            print(output)
            starts.append({**json.loads(output.splitlines()[-1]), "load_before": load})
        cache = sum(file.stat().st_size for file in (folder / "cache" / "foveal").rglob("*.npz"))
    first, second = starts
    return {
        "rows": rows,
        "pictures": "in the rows (parquet)" if parquet else "files",
        "processors": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "first_start": first,
        "second_start": second,
        "cache_bytes": cache,
    }


def main() -> None:
    parser = argparse.ArgumentParser(usage=(__doc__ or "").splitlines()[2].removeprefix("Usage: "))
    parser.add_argument("rows", type=int, nargs="?", default=100_000)
    parser.add_argument("--parquet", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--start", nargs=3)
    options = parser.parse_args()
    if options.start:
        start(*options.start)
        return
    result = measure(options.rows, options.parquet)
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
