"""For tests of trackers: a local MLflow server with a database, and what wandb keeps offline."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record


@contextmanager
def serve_mlflow(folder: Path) -> Iterator[str]:
    """Serves on a free port of the loopback; yields the address. Everything it keeps lies in `folder`."""
    folder.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    options = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    stores = ["--backend-store-uri", "sqlite:///mlflow.db", "--artifacts-destination", "./artifacts"]
    with open(folder / "log.txt", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *options, *stores],
            cwd=folder,
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            _wait(address, server, folder / "log.txt")
            yield address
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(log.read_text())


def wandb_records(file: Path) -> Iterator[Record]:
    """What an offline run's file holds: records in pieces, in blocks of 32 KiB, as in LevelDB's logs."""
    data = file.read_bytes()
    place, record = 7, b""
    while place + 7 <= len(data):
        if (room := 32768 - place % 32768) < 7:
            place += room
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        record = (record if kind in (3, 4) else b"") + data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield Record.FromString(record)
