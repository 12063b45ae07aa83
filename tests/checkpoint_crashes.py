"""Saving in processes that are killed, and a look at what is left; a program, so that it can fork without threads.

Usage: python -m tests.checkpoint_crashes ROOT WAY, which prints what happened as JSON; WAY: `at once` or `background`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foveal.train.checkpoint import check_actor
from foveal.train.description import Description
from foveal.train.retention import Checkpoints
from foveal.train.snapshot import Snapshot
from foveal.train.staging import Staging
from foveal.train.state import load_state, take_state

DESCRIPTION = Description(
    {"model_class": "Linear", "source": "", "source_dtype": "float32", "tied_weights": False},
    {Path("config.json"): b"{}"},
)
CALLS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"}
RANDOM_KILLS = 20


class Run:
    """A module whose weights, moments and trainer's state all say which step they are of."""

    def __init__(self, root: Path, *, background: bool) -> None:
        self.checkpoints = Checkpoints(root, 1)
        self.background = background
        self.module = nn.Linear(300, 300)
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.staging = Staging()

    def numbers(self) -> Iterator[torch.Tensor]:
        for parameter in self.module.parameters():
            yield from (parameter.data, *self.optimizer.state[parameter].values())

    def set(self, step: int) -> None:
        for numbers in self.numbers():
            numbers.fill_(step)

    def save(self, step: int) -> None:
        self.set(step)
        self.checkpoints.wait()
        state = take_state(self.module, self.optimizer)
        snapshot = Snapshot(self.staging.copy(state) if self.background else state, None, DESCRIPTION, self.background)
        score = float(-abs(step % 5 - 2))
        self.checkpoints.save(step, snapshot.write, score, state={"step": step}, background=self.background)
        if self.background:
            self.set(-1)  # training goes on

    def save_for_ever(self) -> None:
        step = self.loaded()
        while True:
            step += 1
            self.save(step)

    def loaded(self) -> int:
        """The step of the latest checkpoint, all of which is read and compared."""
        self.checkpoints.restore()
        folder = self.checkpoints.latest(contents=True)
        if folder is None:
            return 0
        step = int(self.checkpoints.resume(folder)["step"])
        load_state(folder / "actor", check_actor(folder / "actor"), self.module, self.optimizer)
        assert all(bool((numbers == step).all()) for numbers in self.numbers())
        return step


def in_child(work: Callable[[], None], seconds: float | None = None) -> bool:
    """Whether `work` in a process of its own was killed: by itself, or after some seconds."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.__stderr__)
            os._exit(1)
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def dies_at(call: int, root: Path) -> None:
    """Kills this process right before its so-manieth change of the file system under `root`."""
    counted = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal counted
        if event in CALLS and arguments and str(arguments[0]).startswith(str(root)):
            counted += 1
            if counted == call:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def killed_at_every_call(root: Path, *, background: bool) -> dict[int, int]:
    """Number of the call → step of what can be loaded afterwards. Step 3 is saved twice, after 1 and 2."""
    template = root / "template"
    first = Run(template, background=False)
    first.save(1)
    first.save(2)
    found = {}
    for call in range(1, 1000):
        folder = root / f"{background}_{call}"
        shutil.copytree(template, folder)

        def work(folder: Path = folder, call: int = call) -> None:
            run = Run(folder, background=background)
            run.checkpoints.resume(folder / "global_step_2")
            dies_at(call, folder)
            run.save(3)
            run.save(3)
            run.checkpoints.wait()

        killed = in_child(work)
        found[call] = Run(folder, background=False).loaded()
        again = Run(folder, background=background)  # what was left behind is in nobody's way
        again.save(4)
        again.checkpoints.wait()
        assert again.loaded() == 4 and not list(folder.glob("*.partial")) + list(folder.glob("*.replaced"))
        shutil.rmtree(folder)
        if not killed:
            return found
    raise AssertionError("the saves never ended")


def killed_at_random(root: Path, *, background: bool) -> list[int]:
    """Step of what can be loaded after each of the kills; the process goes on from there."""
    times = random.Random(0)
    started = time.perf_counter()
    in_child(lambda: Run(root, background=False).save(1))
    one_save = time.perf_counter() - started
    found = []
    for _ in range(RANDOM_KILLS):
        in_child(lambda: Run(root, background=background).save_for_ever(), times.uniform(one_save, 4 * one_save))
        found.append(Run(root, background=False).loaded())
    return found


def main() -> None:
    torch.set_num_threads(1)
    root, way = Path(sys.argv[1]), sys.argv[2]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        found = {
            name: work(root / name / way, background=way == "background")
            for name, work in (("every call", killed_at_every_call), ("random", killed_at_random))
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
