"""Readers of data files: parquet, JSON, JSON lines, CSV, TSV."""

from __future__ import annotations

import csv
import json
import sys
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foveal.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

EXTENSIONS = {
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
}


class JsonLines:
    """Rows of JSON-lines files. Only the offsets of the lines are kept, so that pictures inside don't fill memory.

    Python's reader and not Arrow's, so that a column may change its type from row to row. A broken line is a row that
    cannot be read: asking for it raises DataError with the file and the line.

    Raises:
        DataError: no line can be read.
    """

    def __init__(self, files: list[Path]) -> None:
        self._places: list[tuple[Path, int]] = []
        self._broken: dict[int, DataError] = {}
        columns: dict[str, None] = {}
        for path in files:
            with path.open("rb") as lines:
                offset = 0
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        try:
                            columns.update(dict.fromkeys(_json_row(line, f"{path}, line {number}")))
                        except DataError as error:
                            self._broken[len(self._places)] = error
                        self._places.append((path, offset))
                    offset += len(line)
        if self._broken and len(self._broken) == len(self._places):
            raise self._broken[0]
        self.columns = list(columns)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self._broken:
            raise self._broken[index]
        path, offset = self._places[index]
        try:
            with path.open("rb") as lines:
                lines.seek(offset)
                line = lines.readline()
        except OSError as error:
            raise DataError(f"cannot read {path} any more: {error.strerror or error}.") from error
        return _json_row(line, str(path))


def read_json(path: Path) -> list[dict[str, Any]]:
    """Rows of a .json file: a list of objects, or one object a line."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start.startswith(b"["):
        try:
            lines = JsonLines([path])
        except DataError as error:
            raise DataError(f"{error} Or the whole file is one list of objects, [{{…}}, …].") from error
        return [lines[index] for index in range(len(lines))]
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}.") from error
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {index} is a {type(row).__name__}; every row must be an object.")
    return rows


def _json_row(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not valid JSON: {error}. Every line must be one whole object.") from error
    if not isinstance(row, dict):
        raise DataError(f"{place} is a {type(row).__name__}; every line must be one object, {{…}}.")
    return row


def read_csv(path: Path) -> list[dict[str, Any]]:
    """Rows of a .csv or .tsv file with a header line. Cells stay strings, so that an answer "0123" is not 123."""
    # Python's default of 128 KiB a cell is short of an inline picture; C long is the most it takes.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        try:
            rows = list(reader)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 ({error}). Save it as CSV in UTF-8.") from error
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: not valid CSV: {error}.") from error
    for index, row in enumerate(rows):
        if None in row or None in row.values():
            raise DataError(f"{path}, row {index} has another number of cells than the header's {len(row)}.")
    return rows


class Chain:
    """Tables one after the other, each with its own types of columns."""

    def __init__(self, tables: Sequence[Dataset]) -> None:
        self._tables = tables
        self._ends = list(accumulate(len(table) for table in tables))
        self.column_names = list(dict.fromkeys(column for table in tables for column in table.column_names))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = bisect_right(self._ends, index)
        return self._tables[number][index - (self._ends[number - 1] if number else 0)]


def read_parquet(files: list[Path]) -> Dataset | Chain:
    """Opens parquet files through `datasets`, which maps them from its cache instead of holding them in memory.

    Raises:
        DataError: a file is damaged, no parquet, or has no rows.
    """
    import datasets

    bars_were_on = datasets.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    try:
        return _load_parquet(files)
    except DataError:
        if len(files) == 1:
            raise
        # One table has one type per column; files that differ are read one by one.
        return Chain([_load_parquet([path]) for path in files])
    finally:
        if bars_were_on:
            datasets.enable_progress_bars()


def _load_parquet(files: list[Path]) -> Dataset:
    import datasets

    try:
        return undecoded(datasets.load_dataset("parquet", data_files=[str(path) for path in files], split="train"))
    except Exception as error:
        names = ", ".join(str(path) for path in files[:3])
        raise DataError(
            f"cannot read {names}: {error.__cause__ or error} (the file is damaged, no parquet, or has no rows)"
        ) from error


def undecoded(dataset: Dataset) -> Dataset:
    """The data set, told to give {"bytes", "path"} for pictures instead of decoding them."""
    # `Dataset.cast` would do the same for lists of pictures, but by writing the whole set to disk again.
    for feature in dataset.info.features.values():
        _stop_decoding(feature)
    return dataset


def _stop_decoding(feature: Any) -> None:
    if isinstance(feature, dict):
        for inner in feature.values():
            _stop_decoding(inner)
    elif hasattr(feature, "decode"):
        feature.decode = False
    elif hasattr(feature, "feature"):
        _stop_decoding(feature.feature)
