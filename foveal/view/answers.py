"""The answers of a run: a small index of all in memory, and the texts of the few that are shown, from their files."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from foveal.track.sample_files import ANSWERS, PART, ROW_GROUP, part_name, schema

PAGE = 50
SPLITS = ("train", "val")
SORTS = {
    "newest": ("step", True),
    "oldest": ("step", False),
    "highest reward": ("overall", True),
    "lowest reward": ("overall", False),
    "longest": ("length", True),
    "shortest": ("length", False),
    "highest advantage": ("advantage", True),
    "lowest advantage": ("advantage", False),
}
FINISHES = ("stop", "length", "abort")
_INDEXED = ["row", "group", "overall", "advantage", "length", "finish_reason"]
_TEXTS = ["uid", "prompt", "response", "ground_truth", "images", "media", "rewards", "role", "answer"]
_TOKENS = ["token_ids", "logprobs", "trainer_logprobs", "entropies"]
_SEARCHED = ["response", "prompt", "ground_truth"]
LONGEST_TEXT = 200
"""Characters that are searched for."""
SEARCH_SECONDS = 2.0
"""After which a search begins with no further file."""


@dataclass(frozen=True)
class Filter:
    """Which answers, and in which order.

    Attributes:
        right: of those whose reward is at least `threshold`, "yes"; of the others, "no".
        finish: a finish reason.
        text: stands in the prompt, the answer or the ground truth, in large or small letters.
    """

    split: str = ""
    step_from: int | None = None
    step_to: int | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    length_from: int | None = None
    length_to: int | None = None
    right: Literal["", "yes", "no"] = ""
    threshold: float = 0.5
    finish: str = ""
    text: str = ""
    sort: str = "newest"

    @classmethod
    def read(cls, given: Mapping[str, str]) -> Filter:
        """From an address; what is not understood is left out."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            text = given.get(field.name, "").strip()
            if field.name == "text":
                values["text"] = text[:LONGEST_TEXT]
            elif field.name in _CHOICES:
                if text in _CHOICES[field.name]:
                    values[field.name] = text
            elif text and (value := _finite(text)) is not None:
                values[field.name] = int(value) if value.is_integer() else value
        return cls(**values)

    def query(self) -> dict[str, str]:
        """What `read` makes this of, without the defaults."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: str(value) for name, value in values.items() if value != getattr(Filter, name)}


_CHOICES = {"split": SPLITS, "right": ("yes", "no"), "finish": FINISHES, "sort": tuple(SORTS)}


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < 1e30 else None


@dataclass(frozen=True)
class Part:
    """One file: a step and split.

    Attributes:
        stamp: changes when the file does.
        table: the columns of the index; None where the file is damaged or not ours.
    """

    path: Path
    split: str
    step: int
    stamp: tuple[int, int]
    table: pa.Table | None

    @property
    def size(self) -> int:
        return 0 if self.table is None else len(self.table)


@dataclass(frozen=True)
class Place:
    """Where an answer stands."""

    split: str
    step: int
    number: int


class Found(NamedTuple):
    """What a filter finds.

    Attributes:
        numbers: (M,) int64, of the answers, in the order that is wanted.
        left: how many were not looked through for the text, as time was up. Asking again goes on from there.
    """

    numbers: np.ndarray
    left: int


class AnswerFiles:
    """The parts in a run's `samples/answers`, read again as they come.

    Attributes:
        index: of all answers that have been read; another object when there are others.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / ANSWERS
        self.index = Index([])
        self._parts: dict[str, Part] = {}

    def read_on(self) -> bool:
        """Takes in new and replaced files, for one thread at a time; returns whether anything changed."""
        found = {path: stamp_of(path) for path in self.folder.glob("*.parquet") if PART.fullmatch(path.name)}
        there = {path: stamp for path, stamp in found.items() if stamp is not None}
        known = {part.path: part.stamp for part in self._parts.values()}
        if known == there:
            return False
        new = [(path, stamp) for path, stamp in there.items() if known.get(path) != stamp]
        with ThreadPoolExecutor(2) as pool:
            read = list(pool.map(lambda pair: _read_part(*pair), new))
        self._parts = {name: part for name, part in self._parts.items() if part.path in there}
        self._parts |= {part.path.name: part for part in read}
        self.index = Index(sorted(self._parts.values(), key=lambda part: (part.step, part.split)))
        return True


