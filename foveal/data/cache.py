"""Where Foveal keeps what it would otherwise find out or download again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`foveal` beside the hub's own files in $HF_HOME where that is set, else in $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "foveal"
