"""Saving while training goes on: what is written, when it counts, and how a failure comes up."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foveal.errors import CheckpointError
from foveal.train import staging
from foveal.train.checkpoint import ActorInfo, check_actor
from foveal.train.retention import Checkpoints
from foveal.train.snapshot import Snapshot
from foveal.train.staging import Staging
from foveal.train.state import load_state, read_manifest, take_state
from tests.checkpoint_crashes import DESCRIPTION


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(module.parameters())
    step(module, optimizer)
    return module, optimizer


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module(torch.ones(64)).sum().backward()
    optimizer.step()


def numbers(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for p in module.parameters() for value in optimizer.state[p].values()]
    return [tensor.detach().clone() for tensor in [*module.parameters(), *states]]


def snapshot_of(state: dict[str, Any]) -> Snapshot:
    return Snapshot(state, None, DESCRIPTION, True)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond 10 kB, where the actor has 50."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """Writing waits for it."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def write() -> Callable[[Path], None]:
    module, optimizer = trained()
    return snapshot_of(take_state(module, optimizer)).write


def test_what_is_written_is_as_it_was_when_it_was_copied(tmp_path: Path, held: threading.Event) -> None:
    module, optimizer = trained()
    expected = numbers(module, optimizer)
    snapshot = snapshot_of(Staging().copy(take_state(module, optimizer)))

    def write(folder: Path) -> None:
        held.wait()
        snapshot.write(folder)

    checkpoints = Checkpoints(tmp_path, 1)
    folder = checkpoints.save(1, write, None, background=True)
    step(module, optimizer)
    held.set()
    checkpoints.wait()
    assert not torch.equal(numbers(module, optimizer)[0], expected[0])
    load_state(folder / "actor", check_actor(folder / "actor"), module, optimizer)
    assert all(map(torch.equal, numbers(module, optimizer), expected))


def test_the_memory_of_copies_is_used_again() -> None:
    module, optimizer = trained()
    copies = Staging()
    first = copies.copy(take_state(module, optimizer))["model"]["weight"]
    step(module, optimizer)
    second = copies.copy(take_state(module, optimizer))["model"]["weight"]
    assert first.data_ptr() == second.data_ptr() and torch.equal(second, module.weight)


def test_a_moment_in_eight_bits_is_copied_as_it_is() -> None:
    pytest.importorskip("torchao")
    from torchao.optim.subclass_8bit import OptimState8bit

    moment = OptimState8bit.zeros(torch.Size([64, 64]))
    moment.codes.random_(0, 255)
    moment.scale.uniform_()
    state = {"optim": {"w": {"exp_avg": moment, "step": torch.tensor(3.0), "kept": 5}}}
    copy = Staging().copy(state)["optim"]["w"]
    assert type(copy["exp_avg"]) is type(moment) and torch.equal(copy["exp_avg"].codes, moment.codes)
    assert copy["exp_avg"].codes.data_ptr() != moment.codes.data_ptr()
    assert torch.equal(copy["exp_avg"].dequantize(), moment.dequantize()) and copy["kept"] == 5


def test_without_room_nothing_is_copied_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, optimizer = trained()
    copies = Staging()
    monkeypatch.setattr(staging, "available_memory", lambda: 40_000)
    assert not copies.fits(take_state(module, optimizer)) and not copies.fits(take_state(module, optimizer))
    assert len(re.findall("written while the run waits", capsys.readouterr().out)) == 1
    monkeypatch.setattr(staging, "available_memory", lambda: None)  # nothing tells
    assert Staging().fits(take_state(module, optimizer))


def test_a_checkpoint_has_no_name_before_it_is_whole(
    tmp_path: Path, write: Callable[[Path], None], held: threading.Event
) -> None:
    def slowly(folder: Path) -> None:
        write(folder)
        held.wait()

    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(1, write, None)
    checkpoints.save(2, slowly, None, background=True)
    checkpoints.check()
    assert checkpoints.latest() == tmp_path / "global_step_1"
    held.set()
    checkpoints.wait()
    assert checkpoints.latest() == tmp_path / "global_step_2"


