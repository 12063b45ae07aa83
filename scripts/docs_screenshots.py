#!/usr/bin/env python3
"""Makes the pictures in docs/images: trains for real, opens the viewer on the runs, and photographs its pages.

    python scripts/docs_screenshots.py               # about three minutes on two CPU cores
    python scripts/docs_screenshots.py --dir FOLDER  # keeps the runs there, and uses those that are there

The runs are three of the quick start's tiny model: 60 steps with eight answers to a prompt, 60 with two, and 25 whose
answers are cut off, which raises an alarm. Needs Chromium, and `pip install -e '.[dev]'`.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import io
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without installing

if TYPE_CHECKING:
    from playwright.sync_api import FloatRect, Locator, Page

IMAGES = ROOT / "docs" / "images"
WIDTH = 960
SHARPNESS = 1.5
"""Pixels of a picture per pixel of the window."""
MARGIN = 10
MOST_BYTES = 150_000

FIRST = "runs/eight_answers"
COMMON = ["config=examples/quickstart.yaml", "trainer.val_freq=10"]
RUNS = {
    FIRST: ["trainer.max_steps=60"],
    "runs/two_answers": ["trainer.max_steps=60", "worker.rollout.n=2"],
    "runs/cut_short": ["trainer.max_steps=25", "data.max_response_length=2"],
}
"""Folder of a run → its settings besides `COMMON`."""
MODEL = "Qwen2.5-VL-3B"


@dataclass(frozen=True)
class View:
    """A page of the viewer, and what of it the picture shows.

    Attributes:
        address: `{group}` and `{prompt}` stand for what `_places` finds.
        last: the lowest element in the picture.
        first: the highest; None for the top of the page.
    """

    address: str
    last: str
    first: str | None = None


VIEWS = {
    "view_curves.png": View("/", "#curves .chart >> nth=3"),
    "view_time.png": View("/time", "#times .chart >> nth=0"),
    "view_settings.png": View("/settings", "table.settings >> nth=0"),
    "view_samples.png": View("/runs/0/samples?split=val&right=no", "article >> nth=2"),
    "view_group.png": View("/runs/0/train/{group}?colour=none", "article >> nth=7"),
    "view_tokens.png": View("/runs/0/train/{group}?colour=probability", "article >> nth=7", first="form.filters"),
    "view_prompt.png": View("/runs/0/follow/val/{prompt}", "table.follow"),
}
PICTURES = ("console.png", "plan.png", *VIEWS)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the pictures in docs/images from runs of this very code.")
    parser.add_argument("--dir", type=Path, help="folder for the runs, which stay there; default: a temporary one")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        work = options.dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foveal-")))
        work.mkdir(parents=True, exist_ok=True)
        os.chdir(work)
        train()
        photograph()
    return 0


def train() -> None:
    """The runs, in the working directory; what each says is kept beside it."""
    from foveal.quickstart.run import Folders, prepare

    if not Path("examples").exists():
        Path("examples").symlink_to(ROOT / "examples")
    quickstart = Folders(Path("runs/quickstart"))
    if not quickstart.warm.exists():
        prepare(quickstart, seed=1)
    for folder, settings in RUNS.items():
        said = Path(f"{folder}.txt")
        if not said.exists():
            shutil.rmtree(folder, ignore_errors=True)
            said.write_text(_foveal("train", *COMMON, *settings, f"trainer.save_checkpoint_path={folder}"))


def photograph() -> None:
    """All pictures, of the runs in the working directory."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("no Chromium on this machine: install it, for instance with `apt-get install chromium`")
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright, _viewer() as address:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": WIDTH, "height": 900}, device_scale_factor=SHARPNESS, color_scheme="light"
        )
        _terminal(page, "console.png", _shortened(Path(f"{FIRST}.txt").read_text(), first=14, last=4))
        _terminal(page, "plan.png", _plan().partition("\nassumed:")[0])
        places = _places()
        for name, view in VIEWS.items():
            page.goto(address + view.address.format(**places))
            last = page.locator(view.last)
            last.wait_for()
            page.wait_for_load_state("networkidle")
            top = _box(page.locator(view.first))["y"] - MARGIN if view.first else 0
            height = _box(last)["y"] + _box(last)["height"] + MARGIN - top
            _save(name, page.screenshot(full_page=True, clip={"x": 0, "y": top, "width": WIDTH, "height": height}))
        browser.close()


def _foveal(*arguments: str, status: int = 0) -> str:
    """What `foveal` says, with the command as a shell shows it; it must end with `status`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "foveal", *arguments]
    print("foveal", *arguments, flush=True)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != status:
        sys.exit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return f"$ foveal {shlex.join(arguments)}\n{done.stdout}"


def _plan() -> str:
    from benchmarks.real_size import build_model

    if not Path(MODEL).exists():
        build_model(Path(MODEL), "3B", weights=False)
    model = f"worker.actor.model.model_path={MODEL}"
    return _foveal("plan", "config=examples/my_vlm.yaml", model, "--gpu", "48", status=1)  # 1: it does not fit


@contextlib.contextmanager
def _viewer() -> Iterator[str]:
    """`foveal view` on the runs; yields its address."""
    command = [sys.executable, "-m", "foveal", "view", *RUNS, "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            opened = next(line for line in server.stdout if line.startswith("open http://"))
            yield opened.split()[1]
        finally:
            server.terminate()


def _places() -> dict[str, str]:
    """A training group that learnt from a right answer among wrong ones, and a validation prompt that was learnt."""
    import pandas as pd

    answers = pd.read_parquet(Path(FIRST) / "samples" / "answers")
    trained = answers[(answers.split == "train") & (answers.step >= 5)]
    spread = trained.groupby(["step", "group"]).overall.agg(["nunique", "mean"])
    step, group = spread[spread["nunique"] > 2]["mean"].sub(0.4).abs().idxmin()
    part = pd.read_parquet(Path(FIRST) / "samples" / "answers" / f"train-{step:08}.parquet")
    number = int(part.index[part.group == group][0])
    validated = answers[answers.split == "val"].sort_values("step")
    learned = validated.groupby("row").filter(
        lambda one: one.overall.is_monotonic_increasing and one.overall.max() == 1
    )
    prompt = learned.groupby("row").response.nunique().idxmax()
    return {"group": f"{step}/{number}", "prompt": str(prompt)}


def _box(element: Locator) -> FloatRect:
    found = element.bounding_box()
    assert found, "not on the page"
    return found


def _shortened(text: str, *, first: int, last: int) -> str:
    lines = text.splitlines()
    return "\n".join([*lines[:first], "…", *lines[-last:]])


def _terminal(page: Page, name: str, text: str) -> None:
    """A picture of text as a terminal shows it."""
    lines = "\n".join(
        f"<b>{html.escape(line)}</b>" if line.startswith("$ ") else html.escape(line) for line in text.splitlines()
    )
    style = (
        "body { margin: 0; background: #1b1f24; } b { color: #8fd0ff; } pre { margin: 0; padding: 14px 16px;"
        "color: #e3e7eb; font: 12.5px/1.45 'DejaVu Sans Mono', monospace; white-space: pre-wrap; }"
    )
    page.set_content(f"<style>{style}</style><pre>{lines}</pre>")
    _save(name, page.locator("pre").screenshot())


def _save(name: str, picture: bytes) -> None:
    """Writes a picture with 256 colours, which is all that a page has."""
    from PIL import Image

    path = IMAGES / name
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.relative_to(ROOT)}: {size / 1000:.0f} kB")
    assert size < MOST_BYTES, f"{name} has {size:,} bytes: show less"


if __name__ == "__main__":
    sys.exit(main())
