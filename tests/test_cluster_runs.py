"""`foveal train` with workers in processes of their own: the numbers of one process."""

from __future__ import annotations

import fcntl
import json
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from foveal.cli import main
from tests.small_run import read_log, small_run, write_rows

ray: Any = pytest.importorskip("ray")
pytestmark = pytest.mark.slow
STEPS = 3
COMPARED = ("grad_norm", "pg_loss", "kl_loss", "entropy_loss", "ppo_kl", "pg_clipfrac_lower")


@pytest.fixture(autouse=True)
def own_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    assert not ray.is_initialized()


def write_mixed(folder: Path, kind: str) -> Path:
    """Eight rows, with pictures, without, or by turns."""
    rows = [json.loads(line) for line in write_rows(folder).read_text().splitlines()]
    for index, row in enumerate(rows):
        if kind == "text" or (kind == "mixed" and index % 2):
            row["problem"] = row["problem"].removeprefix("<image>") * (index + 1)
            row["images"] = []
    path = folder / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(root: Path, name: str, kind: str, devices: int, *overrides: str) -> list[dict[str, Any]]:
    """The records of a run of its own folder."""
    arguments = small_run(
        root,
        "qwen2_5_vl",
        f"trainer.max_steps={STEPS}",
        f"trainer.n_gpus_per_node={devices}",
        f"trainer.save_checkpoint_path={root / name}",
        "worker.actor.global_batch_size=2",
        "data.val_files=null",
        *overrides,
    )
    rows = write_mixed(root / "data", kind)
    assert main(["train", *arguments, f"data.train_files={rows}"]) == 0
    return read_log(root / name)


def same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert len(found) == len(wanted) == STEPS
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine["response_length"] == theirs["response_length"]
        for name in COMPARED:
            assert mine["actor"][name] == pytest.approx(theirs["actor"][name], abs=1e-5), name
        if "vf_loss" in theirs["critic"]:
            for name in ("vf_loss", "grad_norm", "vpred_mean"):
                assert mine["critic"][name] == pytest.approx(theirs["critic"][name], abs=1e-5), name


@pytest.mark.parametrize(
    ("kind", "devices", "overrides"),
    [
        ("text", 2, ["worker.actor.ulysses_size=2"]),
        ("image", 3, ["worker.actor.model.lora.rank=4"]),
        ("mixed", 2, ["algorithm.adv_estimator=gae", "worker.critic.global_batch_size=4", "worker.actor.ppo_epochs=2"]),
    ],
)
def test_losses_are_those_of_one_process(tmp_path: Path, kind: str, devices: int, overrides: list[str]) -> None:
    alone = [override for override in overrides if "ulysses" not in override]
    wanted = train(tmp_path, "one", kind, 1, *alone)
    same(train(tmp_path, "several", kind, devices, *overrides), wanted)


def test_a_frozen_tower_stays_as_it_is_where_some_workers_have_text_only(tmp_path: Path) -> None:
    frozen = "worker.actor.model.freeze_vision_tower=true"
    wanted = train(tmp_path, "one", "mixed", 1, frozen)
    same(train(tmp_path, "three", "mixed", 3, frozen, "trainer.save_hf=true"), wanted)
    [before] = (tmp_path / "model_qwen2_5_vl").glob("*.safetensors")
    [after] = (tmp_path / "three" / f"global_step_{STEPS}" / "actor" / "huggingface").glob("*.safetensors")
    first, last = load_file(before), load_file(after)
    changed = {name for name in first if not first[name].equal(last[name].to(first[name].dtype))}
    assert changed and not any("visual" in name and "merger" not in name for name in changed)


def test_a_run_goes_on_with_more_workers_and_is_scored_by_them(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", "mixed", 1, "trainer.save_freq=1")
    (tmp_path / "moved").mkdir()
    (tmp_path / "whole" / "global_step_1").rename(tmp_path / "moved" / "global_step_1")
    rest = train(tmp_path, "moved", "mixed", 2, "trainer.save_freq=1")
    same([whole[0], *rest], whole)
    answers = []
    for devices in (1, 2):
        folder = tmp_path / f"eval_{devices}"
        arguments = small_run(tmp_path, "qwen2_5_vl", f"trainer.n_gpus_per_node={devices}")
        arguments += [f"trainer.save_checkpoint_path={folder}", "trainer.val_generations_to_log=8"]
        assert main(["eval", str(tmp_path / "moved" / f"global_step_{STEPS}"), *arguments]) == 0
        [log] = folder.rglob("generations.log")
        answers.append(log.read_text(encoding="utf-8"))
    assert answers[0] and answers[0] == answers[1]


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_losses_with_vllm_engines_are_those_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    # Greedy, and so one answer to each prompt: on a CPU vLLM's random numbers are those of a batch.
    greedy = ("worker.rollout.top_k=1", "worker.rollout.n=1", "algorithm.adv_estimator=reinforce_plus_plus")
    vllm = ("worker.rollout.name=vllm", "worker.rollout.dtype=fp32", "worker.rollout.tensor_parallel_size=1")
    with open(Path(tempfile.gettempdir()) / "foveal_vllm_parallel.lock", "w") as lock:
        # vLLM names the memory that its CPU processes share after their ranks alone: two runs would meet in it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        same(
            train(tmp_path, "two", "mixed", 2, *greedy, *vllm),
            train(tmp_path, "one", "mixed", 1, *greedy),
        )


def test_machines_of_a_cluster_train_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        same(
            train(tmp_path, "two", "mixed", 1, "trainer.nnodes=2"),
            train(tmp_path, "one", "mixed", 1),
        )
        arguments = small_run(tmp_path, "qwen2_5_vl", "trainer.nnodes=3")
        assert main(["train", *arguments, "trainer.save_checkpoint_path=" + str(tmp_path / "three")]) == 1
    finally:
        cluster.shutdown()
