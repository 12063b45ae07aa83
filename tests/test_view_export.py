"""`foveal view RUN --export page.html`, and the command line of `foveal view`."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from PIL import Image

from foveal.cli import main
from foveal.errors import ConfigError
from foveal.view.command import view_command
from foveal.view.runs import open_runs
from tests.view_support import group, response, write_log, write_part, write_run

EVIL = "</script><script>alert(1)</script>"


def exported(*folders: Path) -> str:
    out = folders[0].parent / "page.html"
    assert main(["view", *map(str, folders), "--export", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def test_the_file_holds_curves_settings_and_samples_with_pictures(tmp_path: Path) -> None:
    html = exported(write_run(tmp_path / "a"), write_run(tmp_path / "b", worker={"n": 4}))
    data = json.loads(re.findall(r'id="data">(.*?)</script>', html, re.S)[0])
    assert "reward/overall" in [chart["name"] for chart in data["charts"]]
    assert len(data["times"]) == 2
    assert "worker.n" in html and "6 of 14 answers" in html
    assert html.count("data:image/jpeg;base64,") == 12


def test_the_file_needs_nothing_else(tmp_path: Path) -> None:
    html = exported(write_run(tmp_path / "a"))
    outside = [
        address for address in re.findall(r'(?:src|href)="([^"]*)"', html) if not address.startswith(("data:", "#"))
    ]
    assert outside == []


def test_its_policy_allows_its_own_scripts_alone(tmp_path: Path) -> None:
    html = exported(write_run(tmp_path / "a"))
    policy = re.findall(r'Security-Policy" content="([^"]*)"', html)[0].replace("&#39;", "'")
    assert "unsafe" not in policy
    for script in re.findall(r"<script>(.*?)</script>", html, re.S):
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy


def test_a_picture_of_a_format_that_no_run_keeps_is_not_opened(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    for picture in (run / "samples" / "images").iterdir():
        Image.new("RGB", (8, 8)).save(picture, "TIFF")
    assert "data:image/jpeg" not in exported(run)


def test_text_from_a_run_ends_no_element(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_log(run, {1: {f"{EVIL}/a": 1.0}})
    write_part(run, "val", 1, [group(0, [response(EVIL)], prompt=EVIL)])
    assert "<script>alert" not in exported(run)


def test_at_most_a_hundred_samples(tmp_path: Path) -> None:
    write_log(tmp_path / "run", {1: {"reward/overall": 1.0}})
    write_part(tmp_path / "run", "train", 1, [group(row, [response("8")]) for row in range(300)])
    assert exported(tmp_path / "run").count("<article") == 100


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="cannot be written"):
        view_command([str(run), "--export", str(tmp_path / "nowhere/page.html")])


def test_a_folder_of_runs_opens_them_all(tmp_path: Path) -> None:
    for name in ("project/a", "project/b", "other/a"):
        write_log(tmp_path / name, {})
    assert [run.name for run in open_runs([tmp_path])] == ["other/a", "project/a", "project/b"]
    assert [run.name for run in open_runs([tmp_path / "project", tmp_path / "project/a"])] == ["a", "b"]


@pytest.mark.parametrize(("name", "reason"), [("empty", "no run in this folder"), ("absent", "no such folder")])
def test_where_there_is_no_run(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=reason):
        open_runs([tmp_path / name])


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1, port {port}"):
            view_command([str(run), "--port", str(port)])


def test_the_command_serves_on_loopback_until_it_is_stopped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    command = [sys.executable, "-u", "-m", "foveal.cli", "view", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        try:
            assert process.stdout
            found = next(filter(None, (re.search(r"http://127\.0\.0\.1:\d+", line) for line in process.stdout)))
            with urllib.request.urlopen(f"{found[0]}/runs/0/samples", timeout=20) as answer:
                assert "14 of 14 answers" in answer.read().decode()
            foreign = urllib.request.Request(found[0], headers={"Host": "evil.example"})
            with pytest.raises(urllib.error.HTTPError, match="421"):
                urllib.request.urlopen(foreign, timeout=20)
        finally:
            process.terminate()
            assert process.wait(20) is not None
