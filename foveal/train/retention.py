"""The checkpoints of a run: written whole or not at all, found again, and pruned.

ROOT/global_step_N/actor/              foveal.train.checkpoint
ROOT/global_step_N/trainer_state.json  what the trainer needs to go on, and the best checkpoint so far
ROOT/checkpoint_tracker.json           last_global_step, best_global_step, best_val_reward_score, last_actor_path
ROOT/global_step_N.partial             being written or removed; no reader takes it for a checkpoint
ROOT/global_step_N.replaced            the former checkpoint of the same step, while the new one takes its place
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foveal.errors import CheckpointError
from foveal.track import console
from foveal.train.checkpoint import check_actor, check_critic
from foveal.train.files import free_space, fsync, fsync_tree, write_json

TRACKER = "checkpoint_tracker.json"
STATE = "trainer_state.json"


class Checkpoints:
    """The checkpoints under `root`.

    Args:
        root: the run's folder; made at the first save.
        save_limit: how many to keep, the best included; with 1 the best is kept besides the newest; below 1 keeps all.
    """

    def __init__(self, root: Path, save_limit: int) -> None:
        self.root = root
        self.save_limit = save_limit
        self.best_step: int | None = None
        self.best_score: float | None = None

    def folder(self, step: int) -> Path:
        return self.root / f"global_step_{step}"

    def save(
        self, step: int, write: Callable[[Path], None], score: float | None, *, state: dict[str, Any] | None = None
    ) -> Path:
        """Writes the checkpoint of `step`; only when it is whole does it get its name, and only then do old ones go.

        Args:
            write: writes the actor into the folder it is given.
            score: of a validation of these very weights; None when there was none: such a checkpoint is never the best.
            state: what `resume` shall return; plain JSON.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: the disk refused (full, read-only, …). The checkpoints before it are untouched.
        """
        folder, partial = self.folder(step), self.root / f"global_step_{step}.partial"
        best = self._best_with(step, score)
        try:
            self._clean_up()
            partial.mkdir(parents=True)
            write(partial)
            write_json(
                partial / STATE, {**(state or {}), "best_global_step": best[0], "best_val_reward_score": best[1]}
            )
            fsync_tree(partial)
            self._put_in_place(partial, folder)
            self.best_step, self.best_score = best
            self._write_tracker(step)
        except OSError as error:
            space = free_space(self.root)
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"{error.filename or partial}: cannot write the checkpoint of step {step}: {error.strerror or error} "
                f"({space}). Earlier checkpoints are untouched. Free some space, lower trainer.save_limit, or set "
                "trainer.save_checkpoint_path to another disk, then resume."
            ) from error
        try:
            self._prune(step)
        except OSError as error:
            console.warn(f"cannot remove an old checkpoint: {error}. Remove it by hand.")
        return folder

    def latest(self) -> Path | None:
        """The newest whole checkpoint of the run, or None. A damaged one is passed over, and named."""
        self._restore_replaced()
        last = self._tracked_step()
        # steps after the tracked one belong to an earlier run in this folder, unless nothing else is left
        steps = sorted(self._steps(), key=lambda step: (last is None or step <= last, step), reverse=True)
        for step in steps:
            try:
                check_checkpoint(self.folder(step))
                return self.folder(step)
            except CheckpointError as error:
                console.warn(f"passing over a checkpoint: {error}")
        return None

    def resolve(self, path: str | Path) -> Path:
        """The `global_step_N` folder that a user means by that folder, its actor folder, or the folder of a run.

        Raises:
            CheckpointError: there is no checkpoint at `path`, or it is not whole.
        """
        path = Path(path)
        if path.name == "actor" and not (path / "actor").exists():
            path = path.absolute().parent
        if (path / "actor").is_dir():
            check_checkpoint(path)
            return path
        found = Checkpoints(path, -1).latest() if path.is_dir() else None
        if found is None:
            fault = "holds no whole checkpoint" if path.is_dir() else "does not exist"
            raise CheckpointError(
                f"{path} {fault}. Give …/global_step_N, its actor folder, or the folder of a run that has some."
            )
        return found

    def resume(self, folder: Path) -> dict[str, Any]:
        """Reads the trainer's state of a checkpoint, and takes over which one was the best when it was written.

        Raises:
            CheckpointError: the checkpoint has no state, or a damaged one.
        """
        state = read_state(folder)
        step, score = state.pop("best_global_step"), state.pop("best_val_reward_score")
        if step is not None and self.folder(step).is_dir():
            self.best_step, self.best_score = step, score
        return state

    def _best_with(self, step: int, score: float | None) -> tuple[int | None, float | None]:
        """The best step and its score once `step` is saved."""
        best_step, best_score = self.best_step, self.best_score
        if best_step == step:  # these weights replace the best ones
            best_step = best_score = None
        if score is not None and math.isfinite(score) and (best_score is None or score > best_score):
            return step, score
        return best_step, best_score

    def _put_in_place(self, partial: Path, folder: Path) -> None:
        replaced = folder.with_name(f"{folder.name}.replaced")
        if folder.exists():  # a folder that is not empty cannot be replaced in one move
            os.replace(folder, replaced)
        os.replace(partial, folder)
        fsync(self.root)
        if replaced.exists():
            _remove(replaced)

    def _write_tracker(self, step: int) -> None:
        write_json(
            self.root / TRACKER,
            {
                "best_global_step": self.best_step,
                "best_val_reward_score": self.best_score,
                "last_global_step": step,
                "last_actor_path": str((self.folder(step) / "actor").absolute()),
            },
        )

    def _prune(self, step: int) -> None:
        if self.save_limit < 1:
            return
        kept = {step, self.best_step}
        # later steps belong to an earlier run in this folder: not ours to judge
        for old in sorted((s for s in self._steps() if s < step and s not in kept), reverse=True):
            if len(kept - {None}) < self.save_limit:
                kept.add(old)
            else:
                _remove(self.folder(old))

    def _steps(self) -> list[int]:
        if not self.root.is_dir():
            return []
        matches = (re.fullmatch(r"global_step_(\d+)", path.name) for path in self.root.iterdir() if path.is_dir())
        return [int(match[1]) for match in matches if match]

    def _tracked_step(self) -> int | None:
        try:
            step = json.loads((self.root / TRACKER).read_text(encoding="utf-8"))["last_global_step"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return step if isinstance(step, int) and self.folder(step).is_dir() else None

    def _clean_up(self) -> None:
        """Puts aside what a crash during an earlier save left behind."""
        self._restore_replaced()
        for path in self.root.glob("global_step_*.partial"):
            console.note(f"removing {path}: the rest of a save that was cut short")
            shutil.rmtree(path)

    def _restore_replaced(self) -> None:
        for path in self.root.glob("global_step_*.replaced"):
            folder = path.with_suffix("")
            if folder.exists():
                _remove(path)
            else:
                os.replace(path, folder)


def check_checkpoint(folder: Path) -> None:
    """Checks that a `global_step_N` folder is whole: the trainer's state reads, and no shard is missing or cut.

    Raises:
        CheckpointError: names what is missing or damaged.
    """
    read_state(folder)
    check_actor(folder / "actor")
    if (folder / "critic").is_dir():
        check_critic(folder / "critic")


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
        raise CheckpointError(f"{path} is damaged ({error}). Use another checkpoint of the run.") from error


def _remove(folder: Path) -> None:
    """Removes a checkpoint; the first move takes its name away, so that no reader meets half of one."""
    doomed = folder.with_name(f"{folder.name}.partial")
    os.replace(folder, doomed)
    shutil.rmtree(doomed)
