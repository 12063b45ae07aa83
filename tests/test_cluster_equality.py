"""The quick start's task gives the same losses in this process and with 1, 2 and 3 workers of Ray.

More ways to train, and vLLM, are in test_cluster_runs.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import foveal.trainer
from foveal.cli import main
from foveal.quickstart.run import Folders
from foveal.quickstart.task import QUESTION, make_rows, write_rows
from foveal.quickstart.tiny import build_tiny
from tests.cluster_support import one_machine
from tests.small_run import read_log

ray: Any = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

KINDS = ("text", "image", "mixed")
STEPS = 5
"""Of each kind, by turns."""
PROMPTS = 4
COMPARED = ("grad_norm", "pg_loss", "entropy_loss", "ppo_kl", "pg_clipfrac_lower", "pg_clipfrac_higher")

REWARD = """
REWARD_TYPE = "batch"


def score(rows):
    # A model that nobody has trained writes noise: something that differs within a group.
    return [{"overall": sum(map(ord, row["response"])) % 7 / 7} for row in rows]
"""


def write_task(path: Path) -> Path:
    """Rows of the quick start in the order of the steps: without pictures, with pictures, and some with."""
    rows = make_rows("train", STEPS * len(KINDS) * PROMPTS, seed=1)
    for index, row in enumerate(rows):
        kind = KINDS[index // PROMPTS % len(KINDS)]
        if kind == "text" or (kind == "mixed" and index % PROMPTS != 1):
            row["problem"] = f"{index}: {QUESTION.removeprefix('<image>')}"
            row["images"] = []
    return write_rows(rows, path)


def train(root: Path, name: str) -> list[dict[str, Any]]:
    """The records of a run in a folder of its own."""
    arguments = [
        *Folders(root).overrides(),
        f"trainer.save_checkpoint_path={root / name}",
        f"trainer.max_steps={STEPS * len(KINDS)}",
        "trainer.logger=[file]",
        "data.shuffle=false",
        f"data.rollout_batch_size={PROMPTS}",
        "data.val_files=null",
        "worker.actor.global_batch_size=2",
        f"worker.reward.reward_function={root / 'reward.py'}:score",
    ]
    assert main(["train", *arguments, f"trainer.n_gpus_per_node={max(1, int(name))}"]) == 0
    return read_log(root / name)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("equality")
    folders = Folders(root)
    build_tiny(folders.warm, "qwen3_vl", seed=1)
    write_task(folders.data / "train.parquet")
    (root / "reward.py").write_text(REWARD)
    return root


@pytest.fixture(scope="module")
def alone(root: Path) -> list[dict[str, Any]]:
    return train(root, "0")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of one for all runs."""
    with one_machine() as made:
        yield made.address


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_losses_are_those_of_this_process(
    workers: int, root: Path, alone: list[dict[str, Any]], cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foveal.cluster.ray_group import RayWorkers

    monkeypatch.setenv("RAY_ADDRESS", cluster)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    start: Any = lambda config, processing, **options: RayWorkers(config, processing, {"checkpoint": None, **options})  # noqa: E731
    monkeypatch.setattr(foveal.trainer, "start_workers", start)  # one worker would be taken into this process
    found = train(root, str(workers))
    assert len(found) == len(alone) == STEPS * len(KINDS)
    for step, (mine, theirs) in enumerate(zip(found, alone, strict=True)):
        assert mine["reward"] == theirs["reward"] and mine["response_length"] == theirs["response_length"], step
        assert theirs["actor"]["grad_norm"] > 0
        for name in COMPARED:
            assert mine["actor"][name] == pytest.approx(theirs["actor"][name], abs=1e-5), (step, name)