class Index:
    """All answers of some parts, by number; it never changes, so that what was found stays where it was.

    Attributes:
        unreadable: names of files that are not, as far as anybody has asked for what is in them.
    """

    def __init__(self, parts: list[Part]) -> None:
        self.unreadable = {part.path.name for part in parts if part.table is None}
        self._parts = {part.path.name: part for part in parts if part.table is not None}
        sizes = [part.size for part in self._parts.values()]
        starts = np.cumsum([0, *sizes])[:-1]
        self._starts = dict(zip(self._parts, starts.tolist(), strict=True))
        self._columns = _join(list(self._parts.values()), sizes, starts)

    def __len__(self) -> int:
        return len(self._columns["step"])

    def find(self, wanted: Filter) -> Found:
        """The answers that are wanted."""
        columns = self._columns
        kept = np.ones(len(self), dtype=bool)
        if wanted.split:
            kept &= columns["split"] == SPLITS.index(wanted.split)
        for column, low, high in (
            ("step", wanted.step_from, wanted.step_to),
            ("overall", wanted.reward_from, wanted.reward_to),
            ("length", wanted.length_from, wanted.length_to),
        ):
            # rounded alike: 0.9 of a form is not the nearest float32
            if low is not None:
                kept &= columns[column] >= np.float32(low)
            if high is not None:
                kept &= columns[column] <= np.float32(high)
        if wanted.right:
            kept &= (columns["overall"] >= np.float32(wanted.threshold)) == (wanted.right == "yes")
        if wanted.finish:
            kept &= columns["finish_reason"] == FINISHES.index(wanted.finish)
        left = 0
        if wanted.text:
            held, searched = self._with_text(wanted.text, kept, oldest_first=wanted.sort == "oldest")
            left = int(np.count_nonzero(kept & ~searched))
            kept &= held
        numbers = np.flatnonzero(kept)
        column, down = SORTS[wanted.sort]
        values = columns[column][numbers].astype(np.float64)
        values = np.where(np.isnan(values), np.inf, -values if down else values)  # those without a value come last
        return Found(numbers[np.argsort(values, kind="stable")], left)

    def _with_text(self, text: str, among: np.ndarray, *, oldest_first: bool) -> tuple[np.ndarray, np.ndarray]:
        """(N,) bool: which answers have it, and which were looked through before time was up. Only files are read that
        hold some of `among`, (N,) bool."""
        spans = {name: slice(start, start + self._parts[name].size) for name, start in self._starts.items()}
        parts = [self._parts[name] for name, span in spans.items() if among[span].any()]
        held, searched = np.zeros((2, len(self)), dtype=bool)
        until = time.monotonic() + SEARCH_SECONDS

        def look(part: Part) -> bytes | None:
            return _search(part.path, part.stamp, text) if time.monotonic() < until else None

        parts = parts if oldest_first else parts[::-1]
        with ThreadPoolExecutor(2) as pool:
            for part, bits in zip(parts, pool.map(look, parts), strict=True):
                if bits is None:
                    continue
                span = spans[part.path.name]
                searched[span] = True
                if bits:
                    held[span] = np.unpackbits(np.frombuffer(bits, np.uint8), count=part.size)
                else:
                    self._note_damage(part)
        return held, searched

    def _note_damage(self, part: Part) -> None:
        """Of a part that could not be read, unless it has been replaced or removed since."""
        if stamp_of(part.path) == part.stamp:
            self.unreadable.add(part.path.name)

    def follow(self, split: str, row: int) -> np.ndarray:
        """(M,) int64: the numbers of the answers to one row of the data, by step."""
        return np.flatnonzero((self._columns["split"] == SPLITS.index(split)) & (self._columns["row"] == row))

    def places(self, numbers: np.ndarray) -> list[Place]:
        columns = (self._columns[name][numbers].tolist() for name in ("split", "step", "number"))
        return [Place(SPLITS[split], step, number) for split, step, number in zip(*columns, strict=True)]

    def group(self, place: Place) -> list[Place]:
        """All answers to the same prompt in the same step; empty where there is no such answer."""
        name = part_name(place.split, place.step)
        part = self._parts.get(name)
        if part is None or not 0 <= place.number < part.size:
            return []
        start = self._starts[name]
        groups = self._columns["group"][start : start + part.size]
        same = np.flatnonzero(groups == groups[place.number])
        return [Place(place.split, place.step, number) for number in same.tolist()]

    def fetch(self, places: list[Place], tokens: bool = False) -> list[dict[str, Any]]:
        """The answers with their texts, as the files have them, and their `place`; unreadable ones are left out.

        Args:
            tokens: also the per-token columns.
        """
        by_part: dict[str, list[Place]] = {}
        for place in places:
            by_part.setdefault(part_name(place.split, place.step), []).append(place)
        found: dict[Place, dict[str, Any]] = {}
        for name, wanted in by_part.items():
            part = self._parts.get(name)
            if part is None:
                continue
            try:
                rows = _read_rows(part.path, [place.number for place in wanted], _TEXTS + (_TOKENS if tokens else []))
            except (OSError, pa.ArrowException, ValueError, IndexError):  # replaced, removed or damaged since
                self._note_damage(part)
                continue
            for place, row in zip(wanted, rows, strict=True):
                number = self._starts[name] + place.number
                indexed = {column: _plain(self._columns[column][number]) for column in _INDEXED}
                indexed["finish_reason"] = FINISHES[indexed["finish_reason"]]
                found[place] = {**row, **indexed, "place": place, "rewards": dict(row["rewards"])}
        return [found[place] for place in places if place in found]


