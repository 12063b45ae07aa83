"""Seconds and GB/s of saving and resuming a model of 7B-size with its optimizer's states, and what a step pays for it.

Usage: python -m benchmarks.checkpoint_speed FOLDER [GIGABYTES]

Weights and two moments in bfloat16 (46 GB) of the layers of Qwen2.5-7B; GIGABYTES takes fewer layers. "training" is
matrix products without a pause, so that what writing takes from them shows.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import torch
from torch import nn

from foveal.train.checkpoint import check_actor
from foveal.train.description import Description
from foveal.train.retention import Checkpoints
from foveal.train.snapshot import Snapshot
from foveal.train.staging import Staging, available_memory
from foveal.train.state import check_contents, load_state, take_state

HIDDEN, INNER, KEYS, VOCABULARY, LAYERS = 3584, 18944, 512, 152064, 28
DESCRIPTION = Description(
    {"model_class": "none", "source": "", "source_dtype": "bfloat16", "tied_weights": False},
    {Path("config.json"): b"{}"},
)


def model_of(gigabytes: float, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    shapes = [(VOCABULARY, HIDDEN)] * 2
    layer = [(HIDDEN, HIDDEN)] * 2 + [(KEYS, HIDDEN)] * 2 + [(INNER, HIDDEN)] * 3 + [(HIDDEN,)] * 2
    for _ in range(LAYERS):
        if 6e-9 * sum(torch.Size(shape).numel() for shape in shapes + layer) < gigabytes:
            shapes += layer
    weights = [nn.Parameter(torch.randn(shape, device=device, dtype=torch.bfloat16)) for shape in shapes]
    module = nn.ParameterList(weights)
    optimizer = torch.optim.AdamW(weights, foreach=False)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def products_per_second(device: torch.device, seconds: float) -> float:
    size = 8192 if device.type == "cuda" else 256
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        for _ in range(20):
            a @ a
        if device.type == "cuda":
            torch.cuda.synchronize()
        count += 20
    return count / (time.perf_counter() - started)


def main() -> None:
    root, gigabytes = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 1000.0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module, optimizer = model_of(gigabytes, device)
    size = sum(t.nbytes for p in module.parameters() for t in (p, *optimizer.state[p].values())) / 1e9
    print(f"{size:.1f} GB; host memory available {(available_memory() or 0) / 1e9:.0f} GB")
    checkpoints, staging = Checkpoints(root, 1), Staging()
    quiet = products_per_second(device, 3)
    for step in (1, 2):
        shutil.rmtree(root, ignore_errors=True)  # room for one checkpoint
        state = take_state(module, optimizer)
        assert staging.fits(state)
        started = time.perf_counter()
        snapshot = Snapshot(staging.copy(state), None, DESCRIPTION, True)
        copied = time.perf_counter() - started
        checkpoints.save(step, snapshot.write, None, state={"step": step}, background=True)
        meanwhile = products_per_second(device, 3)
        checkpoints.wait()
        written = time.perf_counter() - started - copied
        print(
            f"save {step}: the step pays {copied:.1f} s ({size / copied:.1f} GB/s); written in {written:.1f} s "
            f"({size / written:.1f} GB/s), training at {meanwhile / quiet:.0%} of its speed meanwhile"
        )
    folder = checkpoints.folder(2) / "actor"
    started = time.perf_counter()
    info = check_actor(folder)
    check_contents(folder, info)
    checked = time.perf_counter() - started
    load_state(folder, info, module, optimizer)
    loaded = time.perf_counter() - started - checked
    print(f"resume: checksums {checked:.1f} s, reading {loaded:.1f} s ({size / (checked + loaded):.1f} GB/s together)")


if __name__ == "__main__":
    main()
