"""Metric names of users, made legal for a tracker without two of them becoming one."""

from __future__ import annotations

import re
import zlib

_LONGEST = 240  # MLflow's own limit is 250 characters, the shortest of all


class LegalNames:
    """Gives every metric name a legal one, always the same for the same name.

    A name that is legal stays as it is. Another one is cleaned and gets four letters of its checksum, so that `mean@1`
    and `mean 1` stay apart, also from one run to the next.

    Args:
        illegal: a regular expression for the characters that the tracker refuses.
        folders: whether the tracker keeps `a/b` in a folder `a`, so that `a` cannot be a metric too.
    """

    def __init__(self, illegal: str, folders: bool = False) -> None:
        self._illegal = re.compile(illegal)
        self._folders = folders
        self._names: dict[str, str] = {}
        self._taken: set[str] = set()

    def __call__(self, name: str) -> str:
        """The legal name for `name`."""
        if name not in self._names:
            legal = self._clean(name)
            if legal != name or self._clashes(legal):
                if self._clashes(legal):
                    legal = legal.replace("/", "_")
                legal = f"{legal or 'metric'}_{zlib.crc32(name.encode(errors='replace')) & 0xFFFF:04x}"
                while self._clashes(legal):
                    legal += "_"
            self._names[name] = legal
            self._taken.add(legal)
        return self._names[name]

    def _clean(self, name: str) -> str:
        """Without illegal characters, empty path parts, and leading or trailing dots and blanks."""
        parts = (part.strip(" .") for part in self._illegal.sub("_", name).split("/"))
        return "/".join(part for part in parts if part)[:_LONGEST]

    def _clashes(self, legal: str) -> bool:
        if legal in self._taken:
            return True
        return self._folders and any(
            taken.startswith(f"{legal}/") or legal.startswith(f"{taken}/") for taken in self._taken
        )
