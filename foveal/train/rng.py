"""The random generators of a process in a checkpoint, so that what draws from them goes on as if never stopped.

Sampling and rounding don't: their numbers follow from the step. Dropout does, and a user's own estimator or loss may.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from foveal.train.processes import several_processes
from foveal.train.shards import ShardReader

KEY = "rng"
"""Of the shards' state, which holds each process's generators under its rank."""


def take_rng() -> dict[str, dict[str, torch.Tensor]]:
    """The states of this process's generators: PyTorch's of host and device, NumPy's and Python's shared ones."""
    shared: Any = np.random.get_state(legacy=True)
    _, keys, position, has_gauss, gauss = shared
    version, words, next_gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.concatenate([keys.astype(np.int64), [position, has_gauss]])),
        "numpy_gauss": torch.tensor([gauss], dtype=torch.float64),
        "python": torch.tensor([version, *words, next_gauss is not None], dtype=torch.int64),
        "python_gauss": torch.tensor([next_gauss or 0.0], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {_rank(): states}


def load_rng(folder: Path) -> None:
    """Sets this process's generators as they were when `folder` was written.

    They stay as they are where nothing of them was saved: by an earlier release, or because there were fewer processes.
    With several processes every one must call this.

    Raises:
        CheckpointError: a damaged file.
    """
    rank, reader = _rank(), ShardReader(folder)
    states = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name in ("torch", "numpy", "numpy_gauss", "python", "python_gauss", "cuda")
        if isinstance(entry := reader.index.get(f"{KEY}.{rank}.{name}"), TensorStorageMetadata)
    }
    reader.fill({KEY: {rank: states}} if states else {})
    if not states:
        return
    torch.set_rng_state(states["torch"])
    words, gauss = states["numpy"].numpy(), float(states["numpy_gauss"])
    np.random.set_state(("MT19937", words[:-2].astype(np.uint32), int(words[-2]), int(words[-1]), gauss))
    version, *python, has_gauss = states["python"].tolist()
    random.setstate((version, tuple(python), float(states["python_gauss"]) if has_gauss else None))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _rank() -> str:
    return str(dist.get_rank() if several_processes() else 0)
