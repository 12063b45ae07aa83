"""Does the quick start learn from the pictures, and is it GRPO that teaches it? Three seeds, one JSON file.

    python3 benchmarks/quickstart_evidence.py --out benchmarks/results/quickstart.json

For each seed: the ordinary quick start; the trained model on the same questions with the pictures moved to other rows;
and the same run with every advantage set to zero. Accuracy is greedy, on the 512 test pictures that no run has seen.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from foveal.algorithm import Advantages, StepBatch
from foveal.cli import main as foveal
from foveal.quickstart.run import Folders, accuracies, prepare, train_arguments
from foveal.quickstart.task import SPLIT_ROWS, make_rows, write_rows


def zero_advantages(batch: StepBatch, config: Any) -> Advantages:
    """An advantage estimator that teaches nothing: `algorithm.adv_estimator=FILE:zero_advantages`."""
    zeros = torch.zeros_like(batch.token_rewards)
    return Advantages(zeros, zeros)


def measure(root: Path, seed: int, changes: list[str]) -> dict[str, Any]:
    """The figures of one seed; everything that is made lies in `root`."""
    folders = Folders(root)
    started = time.monotonic()
    prepare(folders, seed)
    warmed = time.monotonic()
    _run("train", *train_arguments(folders, seed), *changes)
    trained = time.monotonic()
    zero = root / "zero"
    estimator = f"algorithm.adv_estimator={Path(__file__).resolve()}:zero_advantages"
    _run("train", *train_arguments(folders, seed), *changes, estimator, f"trainer.save_checkpoint_path={zero}")

    write_rows(moved_pictures(make_rows("test", SPLIT_ROWS["test"], seed)), folders.data / "moved.parquet")
    found = {
        "warm": _accuracy(folders, str(folders.warm), "test"),
        "trained": _accuracy(folders, str(_merged(folders.run)), "test"),
        "trained_pictures_moved": _accuracy(folders, str(_merged(folders.run)), "moved"),
        "zero_advantages": _accuracy(folders, str(_merged(zero)), "test"),
    }
    return {
        "seed": seed,
        "test_accuracy": found,
        "rise": found["trained"] - found["warm"],
        "loss_with_pictures_moved": found["trained"] - found["trained_pictures_moved"],
        "rise_with_zero_advantages": found["zero_advantages"] - found["warm"],
        "val_accuracy_by_step": accuracies(folders.run),
        "seconds": {"data_and_warm_up": round(warmed - started, 1), "grpo": round(trained - warmed, 1)},
    }


def moved_pictures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same questions and answers, each with the picture of the row half the table further on."""
    half = len(rows) // 2
    pictures = [row["images"] for row in [*rows[half:], *rows[:half]]]
    return [{**row, "images": images} for row, images in zip(rows, pictures, strict=True)]


def _merged(run: Path) -> Path:
    checkpoint = max(run.glob("global_step_*"), key=lambda folder: int(folder.name.rpartition("_")[2]))
    target = run / "merged"
    if not target.exists():
        _run("merge", "--local_dir", str(checkpoint / "actor"), "--target", str(target))
    return target


def _accuracy(folders: Folders, model: str, rows: str) -> float:
    out = folders.root / "eval" / f"{Path(model).parent.name}_{Path(model).name}_{rows}"
    files = [f"data.val_files={folders.data / rows}.parquet", f"trainer.save_checkpoint_path={out}"]
    _run("eval", model, *folders.overrides(), *files)
    return accuracies(next((out / "eval").iterdir()))[0]


def _run(*args: str) -> None:
    status = foveal(args)
    if status:
        sys.exit(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/quickstart.json"))
    parser.add_argument("--keep", type=Path, help="folder for models and runs (default: a temporary one)")
    options, changes = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = options.keep or Path(temporary)
        seeds = [measure(root / f"seed{seed}", seed, changes) for seed in options.seeds]
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": machine, "seeds": seeds}, indent=2) + "\n")
    print(options.out.read_text())


if __name__ == "__main__":
    main()
