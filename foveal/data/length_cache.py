"""Prompt lengths kept on disk, so that the second start of a run need not look at every row again."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foveal.data.cache import cache_folder
from foveal.data.measure import FileStamp, Measured, stamp

if TYPE_CHECKING:
    from foveal.data.prompts import PromptBuilder

# Keys of the section `data` that change neither a prompt nor its pictures. `train_files` and `val_files` are known by
# the files that they lead to.
WITHOUT_EFFECT = {
    "train_files",
    "val_files",
    "max_prompt_length",
    "max_response_length",
    "rollout_batch_size",
    "mini_rollout_batch_size",
    "val_batch_size",
    "shuffle",
    "seed",
    "filter_overlong_prompts",
    "filter_overlong_prompts_workers",
    "on_bad_row",
}
KEPT_DAYS = 60
"""A file that was not used for so long is removed."""
STAT_PIECE = 2048


class Lengths:
    """Tokens, pictures and videos of each row, and the files that they lie in.

    Attributes:
        tokens: (rows,) int32; 0 where the row cannot be used, or was not looked at.
        images, videos: (rows,) int32, how many.
    """

    def __init__(self, rows: int) -> None:
        self.tokens = np.zeros(rows, dtype=np.int32)
        self.images = np.zeros(rows, dtype=np.int32)
        self.videos = np.zeros(rows, dtype=np.int32)
        self._files: dict[FileStamp, int] = {}
        self._used_by: list[tuple[int, int]] = []  # (row, number of the file)

    def add(self, measured: Iterable[Measured]) -> None:
        for one in measured:
            self.tokens[one.row] = one.tokens
            self.images[one.row] = one.images
            self.videos[one.row] = one.videos
            for file in one.files:
                self._used_by.append((one.row, self._files.setdefault(file, len(self._files))))

    def unknown(self) -> list[int]:
        """Rows to look at: never seen, or not usable when they were."""
        return np.flatnonzero(self.tokens == 0).tolist()

    def forget_changed(self) -> None:
        """Makes rows unknown whose files are no longer what they were."""
        files = list(self._files)
        pieces = [files[start : start + STAT_PIECE] for start in range(0, len(files), STAT_PIECE)]
        with ThreadPoolExecutor(8) as pool:  # on a network's disk each look waits
            found = pool.map(lambda piece: [file for file in piece if stamp(file[0]) != file], pieces)
            changed = {file for piece in found for file in piece}
        if not changed:
            return
        rows = {row for row, number in self._used_by if files[number] in changed}
        self.tokens[list(rows)] = 0
        used_by, self._files = self._used_by, {}
        self._used_by = [
            (row, self._files.setdefault(files[number], len(self._files))) for row, number in used_by if row not in rows
        ]

    def save(self, path: Path) -> None:
        """Writes all of it, whole or not at all; where nothing can be written, nothing is."""
        names = "\0".join(file[0] for file in self._files).encode(errors="surrogateescape")
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_unused(path.parent)
            with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
                try:
                    np.savez(
                        file,
                        tokens=self.tokens,
                        counts=np.stack([self.images, self.videos]),
                        names=np.frombuffer(names, dtype=np.uint8),
                        stamps=np.array([file[1:] for file in self._files], dtype=np.int64).reshape(-1, 2),
                        used_by=np.array(self._used_by, dtype=np.int64).reshape(-1, 2),
                    )
                    os.replace(file.name, path)
                except OSError:
                    os.unlink(file.name)

    @classmethod
    def load(cls, path: Path, rows: int) -> Lengths:
        """What `save` wrote, for so many rows; nothing known where there is no such file or it is damaged."""
        lengths = cls(rows)
        try:
            with np.load(path, allow_pickle=False) as stored:
                tokens, counts, names, stamps, used_by = (
                    stored[name] for name in ("tokens", "counts", "names", "stamps", "used_by")
                )
            os.utime(path)
            paths = names.tobytes().decode(errors="surrogateescape").split("\0") if len(stamps) else []
            files = [(name, *pair) for name, pair in zip(paths, stamps.tolist(), strict=True)]
            if tokens.shape != (rows,) or counts.shape != (2, rows):
                return lengths
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
            return lengths
        lengths.tokens, (lengths.images, lengths.videos) = tokens, counts
        lengths._files = {file: number for number, file in enumerate(files)}
        lengths._used_by = [(row, number) for row, number in used_by.tolist()]
        return lengths


def cache_path(builder: PromptBuilder) -> Path | None:
    """Where the lengths of these prompts are kept; None where the rows cannot be told from others.

    The name is made of all that decides them: the files of the rows (path, size, time; a hub's by its revision), the
    tokenizer, the processor with its limits, the chat template, the format prompt, the keys of `data`, and this code.
    """
    identity = builder.rows.identity
    if not identity:
        return None
    data = builder.data
    options = data.model_dump(mode="json", exclude=WITHOUT_EFFECT)
    template = Path(data.format_prompt).expanduser().read_bytes() if data.format_prompt else b""
    parts = [
        identity.encode(errors="surrogateescape"),
        json.dumps(options, sort_keys=True).encode(),
        str(Path.cwd()).encode(errors="surrogateescape"),  # where relative paths start
        template,
        builder.processing.identity().encode(),
        *(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))),
    ]
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    return cache_folder() / "prompt_lengths" / f"{digest[:32]}.npz"


def _remove_unused(folder: Path) -> None:
    for path in folder.iterdir():
        if path.suffix in {".npz", ".tmp"} and time.time() - path.stat().st_mtime > KEPT_DAYS * 86400:
            path.unlink()