def test_a_save_waits_for_the_one_before(tmp_path: Path, write: Callable[[Path], None]) -> None:
    busy = threading.Lock()

    def alone(folder: Path) -> None:
        assert busy.acquire(blocking=False)
        write(folder)
        busy.release()

    checkpoints = Checkpoints(tmp_path, -1)
    for number in range(1, 6):
        checkpoints.save(number, alone, float(number), background=True)
    checkpoints.wait()
    assert checkpoints.best() == checkpoints.latest() == tmp_path / "global_step_5"


@pytest.mark.parametrize("when", ["check", "wait", "the next save"])
def test_a_full_disk_comes_up_as_the_same_error_once(tmp_path: Path, write: Callable[[Path], None], when: str) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(1, write, 0.5)
    with full_disk():
        checkpoints.save(2, write, 0.9, background=True)
        assert checkpoints._background._thread is not None
        checkpoints._background._thread.join()
    later = {"check": checkpoints.check, "wait": checkpoints.wait}
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint of step 2.*GB free there"):
        later.get(when, lambda: checkpoints.save(3, write, None))()
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_1"]
    checkpoints.check()
    checkpoints.save(3, write, 0.6, background=True)
    checkpoints.wait()
    assert checkpoints.latest(contents=True) == tmp_path / "global_step_3"
    assert (checkpoints.best_step, checkpoints.best_score) == (3, 0.6)


def test_a_folder_that_cannot_be_written_is_the_same_error(write: Callable[[Path], None]) -> None:
    checkpoints = Checkpoints(Path("/proc/run"), 1)
    checkpoints.save(1, write, None, background=True)
    with pytest.raises(CheckpointError, match=r"/proc/run.*trainer\.save_checkpoint_path"):
        checkpoints.wait()


def test_every_file_has_a_checksum(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    info = read_manifest(tmp_path / "actor", ActorInfo, what="", cure="")
    assert info.crc32.keys() == info.files.keys() == {".metadata", "__0_0.distcp"}


def test_much_is_written_to_several_files_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foveal.train.sums.FILE_BYTES", 10_000)
    monkeypatch.setattr("foveal.train.sums.THREADS", 3)
    module, optimizer = trained()
    expected = numbers(module, optimizer)
    snapshot_of(take_state(module, optimizer)).write(tmp_path)
    info = check_actor(tmp_path / "actor")
    assert len(info.files) == 4 and min(info.files.values()) > 2_000
    step(module, optimizer)
    load_state(tmp_path / "actor", info, module, optimizer)
    assert all(map(torch.equal, numbers(module, optimizer), expected))


def test_a_full_disk_in_one_of_several_threads_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foveal.train.sums.FILE_BYTES", 20_000)
    monkeypatch.setattr("foveal.train.sums.THREADS", 8)
    module, optimizer = trained()
    with full_disk(), pytest.raises(CheckpointError, match="cannot write the checkpoint of step 1"):
        Checkpoints(tmp_path, 1).save(1, snapshot_of(take_state(module, optimizer)).write, None)


ABANDONED = """
import sys, time
from pathlib import Path
from foveal.train.retention import Checkpoints
from foveal.train.sums import SummedFile
from tests.test_checkpoint_background import snapshot_of, take_state, trained

SummedFile.write = lambda self, data: print("writing", flush=True) or time.sleep(1000)
checkpoints = Checkpoints(Path(sys.argv[1]), -1)
checkpoints.save(1, snapshot_of(take_state(*trained())).write, None, background=True)
sys.stdin.readline()
checkpoints.abandon()
"""


def test_a_process_ends_while_an_abandoned_save_is_written(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ABANDONED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == "writing\n"
        try:
            process.stdin.write("\n")
            process.stdin.close()
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
