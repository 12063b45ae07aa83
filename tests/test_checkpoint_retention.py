"""Which checkpoints a run keeps, finds again, and never takes for whole."""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import nn

from foveal.errors import CheckpointError
from foveal.train.files import fsync
from foveal.train.retention import Checkpoints
from foveal.train.state import take_state, write_manifest, write_state
from tests.model_helpers import save_actor


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], None]:
    """Writes a real, very small actor."""
    source = tmp_path_factory.mktemp("source")
    (source / "config.json").write_text('{"dtype": "float32"}')
    model = nn.Linear(64, 64)

    def write_actor(folder: Path) -> None:
        save_actor(folder / "actor", model, None, source_path=str(source), save_processing=lambda _: None)

    return write_actor


def steps(root: Path) -> list[int]:
    return sorted(int(path.name.rpartition("_")[2]) for path in root.glob("global_step_*"))


def tracker(root: Path) -> dict[str, object]:
    return json.loads((root / "checkpoint_tracker.json").read_text())


def save_all(checkpoints: Checkpoints, write: Callable[[Path], None], scores: dict[int, float | None]) -> None:
    for step, score in scores.items():
        checkpoints.save(step, write, score, state={"step": step})


@pytest.mark.parametrize(
    ("limit", "scores", "kept"),
    [
        (1, {1: 0.5, 2: 0.9, 3: 0.6}, [2, 3]),
        (1, {1: 0.5, 2: 0.9, 3: 0.6, 4: 0.4}, [2, 4]),
        (1, {1: 0.5, 2: 0.6, 3: 0.9}, [3]),
        (2, {1: 0.9, 2: 0.5, 3: 0.6, 4: 0.4}, [1, 4]),
        (3, {1: 0.9, 2: 0.5, 3: 0.6, 4: 0.4}, [1, 3, 4]),
        (2, {1: None, 2: None, 3: None}, [2, 3]),
        (-1, {1: 0.5, 2: 0.9, 3: 0.6}, [1, 2, 3]),
    ],
)
def test_kept_checkpoints(
    tmp_path: Path, write: Callable[[Path], None], limit: int, scores: dict[int, float | None], kept: list[int]
) -> None:
    save_all(Checkpoints(tmp_path, limit), write, scores)
    assert steps(tmp_path) == kept


def test_the_best_survives_a_resume(tmp_path: Path, write: Callable[[Path], None]) -> None:
    save_all(Checkpoints(tmp_path, 1), write, {1: 0.5, 2: 0.9, 3: 0.6})
    resumed = Checkpoints(tmp_path, 1)
    latest = resumed.latest()
    assert latest is not None and resumed.resume(latest) == {"step": 3}
    resumed.save(4, write, 0.4)
    assert steps(tmp_path) == [2, 4]
    assert tracker(tmp_path) == {
        "best_global_step": 2,
        "best_val_reward_score": 0.9,
        "last_global_step": 4,
        "last_actor_path": str(tmp_path / "global_step_4" / "actor"),
    }


def test_less_may_be_better(tmp_path: Path, write: Callable[[Path], None]) -> None:
    scores = {1: 0.5, 2: 0.1, 3: 0.6, 4: 0.4}
    save_all(Checkpoints(tmp_path, 1, "val_response_length/mean", "min"), write, scores)
    assert steps(tmp_path) == [2, 4] and tracker(tmp_path)["best_val_reward_score"] == 0.1


