"""Weights spread over one file a process (`model_world_size_W_rank_R.pt`), as FSDP in EasyR1 and verl leaves them."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from foveal.errors import CheckpointError
from foveal.train.torch_file import Stored, StoredPart, TorchFile

_NAME = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_SHARD = re.compile(r"Shard\((\d+)\)")


@dataclass(frozen=True)
class Weight:
    """A weight and its parts.

    Attributes:
        shape: of the whole.
        dim: along which the parts lie; None where each part is the whole weight.
        parts: with the file that each lies in.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None
    parts: list[tuple[TorchFile, Stored]]


class RankFiles:
    """The files of all processes, open; a context manager.

    How the parts of a weight lie in the whole is taken from its placements and the parts' shapes; the mesh of processes
    is ignored. Where the processes hold several copies (`fsdp_size` in EasyR1) the first one is read.

    Attributes:
        weights: by name.

    Raises:
        CheckpointError: files are missing, damaged or of several runs, or the parts of a weight don't make it up.
    """

    def __init__(self, folder: Path) -> None:
        with ExitStack() as stack:
            files = [stack.enter_context(TorchFile(path)) for path in _rank_files(folder)]
            for file in files[1:]:
                if different := file.weights.keys() ^ files[0].weights.keys():
                    raise CheckpointError(
                        f"{file.path} and {files[0].path.name} hold different weights (as {min(different)}), so they "
                        "are of several runs. Copy the checkpoint again, into an empty folder."
                    )
            self.weights = {name: _weight(name, files) for name in files[0].weights}
            self._open = stack.pop_all()

    def __enter__(self) -> RankFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._open.close()

    @property
    def first_dtype(self) -> str:
        """Of the first weight, as "float32"."""
        return str(next(iter(self.weights.values())).dtype).removeprefix("torch.")

    def read(self, name: str) -> torch.Tensor:
        """The whole weight, in the type it was saved in. One part of it is in memory besides.

        Raises:
            CheckpointError: its numbers are damaged, or copies of it differ.
        """
        weight = self.weights[name]
        if weight.dim is None:
            return _same(name, weight)
        whole = torch.empty(weight.shape, dtype=weight.dtype)
        start = 0
        for file, part in weight.parts:
            rows = part.shape[weight.dim]
            whole.narrow(weight.dim, start, rows).copy_(file.read(part))
            start += rows
        return whole


def has_rank_files(folder: Path) -> bool:
    return folder.is_dir() and any(_NAME.fullmatch(path.name) for path in folder.iterdir())


def _rank_files(folder: Path) -> list[Path]:
    """The files in the order of the ranks.

    Raises:
        CheckpointError: there are none, some are missing, or they are of several runs.
    """
    found: dict[int, set[int]] = {}
    for path in folder.iterdir():
        if match := _NAME.fullmatch(path.name):
            found.setdefault(int(match[1]), set()).add(int(match[2]))
    if len(found) != 1:
        sizes = ", ".join(map(str, sorted(found))) or "none"
        raise CheckpointError(
            f"{folder}: files model_world_size_W_rank_R.pt of one run are needed; found world sizes: {sizes}. Move the "
            "files of other runs away."
        )
    [(size, ranks)] = found.items()
    if missing := sorted(set(range(size)) - ranks):
        raise CheckpointError(
            f"{folder}: {len(missing)} of {size} files are missing (the first is "
            f"model_world_size_{size}_rank_{missing[0]}.pt). With several machines each wrote those of its own "
            "processes: copy them all into this folder."
        )
    return [folder / f"model_world_size_{size}_rank_{rank}.pt" for rank in range(size)]


def _weight(name: str, files: list[TorchFile]) -> Weight:
    held = [file.weights[name] for file in files]
    first = held[0]
    agree = all(
        (part.shape, part.placements, part.local.dtype) == (first.shape, first.placements, first.local.dtype)
        for part in held
    )
    dim = _sharded_dim(name, files[0].path, first)
    parts = [(file, part.local) for file, part in zip(files, held, strict=True)]
    if dim is not None:
        parts = _first_copy(parts, first.shape, dim)
        fits = sum(part.shape[dim] for _, part in parts) == first.shape[dim]
        fits = fits and all(_others(part.shape, dim) == _others(first.shape, dim) for _, part in parts)
    else:
        fits = all(part.shape == first.shape for _, part in parts)
    if not agree or not fits:
        raise CheckpointError(
            f"{files[0].path.parent}: the parts of {name} in the {len(files)} files don't make up one weight, so they "
            "are of several runs. Copy the checkpoint again, into an empty folder."
        )
    return Weight(first.shape, first.local.dtype, dim, parts)


def _first_copy(
    parts: list[tuple[TorchFile, Stored]], shape: tuple[int, ...], dim: int
) -> list[tuple[TorchFile, Stored]]:
    """The parts up to where the weight is whole. Processes come copy by copy; some may have no rows."""
    taken, rows = [], 0
    for file, part in parts:
        if len(part.shape) == len(shape) and 0 not in part.shape and rows < shape[dim]:
            taken.append((file, part))
            rows += part.shape[dim]
    return taken


def _others(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]


def _sharded_dim(name: str, path: Path, part: StoredPart) -> int | None:
    """Along which dimension a weight is spread over processes; None where each has all of it."""
    *outer, last = part.placements or ("Replicate",)
    match = _SHARD.fullmatch(last)
    if any(placement != "Replicate" for placement in outer) or (match is None and last != "Replicate"):
        raise CheckpointError(
            f"{path}: {name} is spread over processes as {', '.join(part.placements or ())}; only rows and copies of "
            "them, as FSDP makes them, can be put together. Merge the checkpoint with the program that wrote it."
        )
    return int(match[1]) if match and int(match[1]) < len(part.shape) else None


def _same(name: str, weight: Weight) -> torch.Tensor:
    """A weight that every process has whole."""
    (file, part), *others = weight.parts
    first = file.read(part)
    for file, part in others:
        if not torch.equal(first, file.read(part)):
            raise CheckpointError(
                f"{file.path}: {name} differs from rank 0's, though neither is marked as a part of a larger weight. "
                "How they belong together is unknown: merge the checkpoint with the program that wrote it."
            )
    return first
