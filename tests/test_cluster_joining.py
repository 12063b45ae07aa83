"""Which Ray cluster a run joins, and what is said where it cannot."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray: Any = pytest.importorskip("ray")

from foveal.cluster.ray_cluster import connect, visiting  # noqa: E402
from foveal.errors import ConfigError  # noqa: E402

ANOTHER = """
import ray, sys

ray.init("local", num_cpus=1, include_dashboard=False, logging_level="error")
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def nothing_recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither RAY_ADDRESS nor `ray start` names a cluster."""
    folder = tempfile.mkdtemp(dir="/tmp")  # the paths of sockets are short
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_another_runs_own_cluster_is_left_alone() -> None:
    command = [sys.executable, "-c", ANOTHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as another:
        assert another.stdout is not None and another.stdin is not None
        assert another.stdout.readline() == "there\n"
        with visiting() as is_there:
            assert not is_there
        another.stdin.close()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("head", "RAY_ADDRESS=head: must be host:port"),
        ("http://127.0.0.1:8265", "must be host:port"),
        ("ray://127.0.0.1:10001", "must be host:port"),
        ("127.0.0.1:1", "cannot join the Ray cluster: nothing answers at .*ray stop"),
    ],
)
def test_an_address_that_is_none_is_told_at_once(address: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    started = time.monotonic()
    with pytest.raises(ConfigError, match=said):
        connect(1)
    assert time.monotonic() - started < 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x" * 60, "größe"])
def test_a_folder_for_temporary_files_that_rays_sockets_cannot_lie_in(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / name))
    assert connect(1)
    assert ray.cluster_resources()["CPU"] >= 1
