"""From where a run goes on, and what may have changed since then."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypedDict

import torch

from foveal.config import Config
from foveal.config.keys import known_keys
from foveal.errors import CheckpointError
from foveal.masking import masked
from foveal.models.loading import empty_model
from foveal.track import console
from foveal.train.checkpoint import check_critic
from foveal.train.processes import in_first_process
from foveal.train.retention import WORDS, Checkpoints

_FREE = ("trainer.",)
"""Length, logging and folders of the run; nobody needs to be told."""
_MODEL, _ROWS = "worker.actor.model.model_path", "data.train_files"
_ADAPTER = "worker.actor.model.lora.adapter_path"
_AFRESH = "To start afresh give trainer.experiment_name another name, or trainer.find_last_checkpoint=false"


@dataclass(frozen=True)
class Start:
    """Where a run begins: at step 0, or after a checkpoint.

    Attributes:
        folder: the checkpoint, or None.
        state: the trainer's at that checkpoint.
        weights: a Hugging Face folder that the policy starts from instead of `model_path`.
    """

    folder: Path | None = None
    state: dict[str, Any] = field(default_factory=dict)
    weights: Path | None = None

    def tracker_ids(self, config: Config) -> dict[str, str]:
        """The ids of the trackers' runs to go on with; none where the run goes by another name now."""
        names = ("trainer.project_name", "trainer.experiment_name")
        saved, now = masked(self.state.get("settings", {})), saved_settings(config)
        same = all(saved.get(name) == now[name] for name in names)
        return dict(self.state.get("trackers", {})) if same else {}


def find_start(config: Config, checkpoints: Checkpoints, *, has_critic: bool) -> Start:
    """What `trainer.load_checkpoint_path` names, or the run's own last checkpoint that is not damaged.

    The run must hold its folder.

    Raises:
        CheckpointError: the one that was named is damaged, or this run cannot go on from it.
    """
    trainer = config.trainer
    in_first_process(checkpoints.restore)
    if (weights := plain_model(trainer.load_checkpoint_path)) is not None:
        check_plain_model(weights, config)
        console.note(f"starting from the weights in {weights}: step 0, with a fresh optimizer")
        return Start(weights=weights)
    if trainer.load_checkpoint_path:
        folder: Path | None = checkpoints.resolve(trainer.load_checkpoint_path)
    else:
        folder = checkpoints.latest(contents=True) if trainer.find_last_checkpoint else None
    if folder is None:
        return Start()
    state = checkpoints.resume(folder)
    lacking = [name for name in ("step", "loader", "kl") if name not in state]
    if lacking:
        raise CheckpointError(
            f"{folder / 'trainer_state.json'} lacks {', '.join(lacking)}: the checkpoint is damaged, or was not "
            "written by `foveal train`. Give another one with trainer.load_checkpoint_path."
        )
    if has_critic:
        check_critic(folder / "critic")
    change = check_settings(state, config, str(folder))
    if change:
        console.note(change)
    return Start(folder, state)


class Identity(TypedDict):
    """What tells training rows apart from others.

    Attributes:
        source: as `data.train_files` has it.
        rows: how many there are.
        checksum: of their prompts and answers.
    """

    source: str
    rows: int
    checksum: str


def saved_settings(config: Config) -> dict[str, Any]:
    """Every dotted key with its value, as plain JSON; secrets are masked, for a run has them from its own settings."""
    values = masked(config.model_dump(mode="json"))
    return {key: reduce(getitem, key.split("."), values) for key in known_keys()}


def check_settings(state: dict[str, Any], config: Config, place: str) -> str | None:
    """Compares the settings of a checkpoint with those of the run that is to go on from it.

    Args:
        state: the trainer's, with `saved_settings` as "settings".
        place: the checkpoint, for the message.

    Returns:
        A line that names what has changed, or None.

    Raises:
        CheckpointError: the model is another one (or, of a checkpoint that doesn't tell the rows by their content, the
            training data), and the checkpoint wasn't asked for by its path (`trainer.load_checkpoint_path`).
    """
    saved, now = masked(state.get("settings", {})), saved_settings(config)
    changed = {key: (saved[key], now[key]) for key in now if key in saved and saved[key] != now[key]}
    fixed = [_MODEL, _ADAPTER]
    if "data" not in state and not config.trainer.restart_data:
        fixed.append(_ROWS)
    refused = [key for key in fixed if key in changed and config.trainer.load_checkpoint_path in (None, *WORDS)]
    if refused:
        differences = "; ".join(f"{key} was {changed[key][0]!r} and is {changed[key][1]!r}" for key in refused)
        raise CheckpointError(
            f"{place} belongs to another run: {differences}. {_AFRESH}. If only the place has changed, "
            f"trainer.load_checkpoint_path={place} goes on all the same."
        )
    told = [f"{key} {old!r} → {new!r}" for key, (old, new) in changed.items() if not key.startswith(_FREE)]
    return f"changed since the checkpoint: {', '.join(told)}" if told else None


def check_rows(saved: Identity | None, now: Identity, place: str) -> None:
    """Compares the training rows of a checkpoint with those of the run that is to go on from it.

    Args:
        saved: None of a checkpoint that doesn't say.

    Raises:
        CheckpointError: they are others, wherever they lie.
    """
    if saved is None or (saved["rows"], saved["checksum"]) == (now["rows"], now["checksum"]):
        return
    raise CheckpointError(
        f"{place} was trained on other rows: {_ROWS} was {saved['source']!r} with {saved['rows']:,} rows and is "
        f"{now['source']!r} with {now['rows']:,}"
        + (", whose prompts or answers differ" if saved["rows"] == now["rows"] else "")
        + ". Give the rows of the checkpoint; or set trainer.restart_data=true to go on with its weights and begin the "
        f"new rows. {_AFRESH}."
    )


def plain_model(path: str | None) -> Path | None:
    """The folder at `path` if it is a Hugging Face model and no checkpoint."""
    if not path or path in WORDS:
        return None
    folder = Path(path)
    has_weights = any(next(folder.glob(pattern), None) for pattern in ("*.safetensors", "*.bin"))
    return folder if (folder / "config.json").is_file() and has_weights else None


def check_plain_model(folder: Path, config: Config) -> None:
    """Checks that the weights of a Hugging Face folder fit the model that the run trains, by configuration alone.

    Raises:
        CheckpointError: they are another model's, or adapters are trained, whose weights' base is `model_path`.
    """
    if config.worker.actor.model.lora.rank:
        raise CheckpointError(
            f"trainer.load_checkpoint_path: {folder} holds a whole model, but adapters belong to that of {_MODEL}. "
            f"Set {_MODEL} to {folder}, and leave trainer.load_checkpoint_path out."
        )
    path, cpu = config.worker.actor.model.model_path, torch.device("cpu")
    assert path is not None
    theirs, ours = (
        {name: parameter.shape for name, parameter in model.named_parameters()}
        for model in (empty_model(place, dtype=torch.float32, device=cpu) for place in (str(folder), path))
    )
    if theirs != ours:
        differing = sorted({name for name, _ in theirs.items() ^ ours.items()})
        raise CheckpointError(
            f"trainer.load_checkpoint_path: the weights in {folder} are of another model than {_MODEL} ({path}): "
            f"{len(differing)} differ in name or shape, as {differing[0]}. Set {_MODEL} to {folder}, and leave "
            "trainer.load_checkpoint_path out."
        )
