"""How fast `foveal view` opens a run with 100,000 answers, and what its files weigh: wall time, request to answer.

Usage: python -m benchmarks.view_speed [--tokens N] [--out FILE]

500 training steps of 160 answers and 20 validations of 1,000 are written as training writes them, with pictures and
four numbers per token. Then `foveal view` is started, and pages are asked for one after the other: the first answer
waits for the index of all files. In Chromium, where there is one, a second server's first page is timed until it is
painted and until its pictures are there. The files are in the system's cache, as those of a run that goes on are.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from foveal.track.file import RunFiles
from foveal.track.sample_files import ANSWERS, IMAGES, SampleFiles, Split
from foveal.types import Group, Media, Prompt, Response

WORDS, PICTURES, GROUP = 20_000, 200, 5
RARE = "needle-in-it"
PAGES = {
    "samples, the first request": "/runs/0/samples",
    "samples again": "/runs/0/samples",
    "wrong answers, lowest reward first, page 100": "/runs/0/samples?right=no&sort=lowest+reward&page=99",
    "a text that stands in 20 answers": f"/runs/0/samples?text={RARE.upper()}",
    "its second page": f"/runs/0/samples?text={RARE.upper()}&page=1",
    "a text in validations alone": "/runs/0/samples?split=val&text=nowhere",
    "a group with its tokens": "/runs/0/train/500/0",
    "one prompt through the run": "/runs/0/follow/val/7",
}


class Words:
    """A vocabulary of made-up words, for want of a model's tokenizer."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        letters = np.array(list("etaoinshrdlucmfw"))
        self.texts = np.array(["".join(rng.choice(letters, size)) for size in rng.integers(1, 8, WORDS)])

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(self.texts[token_ids])

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return list(self.texts[ids])


def write_run(run: Path, tokens: int) -> float:
    """Returns the seconds that it took."""
    rng, words, begin = np.random.default_rng(1), Words(), time.perf_counter()
    pictures = [_picture(rng) for _ in range(PICTURES)]
    files = SampleFiles(run, words)
    log = RunFiles(run, {"trainer": {"max_steps": 500}})
    for step in range(1, 501):
        log.log({"reward/overall": step / 500, "actor/grad_norm": 1.0, "timing_s/step": 9.0}, step)
        splits: list[tuple[Split, int, int]] = [("train", 160 // GROUP, GROUP)]
        for split, prompts, size in splits + ([("val", 1000, 1)] if step % 25 == 0 else []):
            part = files.part(split, step)
            part.add([_group(rng, words, row, size, tokens, pictures, split) for row in range(prompts)])
            part.write()
    log.close()
    return time.perf_counter() - begin


def _picture(rng: np.random.Generator) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def _group(
    rng: np.random.Generator, words: Words, row: int, size: int, tokens: int, pictures: list[bytes], split: Split
) -> Group:
    asked = np.random.default_rng(row).integers(0, WORDS, 60).tolist()
    media = [Media("image", pictures[row % PICTURES], f"{row}.png")]
    answers = []
    for _ in range(size):
        # a few words often, most seldom, as in a language
        ids = np.minimum(rng.zipf(1.3, rng.integers(tokens // 2, tokens * 3 // 2)), WORDS - 1)
        logprobs = -rng.exponential(0.3, len(ids)).astype(np.float32)
        columns = {}
        if split == "train":
            columns = {
                "advantages": np.full(len(ids), 0.5, dtype=np.float32),
                "old_logprobs": logprobs + rng.normal(0, 0.01, len(ids)).astype(np.float32),
                "entropies": rng.exponential(0.3, len(ids)).astype(np.float32),
            }
        text = words.decode(ids.tolist()) + (f" {RARE}" if split == "val" and row == 500 else "")
        rewards = {"overall": float(rng.random()), "accuracy": float(rng.random() > 0.5)}
        answers.append(Response(ids, logprobs, "stop", text=text, rewards=rewards, columns=columns))
    return Group(Prompt(f"{split}-{row}", asked, asked, media, {}, row, "42"), answers)


@contextmanager
def serve(run: Path) -> Iterator[tuple[str, float]]:
    """Yields the address and the seconds from the command to the moment that it can be reached."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    begin = time.perf_counter()
    command = [sys.executable, "-m", "foveal", "view", str(run), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    assert server.poll() is None, "foveal view has ended"
                    time.sleep(0.01)
            yield f"http://127.0.0.1:{port}", time.perf_counter() - begin
        finally:
            server.terminate()


def ask(address: str) -> float:
    """Seconds until the whole page is there."""
    begin = time.perf_counter()
    with urllib.request.urlopen(address, timeout=120) as answer:
        answer.read()
    return time.perf_counter() - begin


def painted(address: str, chromium: str) -> dict[str, float]:
    """Seconds in the browser from opening the address."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(address, wait_until="load")
        paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        page.wait_for_function(f"{paint.split('[0]')[0]}.length > 0")
        found = page.evaluate(f"[{paint}, performance.getEntriesByType('navigation')[0].loadEventEnd]")
        browser.close()
    return {"first paint": found[0] / 1000, "all loaded": found[1] / 1000}


def weigh(run: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in run.glob(pattern))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=500, help="mean length of an answer")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        figures: dict[str, Any] = {"answers": 100_000, "mean tokens of an answer": options.tokens}
        figures["written in, s"] = round(write_run(run, options.tokens), 1)
        figures["bytes of a training answer"] = weigh(run, f"{ANSWERS}/train-*.parquet") // 80_000
        figures["bytes of a validation answer"] = weigh(run, f"{ANSWERS}/val-*.parquet") // 20_000
        figures["bytes of the pictures"] = weigh(run, f"{IMAGES}/*")
        figures["load of the machine before"] = round(os.getloadavg()[0], 2)
        with serve(run) as (address, seconds):
            figures["command until it can be reached, s"] = round(seconds, 3)
            figures["request to answer, s"] = {name: round(ask(address + page), 3) for name, page in PAGES.items()}
        if chromium := shutil.which("chromium"):
            with serve(run) as (address, _):
                shown = painted(f"{address}/runs/0/samples", chromium)
                figures["in Chromium, the first request, s"] = {name: round(s, 3) for name, s in shown.items()}
    text = json.dumps(figures, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
