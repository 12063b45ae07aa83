"""Where rows come from: local files and folders, and data sets of the Hugging Face hub or ModelScope.

A source is written `PATH_OR_HUB_ID@split`. A path that exists is always read locally, without a network attempt.
Pictures stay as they are stored; nothing here decodes one.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from foveal.data.files import EXTENSIONS, JsonLines, read_csv, read_json, read_parquet, undecoded
from foveal.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

# The names that `datasets` takes for a split when they stand in a file's or folder's name.
SPLIT_WORDS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
# Files that describe a data set and hold no rows.
DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
SPLIT = re.compile(r"(?P<name>[\w.-]+)?(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")


class Table(Protocol):
    """What a reader returns: rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


class Rows:
    """The rows of one source, read when asked for.

    Attributes:
        source: as the user wrote it, for messages.
        columns: every column that any row has.
    """

    def __init__(self, table: Table | Sequence[dict[str, Any]], columns: Sequence[str], source: str) -> None:
        self._table = table
        self._numbers = range(len(table))
        self.columns = list(columns)
        self.source = source

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._table[self._numbers[index]]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

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


@dataclass(frozen=True)
class Spec:
    """A source taken apart: `path` exists locally if `local`; `start`/`stop` are as in `split[10:20%]`."""

    path: str
    local: bool
    subset: str | None
    split: str
    start: str | None
    stop: str | None


def load_rows(spec: str) -> Rows:
    """Opens `PATH_OR_HUB_ID@split`.

    `spec` is a .parquet, .json, .jsonl or .csv file, a folder of such files, or a hub id, followed by `@split` (default
    `train`; a single file has only one split, whatever its name). `hub_id:subset@split` takes one subset and
    `split[:100]`, `split[10%:]` a part. CSV cells are strings; JSON keeps each row's own types.

    Raises:
        DataError: nothing is there, the split is unknown, a line is broken, or there are no rows.
    """
    parsed = parse_spec(spec)
    if not parsed.local:
        rows = _read_hub(parsed, spec)
    elif Path(parsed.path).is_dir():
        rows = _read_files(_files_of_split(Path(parsed.path), parsed.split), spec)
    elif Path(parsed.path).is_file():
        rows = _read_files([Path(parsed.path)], spec)
    else:  # a pipe would be waited for and could not be read twice
        raise DataError(f"{spec} is neither a file nor a folder. Write the rows to a file first.")
    total = len(rows)
    rows.cut(_bound(parsed.start, total, 0), _bound(parsed.stop, total, total))
    if not len(rows):
        raise DataError(f"{spec} has no rows" + (f" (the whole split has {total})." if total else "."))
    return rows


def parse_spec(spec: str) -> Spec:
    """Takes `PATH_OR_HUB_ID[:subset][@split]` apart; a path that exists as written has no split in it."""
    if _exists(spec):
        return Spec(str(Path(spec).expanduser()), True, None, "train", None, None)
    path, _, split = spec.rpartition("@") if "@" in spec else (spec, "", "")
    match = SPLIT.fullmatch(split)
    if match is None:
        raise DataError(f"{spec}: cannot read the split {split!r}; write `train`, `train[:100]` or `train[10%:20%]`.")
    name, start, stop = match["name"] or "train", match["start"], match["stop"]
    if path and _exists(path):
        return Spec(str(Path(path).expanduser()), True, None, name, start, stop)
    hub_id, _, subset = path.partition(":")
    if "://" in path:
        raise DataError(f"{spec} is an address; a run downloads hub data sets only. Give owner/name, or a local path.")
    if HUB_ID.fullmatch(hub_id) is None or Path(hub_id).suffix in EXTENSIONS:
        raise DataError(
            f"no file or folder {path} (looked for from {Path.cwd()}), and it does not look like a hub id "
            f"(`owner/name`). Correct the path in data.train_files / data.val_files."
        )
    return Spec(hub_id, False, subset or None, name, start, stop)


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError):  # a name that is too long; a `~name` without a home
        return False


