"""`foveal quickstart`: a tiny model learns to read pictures, from random weights to a merged Hugging Face folder."""

from __future__ import annotations

import argparse
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from foveal.errors import ConfigError
from foveal.track.console import note

EXAMPLES = Path(__file__).parents[2] / "examples"
MARK = ".foveal_quickstart"
"""A file that says that a folder was made here and may be made anew."""


@dataclass(frozen=True)
class Folders:
    """Where a quick start keeps what it makes."""

    root: Path

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def random(self) -> Path:
        """The model with random weights."""
        return self.root / "random"

    @property
    def warm(self) -> Path:
        """The model after the supervised steps."""
        return self.root / "warm"

    @property
    def run(self) -> Path:
        """Checkpoints, logs and curve of the GRPO run."""
        return self.root / "grpo"

    @property
    def merged(self) -> Path:
        """The trained model."""
        return self.root / "trained"

    def overrides(self) -> list[str]:
        """What `examples/quickstart.yaml` needs to use these folders, from any working directory."""
        return [
            f"config={EXAMPLES / 'quickstart.yaml'}",
            f"data.train_files={self.data / 'train.parquet'}",
            f"data.val_files={self.data / 'val.parquet'}",
            f"worker.actor.model.model_path={self.warm}",
            f"worker.reward.reward_function={EXAMPLES / 'reward_function' / 'quickstart.py'}:compute_score",
            f"trainer.save_checkpoint_path={self.run}",
        ]


def quickstart_command(args: list[str]) -> int:
    """Builds model and data, warms up, trains with GRPO, merges, and says what came out.

    Args:
        args: `--seed N`, `--dir FOLDER`, and `KEY=VALUE` changes of `examples/quickstart.yaml`.

    Returns:
        the exit status.

    Raises:
        FovealError: the folder is somebody else's, or the training cannot run.
    """
    parser = argparse.ArgumentParser(
        prog="foveal quickstart",
        description="Build a tiny vision-language model and a picture task, warm the model up with supervised steps, "
        "and improve it with GRPO through the ordinary trainer. KEY=VALUE changes examples/quickstart.yaml.",
    )
    parser.add_argument("--seed", type=int, default=1, help="of weights, pictures and sampling (default 1)")
    parser.add_argument("--dir", type=Path, default=Path("runs/quickstart"), help="folder for everything that is made")
    options, changes = parser.parse_known_args(args)
    wrong = [change for change in changes if "=" not in change]
    if wrong:
        parser.error(f"not understood: {' '.join(wrong)}")

    from foveal.cli import main as cli

    folders = Folders(options.dir)
    started = time.monotonic()
    prepare(folders, options.seed)
    warmed = time.monotonic()
    status = cli(["train", *train_arguments(folders, options.seed), *changes])
    if status:
        return status
    trained = time.monotonic()
    status = cli(["merge", "--local_dir", str(_last_checkpoint(folders.run)), "--target", str(folders.merged)])
    if status:
        return status
    _report(folders, warmed - started, trained - warmed)
    return 0


def prepare(folders: Folders, seed: int) -> float:
    """Model, data and warm-up; returns the accuracy at the end of the warm-up, on rows of its own."""
    from foveal.config import load_config
    from foveal.quickstart.task import build_task
    from foveal.quickstart.tiny import build_tiny
    from foveal.quickstart.warmup import Recipe, warm_up

    _make_root(folders.root)
    note(f"building a tiny Qwen3-VL and a picture task in {folders.root}")
    build_tiny(folders.random, "qwen3_vl", size="quickstart", seed=seed)
    data = build_task(folders.data, seed)
    config = load_config([*folders.overrides(), f"data.train_files={data['warmup']}"])
    return warm_up(config, folders.random, folders.warm, Recipe(seed=seed))


def train_arguments(folders: Folders, seed: int) -> list[str]:
    """Arguments of `foveal train` for the GRPO run."""
    return [*folders.overrides(), f"data.seed={seed}", f"worker.rollout.seed={seed}"]


def accuracies(run: Path) -> dict[int, float]:
    """Held-out accuracy by step, from a run's log."""
    from foveal.track.file import read_log

    log = read_log(run / "experiment_log.jsonl")
    return {step: record["val/accuracy_reward"] for step, record in log.items() if "val/accuracy_reward" in record}


def _make_root(root: Path) -> None:
    if not EXAMPLES.is_dir():
        raise ConfigError(f"{EXAMPLES} is missing. The quick start runs from a checkout of the repository: clone it.")
    if root.exists() and any(root.iterdir()):
        if not (root / MARK).exists():
            raise ConfigError(f"--dir {root}: not empty, and not made by an earlier quick start. Give a new folder.")
        shutil.rmtree(root)
    root.mkdir(parents=True, exist_ok=True)
    (root / MARK).touch()


def _last_checkpoint(run: Path) -> Path:
    return max(run.glob("global_step_*"), key=lambda folder: int(folder.name.rpartition("_")[2])) / "actor"


def _report(folders: Folders, warm_seconds: float, train_seconds: float) -> None:
    found = accuracies(folders.run)
    told = "Nothing was validated"
    if found:
        told = (
            f"Held-out accuracy: {found[min(found)]:.3f} after the warm-up ({warm_seconds:.0f} s), "
            f"{found[max(found)]:.3f} after {max(found)} GRPO steps ({train_seconds:.0f} s)"
        )
    note(
        f"\n{told}.\n"
        f"  run     {folders.run}  (experiment_log.jsonl, generations.log)\n"
        f"  curve   {folders.run / 'curve.png'}\n"
        f"  model   {folders.merged}  (AutoModelForImageTextToText.from_pretrained)"
    )
