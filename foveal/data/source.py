"""Where rows come from: local files, folders and globs, web addresses, and data sets of a hub.

A source is written `PATH_OR_HUB_ID@split`, and `*WEIGHT` after it where it is mixed with others. A path that exists is
always read locally, without a network attempt. Pictures stay as they are stored; nothing here decodes one.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foveal.data.download import fetch, is_url
from foveal.data.files import EXTENSIONS
from foveal.data.folders import read_file, read_folder, read_glob
from foveal.data.hub import read_hub
from foveal.data.layouts import Layout, apply_layout, guess_layout
from foveal.data.registry import REGISTRY, read_entry
from foveal.data.rows import Mixture, Rows
from foveal.errors import DataError

if TYPE_CHECKING:
    from foveal.config.schema_data import DataConfig

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
SPLIT = re.compile(r"(?P<name>[\w.-]+)?(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")
WEIGHT = re.compile(r"(?P<source>.+)\*(?P<weight>\d+\.?\d*|\.\d+)", re.DOTALL)


@dataclass(frozen=True)
class Spec:
    """A source taken apart.

    Attributes:
        path: a local path or glob if `local`, else an http(s) address or a hub id.
        split: None where none is named.
        start, stop: as in `split[10%:20%]`.
    """

    path: str
    local: bool
    subset: str | None = None
    split: str | None = None
    start: str | None = None
    stop: str | None = None

    @property
    def part(self) -> str:
        """The split and slice, as they were written."""
        bounds = f"[{self.start or ''}:{self.stop or ''}]" if self.start or self.stop else ""
        return f"@{self.split or ''}{bounds}" if self.split or bounds else ""


def open_rows(data: DataConfig, sources: str | Sequence[str]) -> Rows:
    """Opens what `data.train_files` or `data.val_files` names, each row with the columns that `data` expects.

    Several sources become one table, in their order; `*2` after a source takes each of its rows twice in an epoch,
    `*0.5` half of them. Rows in LLaMA-Factory's layouts get a prompt and an answer (`layouts`).

    Raises:
        DataError: a source cannot be read, or has neither the columns that `data` names nor a layout that is known.
    """
    parts = []
    for source in [sources] if isinstance(sources, str) else sources:
        path, weight = split_weight(source)
        spec = parse_spec(path)
        if spec.local and Path(spec.path).name == REGISTRY:
            entry = read_entry(Path(spec.path), spec.subset)
            rows = load_rows(entry.source + (spec.part or entry.part), allow_urls=data.allow_urls)
            if entry.most_rows is not None:
                rows.cut(0, entry.most_rows)
            rows.source = path
            layout: Layout | None = entry.layout
        else:
            rows = load_rows(path, allow_urls=data.allow_urls)
            layout = guess_layout(rows, data)
        if layout is not None:
            apply_layout(layout, rows, data)
        rows.require(data.prompt_key, "data.prompt_key")
        rows.require(data.answer_key, "data.answer_key")
        parts.append((rows, weight))
    if not parts:
        raise DataError("the list of sources is empty. Give a file, a folder or a hub id, as PATH_OR_HUB_ID@split.")
    return parts[0][0] if len(parts) == 1 and parts[0][1] == 1 else Mixture(parts)


def load_rows(spec: str, *, allow_urls: bool = False) -> Rows:
    """Opens `PATH_OR_HUB_ID@split`.

    `spec` is a data file (`files.EXTENSIONS`), a folder or glob of such files, an http(s) address of one, or a hub id,
    followed by `@split` (default `train`; a single file has one split). `:subset` before the split takes one subset of
    a hub data set or folder, and `split[:100]`, `split[10%:]` a part. CSV cells are strings; JSON keeps each row's own
    types.

    Raises:
        DataError: nothing is there, the split is unknown, a line is broken, or there are no rows; or an address, and
            not `allow_urls`.
    """
    parsed = parse_spec(spec)
    try:
        rows = _read(parsed, spec, allow_urls)
    except OSError as error:
        raise DataError(f"cannot read {spec}: {error.strerror or error} ({error.filename or parsed.path}).") from error
    total = len(rows)
    rows.cut(_bound(parsed.start, total, 0), _bound(parsed.stop, total, total))
    if not len(rows):
        raise DataError(f"{spec} has no rows" + (f" (the whole split has {total})." if total else "."))
    return rows


def _read(spec: Spec, source: str, allow_urls: bool) -> Rows:
    if is_url(spec.path):
        if not allow_urls:
            raise DataError(
                f"{source} is a web address, and nothing is downloaded from those unless data.allow_urls=true. Set it, "
                f"or give the hub id (owner/name) or a local path."
            )
        return read_file(fetch(spec.path), spec.split, source)
    if not spec.local:
        return read_hub(spec.path, spec.subset, spec.split, source)
    path = Path(spec.path)
    if glob.has_magic(spec.path) and not _exists(spec.path):
        return read_glob(spec.path, spec.split, source)
    if path.is_dir():
        return read_folder(path, spec.subset, spec.split, source)
    if path.is_file():
        return read_file(path, spec.split, source)
    # A pipe would be waited for and could not be read twice.
    raise DataError(f"{source} is neither a file nor a folder. Write the rows to a file first.")


def split_weight(source: str) -> tuple[str, float]:
    """`a.jsonl@train*2` → (`a.jsonl@train`, 2.0); the weight is 1 where none is written."""
    match = None if _exists(source) else WEIGHT.fullmatch(source)
    return (match["source"], float(match["weight"])) if match else (source, 1.0)


def parse_spec(spec: str) -> Spec:
    """Takes `PATH_OR_HUB_ID[:subset][@split]` apart; a path that exists as written has no split in it."""
    if _exists(spec):
        return Spec(str(Path(spec).expanduser()), True)
    path, _, split = spec.rpartition("@") if "@" in spec else (spec, "", "")
    match = SPLIT.fullmatch(split)
    if match is None and is_url(spec):  # https://user@server/…
        return Spec(spec, False)
    if match is None:
        raise DataError(
            f"{spec}: cannot read the split {split!r}; write `train`, `train[:100]` or `train[10%:20%]`. Several "
            f"sources are a list, one string for each."
        )
    part = match["name"], match["start"], match["stop"]
    if is_url(path):
        return Spec(path, False, None, *part)
    if "://" in path:
        raise DataError(f"{spec} is an address of no known kind; give http(s)://…, owner/name or a local path.")
    outer, _, subset = path.rpartition(":")
    if path and (_exists(path) or glob.has_magic(path)):
        return Spec(str(Path(path).expanduser()), True, None, *part)
    if outer and subset and _exists(outer):
        return Spec(str(Path(outer).expanduser()), True, subset, *part)
    hub_id, _, subset = path.partition(":")
    if HUB_ID.fullmatch(hub_id) is None or Path(hub_id).suffix in EXTENSIONS:
        raise DataError(
            f"no file or folder {path} (looked for from {Path.cwd()}), and it does not look like a hub id "
            f"(`owner/name`). Correct the path in data.train_files / data.val_files."
        )
    return Spec(hub_id, False, subset or None, *part)


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