def _bound(text: str | None, total: int, default: int) -> int:
    """A slice bound in rows; percentages are rounded to the nearest row, negative ones count from the end."""
    if text is None:
        return default
    number = round(int(text[:-1]) * total / 100) if text.endswith("%") else int(text)
    return min(max(number + total if number < 0 else number, 0), total)


def _files_of_split(folder: Path, split: str) -> list[Path]:
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in EXTENSIONS
        and path.name not in DESCRIPTIONS
        and not any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)
        and path.is_file()
    ]
    if not files:
        raise DataError(f"folder {folder} holds no data file; readable are {', '.join(sorted(EXTENSIONS))}.")
    by_split: dict[str, list[Path]] = {}
    for path in files:
        by_split.setdefault(split_in_name(path.relative_to(folder)) or "", []).append(path)
    # As in `datasets`: files without a split in their names are the train split if no file has one.
    unnamed = by_split.pop("", [])
    if not by_split:
        by_split["train"] = unnamed
    wanted = next((name for name, words in SPLIT_WORDS.items() if split in words), split)
    chosen = by_split.get(split) or by_split.get(wanted)
    if chosen is None:
        raise DataError(
            f"folder {folder} has no split {split!r}; it has: {', '.join(sorted(by_split))}. "
            f"Write {folder}@{min(by_split)}, for instance."
        )
    kinds = {EXTENSIONS[path.suffix.lower()] for path in chosen}
    if len(kinds) > 1:
        names = ", ".join(str(path.relative_to(folder)) for path in chosen[:6])
        raise DataError(f"folder {folder} mixes file types in split {split!r}: {names}. Name the one file to read.")
    return chosen


def split_in_name(path: Path) -> str | None:
    """The split that a file's path inside its folder names, or None: `data/test-00000-of-00002.parquet` → test."""
    shard = re.match(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}", path.name)
    if shard:
        return shard[1]
    words = set(re.split(r"[-._ 0-9/\\]+", path.as_posix().lower()))
    return next((name for name, known in SPLIT_WORDS.items() if words & known), None)


def _read_files(files: list[Path], source: str) -> Rows:
    kind = EXTENSIONS.get(files[0].suffix.lower())
    if kind is None:
        raise DataError(f"{files[0]}: unknown kind of data file; readable are {', '.join(sorted(EXTENSIONS))}.")
    if kind == "parquet":
        dataset = read_parquet(files)
        return Rows(dataset, dataset.column_names, source)
    if kind == "jsonl":
        lines = JsonLines(files)
        return Rows(lines, lines.columns, source)
    rows = [row for path in files for row in (read_csv(path) if kind == "csv" else read_json(path))]
    return Rows(rows, list(dict.fromkeys(key for row in rows for key in row)), source)


def _read_hub(spec: Spec, source: str) -> Rows:
    modelscope = os.environ.get("USE_MODELSCOPE_HUB", "0").lower() in {"1", "true", "y", "yes"}
    try:
        dataset = _from_modelscope(spec) if modelscope else _from_hugging_face(spec)
    except DataError:
        raise
    except Exception as error:
        hub = "ModelScope" if modelscope else "the Hugging Face hub"
        raise DataError(
            f"{spec.path} is no file or folder here (looked for from {Path.cwd()}), and loading it from {hub} failed: "
            f"{type(error).__name__}: {error}. Correct the path or id, or download the data set where there is a "
            f"network and give its folder."
        ) from error
    dataset = undecoded(dataset)
    return Rows(dataset, dataset.column_names, source)


def _from_hugging_face(spec: Spec) -> Dataset:
    from datasets import load_dataset

    return load_dataset(spec.path, spec.subset, split=spec.split)


def _from_modelscope(spec: Spec) -> Dataset:
    try:
        from modelscope import MsDataset
    except ImportError as error:
        raise DataError(
            f"USE_MODELSCOPE_HUB is set, and reading {spec.path} from there needs the package modelscope: "
            f"`pip install modelscope`, or unset USE_MODELSCOPE_HUB."
        ) from error
    dataset = MsDataset.load(spec.path, subset_name=spec.subset, split=spec.split)
    return dataset.to_hf_dataset() if isinstance(dataset, MsDataset) else dataset
