"""The judge against vLLM's own server, with a tiny vision-language model on the CPU."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from PIL import Image

from foveal.config.schema_reward import RewardConfig
from foveal.quickstart.tiny import build_tiny
from foveal.reward.runner import RewardRunner
from foveal.types import Media
from tests.reward_support import make_group, overall, score

pytest.importorskip("vllm")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """The address of a server of a tiny model, which it calls judge."""
    build_tiny(tmp_path / "model", "qwen2_5_vl")
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "model")]
    command += ["--served-model-name", "judge", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 300
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "server.log").read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait()


def _answers(address: str) -> bool:
    try:
        return httpx.get(address).is_success
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_vllms_server_judges_with_the_picture(url: str) -> None:
    groups = [make_group("red", "red", "blue"), make_group("red", "red")]
    for group in groups:
        group.prompt.row = {"problem": "<image>Which colour?"}
    picture = io.BytesIO()
    Image.new("RGB", (56, 56), "red").save(picture, "PNG")
    groups[0].prompt.media = [Media("image", picture.getvalue(), "row 0, image 0")]
    # The model is made of random numbers: the server holds it to replies that have a score.
    kwargs = {
        "url": url,
        "model": "judge",
        "question": "problem",
        "extra": {"structured_outputs": {"choice": ["Score: 3", "Score: 8"]}},
    }
    config = RewardConfig(reward_function="foveal.rewards.judge:Judge", reward_function_kwargs=kwargs, time_limit=120.0)
    score(RewardRunner(config, "train"), *groups)
    assert set(overall(groups[0]) + overall(groups[1])) <= {0.3, 0.8}
    with_picture, without = (group.responses[0].rewards["judge_tokens"] for group in groups)
    assert with_picture > without
