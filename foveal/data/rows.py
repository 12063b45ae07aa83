"""Rows by number: those of one source, and several sources mixed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from foveal.errors import DataError

Row: TypeAlias = dict[str, Any]


class Table(Protocol):
    """What a reader returns: rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


class Rows:
    """The rows of one source, read when asked for.

    Args:
        files: where the rows lie, which tells them apart from others; none where that cannot be told.

    Attributes:
        source: as the user wrote it, for messages.
        columns: every column that any row has.
    """

    def __init__(
        self, table: Table | Sequence[Row], columns: Sequence[str], source: str, files: Sequence[Path] = ()
    ) -> None:
        self._table = table
        self._stamps = [_stamp(file) for file in files]
        self._numbers: Sequence[int] = range(len(table))
        self._change: Callable[[Row, str], Row] | None = None
        self.columns = list(columns)
        self.source = source

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Row:
        row = self._table[self._numbers[index]]
        return row if self._change is None else self._change(row, self.place(index))

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def name(self, index: int) -> str:
        """Row `index` in messages that name the source elsewhere: "row 3"."""
        return f"row {index}"

    def place(self, index: int) -> str:
        """Row `index` in messages that stand alone: "row 3 of SOURCE"."""
        return f"row {index} of {self.source}"

    @property
    def identity(self) -> str:
        """Other for other rows: files with their size and time, which rows of them, and what they are changed to.

        "" where that is not known.
        """
        return "\n".join([*self._stamps, str(self._numbers)]) if self._stamps else ""

    def checksum(self, columns: Sequence[str]) -> str:
        """Tells rows apart from others, wherever they lie: of `columns` of at most 1,000 rows, evenly spread."""
        found = 0
        for index in range(0, len(self), max(1, len(self) // 1000)):
            row = self[index]
            text = json.dumps([row.get(column) for column in columns], default=str, sort_keys=True)
            found = zlib.crc32(text.encode(errors="backslashreplace"), found)
        return f"{found:08x}"

    def cut(self, start: int, stop: int) -> None:
        """Keeps rows start … stop - 1, which are then numbered from 0."""
        self._numbers = self._numbers[start:stop]

    def change(self, change: Callable[[Row, str], Row], columns: Sequence[str], description: str) -> None:
        """From now on each row is what `change(row, place)` makes of it, which has `columns`.

        Args:
            description: other for every change that makes other rows.
        """
        self._change = change
        self._stamps = self._stamps and [*self._stamps, description]
        self.columns = list(columns)

    def require(self, column: str, key: str) -> None:
        """Raises DataError if no row has `column`, which the configuration names under `key`."""
        if column in self.columns:
            return
        near = get_close_matches(column, self.columns, 1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise DataError(
            f"{self.source} has no column {column!r} ({key}); its columns are: {', '.join(self.columns)}.{hint} "
            f"Set {key} to one of them."
        )


class Mixture(Rows):
    """Several sources one after the other, each as often in an epoch as its weight says.

    With weight 2 every row of a source is there twice, with 0.5 half of its rows are, evenly spread and the same in
    every epoch. So a mixture is a table like any other: shuffled, resumed and counted row by row.
    """

    def __init__(self, parts: Sequence[tuple[Rows, float]]) -> None:
        self._parts = [rows for rows, _ in parts]
        picked = [_weighted(len(rows), weight, rows.source) for rows, weight in parts]
        self._part = np.repeat(np.arange(len(parts)), [len(rows) for rows in picked])
        self._row = np.concatenate(picked)
        self.columns = list(dict.fromkeys(column for rows in self._parts for column in rows.columns))
        self.source = " + ".join(rows.source if weight == 1 else f"{rows.source}*{weight:g}" for rows, weight in parts)

    def __len__(self) -> int:
        return len(self._row)

    def __getitem__(self, index: int) -> Row:
        return self._parts[self._part[index]][int(self._row[index])]

    def name(self, index: int) -> str:
        return self.place(index)

    def place(self, index: int) -> str:
        return self._parts[self._part[index]].place(int(self._row[index]))

    @property
    def identity(self) -> str:
        known = [rows.identity for rows in self._parts]
        return "\n".join([*known, self.source]) if all(known) else ""

    def require(self, column: str, key: str) -> None:
        """Raises DataError if a source has no row with `column`."""
        for rows in self._parts:
            rows.require(column, key)


def count(number: int, noun: str) -> str:
    """For messages: "1 row", "2 rows"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _weighted(total: int, weight: float, source: str) -> np.ndarray:
    """Numbers of `weight * total` rows: all of them as often as fits, then some evenly spread."""
    wanted = round(total * weight)
    if not wanted:
        raise DataError(f"{source}: none of its {total} rows is left with the weight {weight:g}. Raise it.")
    whole, rest = divmod(wanted, total)
    return np.concatenate([np.tile(np.arange(total), whole), np.arange(rest) * total // max(rest, 1)])


def _stamp(file: Path) -> str:
    status = file.stat()
    return f"{file.resolve()} {status.st_size} {status.st_mtime_ns}"
