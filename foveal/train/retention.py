"""The checkpoints of a run: written whole or not at all, found again, and pruned.

ROOT/global_step_N/actor/              foveal.train.checkpoint
ROOT/global_step_N/trainer_state.json  what the trainer needs to go on, and the best checkpoint so far
ROOT/global_step_N/surplus.safetensors foveal.rollout.surplus; only where there are such groups
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
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from foveal.errors import CheckpointError
from foveal.track import console
from foveal.train.background import Background
from foveal.train.files import free_space, fsync, fsync_tree, write_json
from foveal.train.processes import in_first_process, is_first_process
from foveal.train.rank_files import has_rank_files
from foveal.train.step_folder import STATE, check_checkpoint, read_state, size_of

TRACKER = "checkpoint_tracker.json"
WORDS = ("latest", "best")
"""What `trainer.load_checkpoint_path` may say instead of a path."""
_FIRST_JUDGE = {"best_metric": "val/reward_score", "best_mode": "max"}
"""By what the best checkpoint was chosen before that could be said."""


class Checkpoints:
    """The checkpoints under `root`. With several processes every one saves; the first alone moves and removes.

    Args:
        root: the run's folder; made at the first save.
        save_limit: how many to keep, the best included; with 1 the best is kept besides the newest; below 1 keeps all.
        best_metric: what the scores are that checkpoints are saved with.
        best_mode: which of two scores is the better one.

    Attributes:
        written: whether one has been written here.
    """

    def __init__(
        self,
        root: Path,
        save_limit: int,
        best_metric: str = "val/reward_score",
        best_mode: Literal["max", "min"] = "max",
    ) -> None:
        self.root = root
        self.save_limit = save_limit
        self.judge = {"best_metric": best_metric, "best_mode": best_mode}
        self.best_step: int | None = None
        self.best_score: float | None = None
        self.written = False
        self._background = Background()

    def folder(self, step: int) -> Path:
        return self.root / f"global_step_{step}"

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        score: float | None,
        *,
        state: dict[str, Any] | None = None,
        background: bool = False,
    ) -> Path:
        """Writes the checkpoint of `step`; only when it is whole does it get its name, and only then do old ones go.

        Args:
            write: writes the actor into the folder it is given.
            score: of a validation of these very weights; None when there was none: such a checkpoint is never the best.
            state: what `resume` shall return; plain JSON.
            background: in a thread of its own. What goes wrong comes up in `check`, `wait`, or the next `save`.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: the disk refused (full, read-only, …). The checkpoints before it are untouched.
        """
        self.wait()
        best = self._best_with(step, score)
        content = {**(state or {}), **self.judge, "best_global_step": best[0], "best_val_reward_score": best[1]}
        save = partial(self._save, step, write, content)
        if background:
            self._background.start(save, f"saving step {step}")
        else:
            save()
        return self.folder(step)

    def wait(self) -> None:
        """Waits for a save in the background.

        Raises:
            CheckpointError: it failed.
        """
        self._background.wait()

    def check(self) -> None:
        """Raises CheckpointError if a save in the background has failed; doesn't wait for it."""
        self._background.check()

    def abandon(self) -> None:
        """Forgets a save in the background: it dies with the process, and leaves a `.partial` folder."""
        self._background.abandon()

    def _save(self, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> None:
        folder, partial_folder = self.folder(step), self.root / f"global_step_{step}.partial"
        started = time.perf_counter()

        def begin() -> None:
            self.restore()
            self._remove_partial()
            partial_folder.mkdir(parents=True)

        def commit() -> None:
            write_json(partial_folder / STATE, state)
            fsync_tree(partial_folder)
            self._put_in_place(partial_folder, folder)

        try:
            in_first_process(begin)
            write(partial_folder)
            in_first_process(commit)
            self.written = True
            self.best_step, self.best_score = state["best_global_step"], state["best_val_reward_score"]
            in_first_process(partial(self._write_tracker, step))
        except OSError as error:
            space = free_space(self.root)
            if is_first_process():
                shutil.rmtree(partial_folder, ignore_errors=True)
            raise CheckpointError(
                f"{error.filename or partial_folder}: cannot write the checkpoint of step {step}: "
                f"{error.strerror or error} ({space}). Earlier checkpoints are untouched. Free some space, lower "
                "trainer.save_limit, or set trainer.save_checkpoint_path to another disk, then resume."
            ) from error
        if is_first_process():
            size, seconds = size_of(folder) / 1e9, time.perf_counter() - started
            console.note(f"saved {folder} ({size:.2f} GB in {seconds:.1f} s)")
            try:
                self._prune(step)
            except OSError as error:
                console.warn(f"cannot remove an old checkpoint: {error}. Remove it by hand.")

    def restore(self) -> None:
        """Brings back what a crash took the name of. Only for the run that holds the folder: another may be saving."""
        for path in self.root.glob("global_step_*.replaced"):
            folder = path.with_suffix("")
            if folder.exists():
                _remove(path)
            else:
                os.replace(path, folder)

    def latest(self, *, contents: bool = False) -> Path | None:
        """The newest whole checkpoint of the run, or None. A damaged one is passed over, and named.

        Args:
            contents: compares checksums too, which reads all of it.
        """
        last = self._tracked("last_global_step")
        # steps after the tracked one belong to an earlier run in this folder, unless nothing else is left
        steps = sorted(self._steps(), key=lambda step: (last is None or step <= last, step), reverse=True)
        for step in steps:
            try:
                check_checkpoint(self.folder(step), contents=contents)
                return self.folder(step)
            except CheckpointError as error:
                console.warn(f"passing over a checkpoint: {error}")
        if steps:
            console.warn(
                f"no checkpoint in {self.root} is whole: training begins at its first step and will replace them. To "
                "keep what is left, stop now and give trainer.experiment_name another name"
            )
        return None

    def best(self) -> Path | None:
        """The checkpoint of the run with the best score, or None where none was judged or it is gone."""
        step = self._tracked("best_global_step")
        if step is None and (latest := self.latest()) is not None:
            step = read_state(latest)["best_global_step"]
        return self.folder(step) if step is not None and self.folder(step).is_dir() else None

    def resolve(self, path: str | Path) -> Path:
        """The `global_step_N` folder that a user means by that folder, its actor folder, the folder of a run, or by
        `latest` or `best` of this run. All of it is read, to compare checksums.

        Raises:
            CheckpointError: there is no checkpoint at `path`, or it is not whole.
        """
        if str(path) in WORDS:
            return self._resolve_word(str(path))
        path = Path(path)
        if path.name == "actor" and not (path / "actor").exists():
            path = path.absolute().parent
        if (path / "actor").is_dir():
            check_checkpoint(path, contents=True)
            return path
        found = Checkpoints(path, -1).latest(contents=True) if path.is_dir() else None
        if found is None:
            fault = "holds no whole checkpoint" if path.is_dir() else "is no folder"
            raise CheckpointError(
                f"{path} {fault}. Give …/global_step_N, its actor folder, or the folder of a run that has some."
            )
        return found

    def _resolve_word(self, word: str) -> Path:
        if word == "latest":
            found = self.latest(contents=True)
            if found is None:
                raise CheckpointError(
                    f"latest: {self.root} holds no whole checkpoint. To go on from the last one where there is one, "
                    "and start afresh otherwise, leave trainer.load_checkpoint_path out."
                )
            return found
        found = self.best()
        if found is None:
            raise CheckpointError(
                f"best: no checkpoint of {self.root} is known as the best; only one whose weights were validated is "
                "judged (trainer.val_freq, trainer.save_freq). Give `latest` or …/global_step_N."
            )
        check_checkpoint(found, contents=True)
        return found

    def resume(self, folder: Path) -> dict[str, Any]:
        """Reads the trainer's state of a checkpoint, and takes over which one was the best when it was written.

        Raises:
            CheckpointError: the checkpoint has no state, or a damaged one.
        """
        state = read_state(folder)
        step, score = state.pop("best_global_step"), state.pop("best_val_reward_score")
        judge = {name: state.pop(name, default) for name, default in _FIRST_JUDGE.items()}
        if step is None or not self.folder(step).is_dir():
            return state
        if judge == self.judge:
            self.best_step, self.best_score = step, score
        else:
            console.note(
                f"global_step_{step} was the best by {judge['best_metric']} ({judge['best_mode']}); from here on "
                f"checkpoints are judged by {self.judge['best_metric']} ({self.judge['best_mode']})"
            )
        return state

    def _best_with(self, step: int, score: float | None) -> tuple[int | None, float | None]:
        """The best step and its score once `step` is saved."""
        best_step, best_score = self.best_step, self.best_score
        if best_step == step:  # these weights replace the best ones
            best_step = best_score = None
        if score is not None and math.isfinite(score) and (best_score is None or self._better(score, best_score)):
            return step, score
        return best_step, best_score

    def _better(self, score: float, than: float) -> bool:
        return score < than if self.judge["best_mode"] == "min" else score > than

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
        # later steps belong to an earlier run in this folder, and others to EasyR1: not ours to judge
        for old in sorted((s for s in self._steps() if s < step and s not in kept), reverse=True):
            if has_rank_files(self.folder(old) / "actor"):
                continue
            if len(kept - {None}) < self.save_limit:
                kept.add(old)
            else:
                _remove(self.folder(old))

    def _steps(self) -> list[int]:
        if not self.root.is_dir():
            return []
        matches = (re.fullmatch(r"global_step_(\d+)", path.name) for path in self.root.iterdir() if path.is_dir())
        return [int(match[1]) for match in matches if match]

    def _tracked(self, name: str) -> int | None:
        """The step that the tracker file has under `name`."""
        try:
            step = json.loads((self.root / TRACKER).read_text(encoding="utf-8"))[name]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return step if isinstance(step, int) and self.folder(step).is_dir() else None

    def _remove_partial(self) -> None:
        for path in self.root.glob("global_step_*.partial"):
            console.note(f"removing {path}: the rest of a save that was cut short")
            try:
                _delete(path)
            except OSError as error:  # such as a file that is open elsewhere, on NFS
                console.warn(f"cannot remove {path}: {error}. Remove it by hand.")


def _remove(folder: Path) -> None:
    """Removes a checkpoint; the first move takes its name away, so that no reader meets half of one."""
    doomed = folder.with_name(f"{folder.name}.partial")
    os.replace(folder, doomed)
    _delete(doomed)


def _delete(folder: Path) -> None:
    """Of a link to a folder elsewhere, as one that was moved to a larger disk, the link alone."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)
