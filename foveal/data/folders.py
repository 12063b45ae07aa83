"""Local data: single files, folders of shards, globs, and data sets that `datasets` saved to disk."""

from __future__ import annotations

import glob
import re
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from foveal.data.files import EXTENSIONS, JsonLines, read_csv, read_json, read_parquet, undecoded
from foveal.data.rows import Rows
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
SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}")


def read_file(path: Path, split: str | None, source: str) -> Rows:
    """Rows of one data file, which is one split whatever its name: `train`, or the one that its name says.

    Raises:
        DataError: it cannot be read, or the split is another one.
    """
    if split not in (None, "train") and _known_name(split) != split_in_name(Path(path.name)):
        raise DataError(
            f"{source}: {path} is one file, which has no split {split!r}. Write {path} for all of its rows, or a part "
            f"as {path}@[:90%] and {path}@[90%:]."
        )
    return _read_files([path], source)


def read_folder(folder: Path, subset: str | None, split: str | None, source: str) -> Rows:
    """Rows of a split (default `train`) of a folder, shards in the order of their names.

    `subset` is a folder in it, or a configuration that its README.md declares.

    Raises:
        DataError: the folder holds no data file, not this split, or files of several kinds in it.
    """
    if subset is not None and not (folder / subset).is_dir():
        return _read_configuration(folder, subset, split, source)
    folder = folder / subset if subset else folder
    if saved := _read_saved(folder, split, source):
        return saved
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if _holds_rows(path) and not any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)
    ]
    if not files:
        raise DataError(
            f"folder {folder} holds no data file; readable are {', '.join(sorted(EXTENSIONS))}. Put a table of "
            f"questions and answers there, with the pictures' paths in a column (data.image_key)."
        )
    by_split = _by_split(files, folder)
    return _read_files(_chosen(by_split, split or "train", f"folder {folder}", str(folder)), source)


def read_glob(pattern: str, split: str | None, source: str) -> Rows:
    """Rows of the data files that match `pattern`, in the order of their names; of one split where they have several.

    Raises:
        DataError: no data file matches, they have several splits and none is given, or they are of several kinds.
    """
    files = [path for path in map(Path, sorted(glob.glob(pattern, recursive=True))) if _holds_rows(path)]
    if not files:
        raise DataError(
            f"{source}: no data file matches {pattern} (looked for from {Path.cwd()}); readable are "
            f"{', '.join(sorted(EXTENSIONS))}."
        )
    fixed = Path(*takewhile(lambda part: not glob.has_magic(part), Path(pattern).parent.parts))
    by_split = _by_split(files, fixed)
    if split is None and len(by_split) == 1:
        split = next(iter(by_split))
    return _read_files(_chosen(by_split, split or "train", f"the files that match {pattern}", pattern), source)


def split_in_name(path: Path) -> str | None:
    """The split that a file's path inside its folder names, or None: `data/test-00000-of-00002.parquet` → test."""
    if shard := SHARD.match(path.name):
        return shard[1]
    words = set(re.split(r"[-._ 0-9/\\]+", path.as_posix().lower()))
    return next((name for name, known in SPLIT_WORDS.items() if words & known), None)


def _known_name(split: str | None) -> str | None:
    return next((name for name, words in SPLIT_WORDS.items() if split in words), split)


def _holds_rows(path: Path) -> bool:
    return path.suffix.lower() in EXTENSIONS and path.name not in DESCRIPTIONS and path.is_file()


def _by_split(files: list[Path], folder: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in files:
        found.setdefault(split_in_name(path.relative_to(folder)) or "", []).append(path)
    # As in `datasets`: files without a split in their names are the train split if no file has one.
    unnamed = found.pop("", [])
    return found or {"train": unnamed}


def _chosen(by_split: dict[str, list[Path]], split: str, place: str, path: str) -> list[Path]:
    chosen = by_split.get(split) or by_split.get(_known_name(split) or "")
    if chosen is None:
        raise DataError(
            f"{place} has no split {split!r}; it has: {', '.join(sorted(by_split))}. Write {path}@{min(by_split)}, "
            f"for instance."
        )
    kinds = {EXTENSIONS[file.suffix.lower()] for file in chosen}
    if len(kinds) > 1:
        names = ", ".join(str(file) for file in chosen[:6])
        raise DataError(f"{place}: split {split!r} mixes file types: {names}. Name the files to read, as *.jsonl.")
    return chosen


def _read_files(files: list[Path], source: str) -> Rows:
    kind = EXTENSIONS.get(files[0].suffix.lower())
    if kind is None:
        raise DataError(f"{files[0]}: unknown kind of data file; readable are {', '.join(sorted(EXTENSIONS))}.")
    if kind == "parquet":
        table = read_parquet(files)
        return Rows(table, table.column_names, source, files)
    if kind == "jsonl":
        lines = JsonLines(files)
        return Rows(lines, lines.columns, source, files)
    rows = [row for path in files for row in (read_json(path) if kind == "json" else read_csv(path))]
    return Rows(rows, list(dict.fromkeys(key for row in rows for key in row)), source, files)


def _read_saved(folder: Path, split: str | None, source: str) -> Rows | None:
    """Rows of a folder that `save_to_disk` wrote; None if it is no such folder."""
    split = split or "train"
    has_splits = (folder / "dataset_dict.json").is_file()
    if has_splits:
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        if split not in splits:
            raise DataError(f"folder {folder} has no split {split!r}; it has: {', '.join(splits)}.")
        folder = folder / split
    if not (folder / "state.json").is_file():
        return None
    import datasets

    try:
        dataset = datasets.Dataset.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(f"{source}: cannot read the data set saved in {folder}: {error}") from error
    if not has_splits and split != "train" and _known_name(split) != _known_name(str(dataset.split)):
        raise DataError(
            f"{source}: {folder} is one data set, which has no split {split!r}. Write {folder} for all of its rows, or "
            f"a part as {folder}@[:90%] and {folder}@[90%:]."
        )
    return rows_of(dataset, source)


def _read_configuration(folder: Path, subset: str, split: str | None, source: str) -> Rows:
    import datasets

    try:
        by_split = datasets.load_dataset_builder(str(folder), subset).config.data_files or {}
    except Exception as error:
        raise DataError(
            f"{source}: {folder} has no folder {subset!r}, and as a configuration of its README.md it cannot be read: "
            f"{error}"
        ) from error
    found = {str(name): [Path(file) for file in files] for name, files in by_split.items()}
    return _read_files(_chosen(found, split or "train", f"{folder}:{subset}", f"{folder}:{subset}"), source)


def rows_of(dataset: Dataset, source: str) -> Rows:
    """The rows of a table that `datasets` holds on disk, pictures not decoded."""
    # The path of a cached table holds the hash of the files, or of the hub's revision, that it was made from.
    files = [Path(file["filename"]) for file in dataset.cache_files]
    # `set_format` is saved too, and would give tensors or arrays, of some columns alone.
    return Rows(undecoded(dataset.with_format(None)), dataset.column_names, source, files)