def stamp_of(path: Path) -> tuple[int, int] | None:
    """Another one when the file has changed; None where there is none, or something that is no file."""
    try:
        found = path.stat()
    except OSError:  # removed since it was listed
        return None
    return (found.st_mtime_ns, found.st_size) if stat.S_ISREG(found.st_mode) else None


def _open(path: Path) -> pq.ParquetFile:
    return pq.ParquetFile(pa.OSFile(os.fsencode(path)))  # of a path that is no UTF-8, pyarrow takes the bytes alone


def _plain(value: np.generic) -> Any:
    plain = value.item()
    return None if isinstance(plain, float) and np.isnan(plain) else plain


@cache
def _index_schema() -> pa.Schema:
    return pa.schema([schema().field(name) for name in _INDEXED])


def _read_part(path: Path, stamp: tuple[int, int]) -> Part:
    found = PART.fullmatch(path.name)
    assert found
    try:
        with _open(path) as file:  # a quarter of the time that read_table takes
            table = file.read(columns=_INDEXED, use_threads=False).select(_INDEXED)
            there = {field.name: field.type for field in file.schema_arrow}
        ours = all(there.get(field.name) == field.type for field in schema())
        kept = table if ours and not _has_null(table, ["row", "group", "length"]) else None
    except (OSError, pa.ArrowException, ValueError, KeyError):
        kept = None
    return Part(path, found[1], int(found[2]), stamp, kept)


def _has_null(table: pa.Table, names: list[str]) -> bool:
    return any(table[name].null_count for name in names)


@lru_cache(100_000)
def _search(path: Path, stamp: tuple[int, int], text: str) -> bytes:
    """Which rows of a file, of this stamp, hold the text, in packed bits; empty where it cannot be read."""
    try:
        with _open(path) as file:
            table = file.read(columns=_SEARCHED, use_threads=False)
        if _has_null(table, _SEARCHED):
            return b""
        held = [pc.match_substring(table[name], text, ignore_case=True).to_numpy() for name in _SEARCHED]
    except (OSError, pa.ArrowException, ValueError, KeyError):  # replaced, removed or damaged since
        return b""
    return np.packbits(np.logical_or.reduce(held)).tobytes()


def _join(parts: list[Part], sizes: list[int], starts: np.ndarray) -> dict[str, np.ndarray]:
    """The columns of all parts one after the other, with step, split and number within the part."""
    table = pa.concat_tables([_index_schema().empty_table(), *(part.table for part in parts)])
    finishes = pc.index_in(table["finish_reason"], pa.array(FINISHES)).to_numpy()
    steps, splits = [part.step for part in parts], [SPLITS.index(part.split) for part in parts]
    return {name: table[name].to_numpy() for name in _INDEXED} | {
        "finish_reason": np.nan_to_num(finishes, nan=len(FINISHES) - 1).astype(np.int8),
        "step": np.repeat(np.array(steps, dtype=np.int64), sizes),
        "split": np.repeat(np.array(splits, dtype=np.int8), sizes),
        "number": np.arange(sum(sizes)) - np.repeat(starts, sizes),
    }


def _read_rows(path: Path, numbers: list[int], columns: list[str]) -> list[dict[str, Any]]:
    """Some rows of a file, reading only the row groups that they are in."""
    with _open(path) as file:
        needed = sorted({number // ROW_GROUP for number in numbers})
        table = file.read_row_groups(needed, columns=columns, use_threads=False)
    if _has_null(table, _TEXTS):
        raise ValueError(f"{path.name} lacks texts")
    shift = {group: index * ROW_GROUP for index, group in enumerate(needed)}
    places = [shift[number // ROW_GROUP] + number % ROW_GROUP for number in numbers]
    return table.take(places).to_pylist()