def test_a_best_by_another_metric_is_not_compared_with(
    tmp_path: Path, write: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    save_all(Checkpoints(tmp_path, -1), write, {1: 0.5, 2: 0.9})
    resumed = Checkpoints(tmp_path, -1, "val/accuracy_reward")
    resumed.resume(tmp_path / "global_step_2")
    assert "global_step_2 was the best by val/reward_score" in capsys.readouterr().out
    resumed.save(3, write, 0.2)
    assert resumed.best_step == 3


def test_words_for_checkpoints_of_the_run(tmp_path: Path, write: Callable[[Path], None]) -> None:
    checkpoints = Checkpoints(tmp_path, -1)
    save_all(checkpoints, write, {1: 0.5, 2: 0.9, 3: 0.6})
    assert checkpoints.resolve("latest") == tmp_path / "global_step_3"
    assert checkpoints.resolve("best") == tmp_path / "global_step_2"
    (tmp_path / "checkpoint_tracker.json").unlink()
    assert Checkpoints(tmp_path, -1).resolve("best") == tmp_path / "global_step_2"


@pytest.mark.parametrize(
    ("word", "cure"), [("latest", "find_last_checkpoint|load_checkpoint_path"), ("best", "val_freq")]
)
def test_words_for_what_is_not_there_say_what_to_do(
    tmp_path: Path, write: Callable[[Path], None], word: str, cure: str
) -> None:
    if word == "best":
        save_all(Checkpoints(tmp_path, -1), write, {1: None})
    with pytest.raises(CheckpointError, match=f"{word}: .*({cure})"):
        Checkpoints(tmp_path, -1).resolve(word)


def test_a_save_without_a_validation_is_never_the_best(tmp_path: Path, write: Callable[[Path], None]) -> None:
    save_all(Checkpoints(tmp_path, -1), write, {1: None, 2: -0.5, 3: None, 4: float("nan")})
    assert (tracker(tmp_path)["best_global_step"], tracker(tmp_path)["best_val_reward_score"]) == (2, -0.5)


def test_a_resume_from_before_the_best_forgets_it(tmp_path: Path, write: Callable[[Path], None]) -> None:
    save_all(Checkpoints(tmp_path, -1), write, {1: 0.5, 2: 0.9})
    resumed = Checkpoints(tmp_path, -1)
    resumed.resume(tmp_path / "global_step_1")
    resumed.save(2, write, 0.6)
    assert (tracker(tmp_path)["best_global_step"], tracker(tmp_path)["best_val_reward_score"]) == (2, 0.6)


def test_a_new_run_in_an_old_folder_leaves_later_steps_alone(tmp_path: Path, write: Callable[[Path], None]) -> None:
    save_all(Checkpoints(tmp_path, -1), write, {5: 0.9, 10: 0.9})
    save_all(Checkpoints(tmp_path, 1), write, {6: 0.1, 7: 0.2})
    assert steps(tmp_path) == [7, 10]
    assert Checkpoints(tmp_path, 1).latest() == tmp_path / "global_step_7"


def test_old_checkpoints_go_only_after_the_new_one_is_whole(tmp_path: Path, write: Callable[[Path], None]) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(1, write, None)

    def look(folder: Path) -> None:
        assert (tmp_path / "global_step_1" / "actor" / "foveal.json").exists()
        write(folder)

    checkpoints.save(2, look, None)
    assert steps(tmp_path) == [2]


def test_a_save_that_fails_leaves_the_previous_one_as_latest(
    tmp_path: Path, write: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(1, write, 0.1)

    def interrupted(folder: Path) -> None:
        write(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, interrupted, 0.9)
    assert checkpoints.latest() == tmp_path / "global_step_1"
    assert tracker(tmp_path)["best_global_step"] == 1
    checkpoints.save(3, write, None)
    assert [path.name for path in tmp_path.glob("*.partial")] == []
    assert "global_step_2.partial: the rest of a save that was cut short" in capsys.readouterr().out


def test_saving_a_step_again_replaces_it(tmp_path: Path, write: Callable[[Path], None]) -> None:
    checkpoints = Checkpoints(tmp_path, -1)
    checkpoints.save(1, write, 0.9, state={"try": 1})
    checkpoints.save(1, write, 0.3, state={"try": 2})
    assert checkpoints.resume(tmp_path / "global_step_1") == {"try": 2}
    assert tracker(tmp_path)["best_val_reward_score"] == 0.3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_tracker.json", "global_step_1"]


def test_kill_while_a_step_is_replaced_brings_the_former_one_back(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    checkpoints = Checkpoints(tmp_path, -1)
    checkpoints.save(1, write, None)
    (tmp_path / "global_step_1").rename(tmp_path / "global_step_1.replaced")
    checkpoints.restore()
    assert checkpoints.latest() == tmp_path / "global_step_1"


def test_looking_for_a_checkpoint_changes_nothing(tmp_path: Path, write: Callable[[Path], None]) -> None:
    checkpoints = Checkpoints(tmp_path, -1)
    checkpoints.save(1, write, 0.5)
    checkpoints.save(2, write, None)
    (tmp_path / "global_step_2").rename(tmp_path / "global_step_2.replaced")  # a run is in the middle of a save
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert checkpoints.latest() == checkpoints.best() == checkpoints.resolve("best") == tmp_path / "global_step_1"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("content", [None, "", '{"last_global_step": 7}', "[]"])
def test_latest_without_a_usable_tracker_file_scans(
    tmp_path: Path, write: Callable[[Path], None], content: str | None
) -> None:
    save_all(Checkpoints(tmp_path, -1), write, {9: None, 10: None})
    (tmp_path / "checkpoint_tracker.json").unlink()
    if content is not None:
        (tmp_path / "checkpoint_tracker.json").write_text(content)
    assert Checkpoints(tmp_path, -1).latest() == tmp_path / "global_step_10"


def test_latest_passes_over_a_damaged_checkpoint_and_names_it(
    tmp_path: Path, write: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    save_all(Checkpoints(tmp_path, -1), write, {1: None, 2: None})
    (tmp_path / "global_step_2" / "actor" / "__0_0.distcp").unlink()
    assert Checkpoints(tmp_path, -1).latest() == tmp_path / "global_step_1"
    error = capsys.readouterr().err
    assert "global_step_2/actor: the checkpoint is damaged: __0_0.distcp is missing" in error
    assert "training begins at its first step" not in error
    (tmp_path / "global_step_1" / "actor" / "__0_0.distcp").unlink()
    assert Checkpoints(tmp_path, -1).latest() is None
    assert f"no checkpoint in {tmp_path} is whole: training begins at its first step" in capsys.readouterr().err


def test_latest_passes_over_a_damaged_content_only_where_it_is_to_be_read(
    tmp_path: Path, write: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    save_all(Checkpoints(tmp_path, -1), write, {1: None, 2: None})
    flip_a_bit(tmp_path / "global_step_2" / "actor" / "__0_0.distcp")
    assert Checkpoints(tmp_path, -1).latest() == tmp_path / "global_step_2"
    assert Checkpoints(tmp_path, -1).latest(contents=True) == tmp_path / "global_step_1"
    assert "passing over a checkpoint" in (error := capsys.readouterr().err) and "__0_0.distcp holds" in error


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("files", [[], {"surplus.safetensors": 3}])
def test_latest_passes_over_a_state_that_makes_no_sense(
    tmp_path: Path, write: Callable[[Path], None], files: object, capsys: pytest.CaptureFixture[str]
) -> None:
    save_all(Checkpoints(tmp_path, -1), write, {1: None, 2: None})
    (tmp_path / "global_step_2" / "trainer_state.json").write_text(json.dumps({"files": files}))
    assert Checkpoints(tmp_path, -1).latest() == tmp_path / "global_step_1"
    assert "trainer_state.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["global_step_2", "best"])
def test_a_damaged_checkpoint_that_was_named_is_an_error(
    tmp_path: Path, write: Callable[[Path], None], name: str
) -> None:
    save_all(Checkpoints(tmp_path, -1), write, {1: 0.1, 2: 0.9})
    flip_a_bit(tmp_path / "global_step_2" / "actor" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp holds something else"):
        Checkpoints(tmp_path, -1).resolve(name if name == "best" else tmp_path / name)


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_latest_passes_over_a_checkpoint_of_which_a_part_was_cut_short(
    tmp_path: Path, write: Callable[[Path], None], part: str
) -> None:
    def write_both(folder: Path) -> None:
        write(folder)
        model = nn.Linear(4, 4)
        write_manifest(folder / "critic", write_state(folder / "critic", take_state(model, None)))

    save_all(Checkpoints(tmp_path, -1), write_both, {1: None, 2: None})
    assert Checkpoints(tmp_path, -1).latest() == tmp_path / "global_step_2"
    (tmp_path / "global_step_2" / part / "foveal.json").unlink()
    assert Checkpoints(tmp_path, -1).latest() == tmp_path / "global_step_1"


def test_latest_of_a_folder_without_checkpoints_is_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "absent", 1).latest() is None


@pytest.mark.parametrize("named", ["global_step_1", "global_step_1/actor", "."])
def test_resolve(tmp_path: Path, write: Callable[[Path], None], named: str) -> None:
    Checkpoints(tmp_path, -1).save(1, write, None)
    assert Checkpoints(tmp_path / "elsewhere", -1).resolve(tmp_path / named) == tmp_path / "global_step_1"


@pytest.mark.parametrize(("named", "fault"), [("absent", "is no folder"), (".", "holds no whole checkpoint")])
def test_resolve_says_what_to_give(tmp_path: Path, named: str, fault: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{fault}\. Give …/global_step_N"):
        Checkpoints(tmp_path, -1).resolve(tmp_path / named)


def test_a_checkpoint_that_was_moved_and_linked_to_goes_from_the_run_alone(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    checkpoints = Checkpoints(tmp_path / "run", 1)
    checkpoints.save(1, write, None)
    moved = checkpoints.folder(1).rename(tmp_path / "moved")
    checkpoints.folder(1).symlink_to(moved)
    save_all(checkpoints, write, {2: None, 3: None})
    assert sorted(path.name for path in checkpoints.root.iterdir()) == ["checkpoint_tracker.json", "global_step_3"]
    assert (moved / "actor" / "foveal.json").is_file()


def test_a_rest_that_cannot_be_removed_holds_up_no_save(
    tmp_path: Path, write: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "global_step_1.partial").write_text("no folder")
    Checkpoints(tmp_path, 1).save(2, write, None)
    assert "cannot remove" in capsys.readouterr().err
    assert Checkpoints(tmp_path, 1).latest() == tmp_path / "global_step_2"


def test_a_file_system_that_flushes_no_folders_will_do() -> None:
    fsync("/proc")


def test_full_disk_names_the_file_and_the_free_space(tmp_path: Path, write: Callable[[Path], None]) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(1, write, None)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))  # the actor has 16 kB; stands for a full disk
    try:
        with pytest.raises(CheckpointError, match=r"global_step_2.* cannot write .*GB free there.*Earlier checkpoints"):
            checkpoints.save(2, write, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_tracker.json", "global_step_1"]
    assert checkpoints.latest() == tmp_path / "global_step_1"


def save(checkpoints: Checkpoints, write: Callable[[Path], None], background: bool) -> None:
    checkpoints.save(2, write, None, background=background)
    checkpoints.wait()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint, where the system lets us have one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], stderr=subprocess.DEVNULL)
    if mounted.returncode:
        pytest.skip("no right to mount")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_is_really_full_leaves_the_checkpoint_before(
    small_disk: Path, write: Callable[[Path], None], background: bool
) -> None:
    checkpoints = Checkpoints(small_disk, 1)
    checkpoints.save(1, write, None)
    (small_disk / "filler").write_bytes(bytes(72_000))
    with pytest.raises(
        CheckpointError, match=r"cannot write the checkpoint of step 2: No space left on device \(0\.0 GB"
    ):
        save(checkpoints, write, background)
    assert Checkpoints(small_disk, 1).latest(contents=True) == small_disk / "global_step_1"
    (small_disk / "filler").unlink()
    save(checkpoints, write, background)
    assert steps(small_disk) == [2]


def test_a_root_that_cannot_be_written_is_an_error_with_a_cure(write: Callable[[Path], None]) -> None:
    with pytest.raises(CheckpointError, match=r"/proc/run.*trainer\.save_checkpoint_path"):
        Checkpoints(Path("/proc/run"), 1).save(1, write, None)
