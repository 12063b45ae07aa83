"""LLaMA-Factory's dataset_info.json: where its named data sets lie, and in which columns."""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from foveal.data.hub import uses_modelscope
from foveal.data.layouts import ALPACA, Layout
from foveal.data.messages import ROLES
from foveal.errors import DataError

REGISTRY = "dataset_info.json"
TAGS = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "system_tag": "system"}


@dataclass(frozen=True)
class Entry:
    """One entry.

    Attributes:
        source: a path or hub id, with the subset.
        part: `@split`, or "".
        most_rows: take only the first so many; None: all.
    """

    source: str
    part: str
    most_rows: int | None
    layout: Layout


def read_entry(path: Path, name: str | None) -> Entry:
    """The entry `name` of a dataset_info.json.

    Raises:
        DataError: no such entry, or one that leads to something else than rows of prompts and answers.
    """
    try:
        entries = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path} as JSON: {error}.") from error
    named = entries if isinstance(entries, dict) else {}
    entries = {key: value for key, value in named.items() if isinstance(value, dict)}
    if name not in entries:
        near = get_close_matches(name or "", entries, 1, cutoff=0.5) or list(entries)[:1] or ["NAME"]
        raise DataError(
            f"{path} has {f'no entry {name!r}' if name else 'several data sets, and none is named'}. Write "
            f"{path}:{near[0]}; it has: {', '.join(list(entries)[:20])}{', …' if len(entries) > 20 else ''}."
        )
    entry, place = entries[name], f"{path}, entry {name!r}"
    if entry.get("ranking"):
        raise DataError(f"{place} holds pairs of better and worse answers (ranking), not prompts with an answer.")
    layout = _layout(entry, path.parent, place)
    return Entry(*_place(entry, path.parent, place), entry.get("num_samples"), layout)


def _place(entry: dict[str, Any], folder: Path, place: str) -> tuple[str, str]:
    split = f"@{entry['split']}" if entry.get("split") else ""
    if entry.get("file_name"):
        return str(folder / entry["file_name"]), split
    hub = "ms_hub_url" if uses_modelscope() and entry.get("ms_hub_url") else "hf_hub_url"
    if not entry.get(hub):
        raise DataError(f"{place} has neither file_name nor {hub}; other places are not read.")
    return f"{entry[hub]}:{entry['subset']}" if entry.get("subset") else entry[hub], split


def _layout(entry: dict[str, Any], folder: Path, place: str) -> Layout:
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    formatting = entry.get("formatting", "alpaca")
    if formatting == "alpaca":
        return Layout("alpaca", {**ALPACA, **columns}, folder=folder)
    if formatting not in ("sharegpt", "openai"):
        raise DataError(f"{place} has the formatting {formatting!r}; known are alpaca, sharegpt and openai.")
    return Layout(
        "sharegpt",
        {"messages": "conversations", **columns},
        role_key=tags.get("role_tag"),
        content_key=tags.get("content_tag"),
        roles={**ROLES, **{tags[tag]: role for tag, role in TAGS.items() if tag in tags}},
        folder=folder,
    )
