"""What may change between a checkpoint and the run that goes on from it."""

from __future__ import annotations

from functools import reduce
from operator import getitem
from typing import Any

from foveal.config import Config
from foveal.config.keys import known_keys
from foveal.errors import CheckpointError

_FIXED = ("worker.actor.model.model_path", "data.train_files")
"""With another model or other rows, the weights and the place in the data that were saved mean nothing."""

_FREE = ("trainer.",)
"""Length, logging and folders of the run; nobody needs to be told."""


def saved_settings(config: Config) -> dict[str, Any]:
    """Every dotted key with its value, as plain JSON."""
    values = config.model_dump(mode="json")
    return {key: reduce(getitem, key.split("."), values) for key in known_keys()}


def check_settings(saved: dict[str, Any], config: Config, place: str) -> str | None:
    """Compares the settings of a checkpoint with those of the run that is to go on from it.

    Args:
        saved: from `saved_settings`.
        place: the checkpoint, for the message.

    Returns:
        A line that names what has changed, or None.

    Raises:
        CheckpointError: the model or the training data is another one, and the checkpoint wasn't asked for by name
            (`trainer.load_checkpoint_path`).
    """
    now = saved_settings(config)
    changed = {key: (saved[key], now[key]) for key in now if key in saved and saved[key] != now[key]}
    refused = [key for key in _FIXED if key in changed and not config.trainer.load_checkpoint_path]
    if refused:
        differences = "; ".join(f"{key} was {changed[key][0]!r} and is {changed[key][1]!r}" for key in refused)
        raise CheckpointError(
            f"{place} belongs to another run: {differences}. To start afresh give trainer.experiment_name another "
            "name, or trainer.find_last_checkpoint=false. If only the place has changed, "
            f"trainer.load_checkpoint_path={place} goes on all the same."
        )
    told = [f"{key} {old!r} → {new!r}" for key, (old, new) in changed.items() if not key.startswith(_FREE)]
    return f"changed since the checkpoint: {', '.join(told)}" if told else None
