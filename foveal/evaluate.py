"""`foveal eval` and `trainer.val_only`: validation alone, with neither optimizer nor reference policy."""

from __future__ import annotations

import re
from contextlib import ExitStack, closing
from pathlib import Path

from foveal.cluster.group import start_workers
from foveal.cluster.machines import joined
from foveal.config import Config
from foveal.config.schema_model import LoraConfig
from foveal.data.loader import open_loader
from foveal.preflight import check_runnable, open_processing
from foveal.resume import plain_model
from foveal.reward.runner import RewardRunner
from foveal.track import Trackers, console
from foveal.track.metrics import timing_metrics
from foveal.track.sample_files import SampleFiles
from foveal.track.timing import timer
from foveal.train.checkpoint import check_actor
from foveal.train.retention import WORDS, Checkpoints
from foveal.train.step_folder import read_state
from foveal.validation import Validator


def evaluate(config: Config, model: str | None = None) -> int:
    """Scores a model on `data.val_files`.

    Args:
        config: its `checkpoint_dir` gets a folder `eval/MODEL` for logs and samples, so that neither a training run's
            own nor another model's are touched.
        model: a Hugging Face folder, a hub id, a checkpoint, or `latest` or `best` of the run. None takes
            `trainer.load_checkpoint_path`, else the run's last checkpoint where `trainer.find_last_checkpoint` is set,
            else `worker.actor.model.model_path`.

    Returns:
        0

    Raises:
        FovealError: anything the user can cure.
    """
    if model is None and (plain := plain_model(config.trainer.load_checkpoint_path)) is not None:
        model = str(plain)
    checkpoint = _checkpoint(config, model)
    if checkpoint is not None:
        config.worker.actor.model.model_path = str(checkpoint / "actor" / "huggingface")
        config.worker.actor.model.tokenizer_path = None
        config.worker.actor.model.lora = _adapters(checkpoint / "actor")
        config.worker.actor.model.freeze_language_model = False  # adapters of frozen parts count too
        config.worker.actor.model.freeze_vision_tower = config.worker.actor.model.freeze_projector = False
    elif model is not None:
        config.worker.actor.model.model_path = model
        config.worker.actor.model.tokenizer_path = None
        config.worker.actor.model.lora = LoraConfig()
    scored = str(checkpoint or config.worker.actor.model.model_path)
    check_runnable(config)
    console.note(f"scoring {scored}")
    processing = open_processing(config)
    step = read_state(checkpoint).get("step", 0) if checkpoint else 0
    timings: dict[str, float] = {}
    with ExitStack() as held:
        held.enter_context(joined(config))
        loader = open_loader(config, processing, "val")
        rewards = held.enter_context(RewardRunner(config.worker.reward, "val", processing.tokenizer))
        workers = start_workers(
            config,
            processing,
            train=False,
            checkpoint=checkpoint and checkpoint / "actor",
            images=loader.most_images,
        )
        held.callback(workers.close)
        folder = config.trainer.checkpoint_dir / "eval" / re.sub(r"[^\w.-]+", "_", scored).strip("_")[-100:]
        with closing(Trackers(config, folder, resume_step=step)) as trackers:
            with timer(timings, "validation"):
                files = SampleFiles(folder, processing.tokenizer, after=step)
                metrics, samples = Validator(config, loader, workers, rewards, processing, files).run(step, {})
            metrics |= timing_metrics(timings)
            trackers.log(metrics, step)
            trackers.log_samples(samples, step)
            console.validation_line(step, metrics)
    return 0


def _adapters(actor: Path) -> LoraConfig:
    """The adapters that a checkpoint has, whatever the configuration says of those that are to be trained."""
    lora = check_actor(actor).lora
    if lora is None:
        return LoraConfig()
    return LoraConfig(rank=lora["r"], alpha=lora["lora_alpha"], target_modules=lora["target_modules"])


def _checkpoint(config: Config, model: str | None) -> Path | None:
    """The `global_step_N` folder that is meant, or None for a plain model."""
    checkpoints = Checkpoints(config.trainer.checkpoint_dir, -1)
    if model is not None:
        is_checkpoint = model in WORDS or _looks_like_checkpoint(Path(model))
        return checkpoints.resolve(model) if is_checkpoint else None
    if config.trainer.load_checkpoint_path:
        return checkpoints.resolve(config.trainer.load_checkpoint_path)
    return checkpoints.latest(contents=True) if config.trainer.find_last_checkpoint else None


def _looks_like_checkpoint(path: Path) -> bool:
    return (path / "actor").is_dir() or (path / "foveal.json").is_file() or (path / "checkpoint_tracker.json").is_file()
