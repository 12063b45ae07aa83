"""One checkpoint, a folder `global_step_N`: whether it is whole, and the trainer's state in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foveal.errors import CheckpointError
from foveal.train.checkpoint import HUGGINGFACE, check_actor, check_critic
from foveal.train.rank_files import has_rank_files
from foveal.train.state import Manifest, check_contents
from foveal.train.sums import FileSum, check_sizes, check_sums

STATE = "trainer_state.json"


def check_checkpoint(folder: Path, *, contents: bool = False) -> None:
    """Checks that a `global_step_N` folder is whole: the trainer's state reads, and no shard is missing or cut.

    Args:
        contents: compares checksums too, which reads all of it.

    Raises:
        CheckpointError: names what is missing or damaged; or EasyR1 wrote the checkpoint.
    """
    if has_rank_files(folder / "actor"):
        raise CheckpointError(
            f"{folder} was written by EasyR1, and only its weights can be taken over. Make a model of them with "
            f"`foveal merge --local_dir {folder / 'actor'}`, and start a new run with "
            f"worker.actor.model.model_path={folder / 'actor' / HUGGINGFACE}."
        )
    state = read_state(folder)
    try:
        files = {name: FileSum(**entry) for name, entry in state.get("files", {}).items()}
    except (TypeError, AttributeError) as error:
        raise _damaged(folder / STATE, error) from error
    check_sizes(folder, {name: entry.size for name, entry in files.items()})
    manifests: dict[Path, Manifest] = {folder / "actor": check_actor(folder / "actor")}
    if (folder / "critic").is_dir():
        manifests[folder / "critic"] = check_critic(folder / "critic")
    if contents:
        check_sums(folder, files)
        for part, manifest in manifests.items():
            check_contents(part, manifest)


def read_state(folder: Path) -> dict[str, Any]:
    """Reads trainer_state.json of a `global_step_N` folder.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = folder / STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return {"best_global_step": None, "best_val_reward_score": None, **state}
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; {folder} is not a whole checkpoint.") from error
    except (ValueError, TypeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} is damaged ({error}). Use another checkpoint of the run.")


def size_of(folder: Path) -> int:
    """Bytes of all files in it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
