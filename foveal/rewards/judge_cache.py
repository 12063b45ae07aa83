"""Replies of a judge on disk, by the whole request: one SQLite file that several processes may share."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Any

from foveal.rewards.judge_client import Reply


class ReplyCache:
    """Replies by address and request; another model, picture, prompt or temperature is another request."""

    def __init__(self, file: str) -> None:
        path = Path(file).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(path, timeout=30, isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS replies "
            "(request TEXT PRIMARY KEY, text TEXT NOT NULL, input_tokens INTEGER, output_tokens INTEGER)"
        )

    def get(self, address: str, request: dict[str, Any]) -> Reply | None:
        found = self._database.execute(
            "SELECT text, input_tokens, output_tokens FROM replies WHERE request = ?", (_digest(address, request),)
        ).fetchone()
        return Reply(*found) if found else None

    def put(self, address: str, request: dict[str, Any], reply: Reply) -> None:
        row = (_digest(address, request), reply.text, reply.input_tokens, reply.output_tokens)
        self._database.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?)", row)


def _digest(address: str, request: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps([address, request], sort_keys=True).encode()).hexdigest()
