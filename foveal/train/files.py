"""Writing files so that a crash or a full disk never leaves half of one under its final name."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes `content` to `path` at once: a reader sees the old file or the new one, never a part."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    fsync(path.parent)


def fsync(path: str | Path) -> None:
    """Flushes one file, or the names in one folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and shared file systems can't flush a folder.
        if error.errno not in (errno.EINVAL, errno.EBADF) or not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Flushes every file and folder under `folder` to disk."""
    for top, _, names in os.walk(folder):
        for name in names:
            fsync(os.path.join(top, name))
        fsync(top)


def free_space(path: Path) -> str:
    """The free space of the file system that holds `path` (which need not exist), as "1.2 GB free there"."""
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    return f"{shutil.disk_usage(existing).free / 1e9:.1f} GB free there"
