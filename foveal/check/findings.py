"""What `foveal check` finds: one record per kind of fault, with the rows it concerns and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from foveal.errors import FovealError

Level = Literal["error", "warning", "note"]
_ORDER: dict[Level, int] = {"error": 0, "warning": 1, "note": 2}
_ROWS_NAMED = 20
REWARD = "reward function"
"""The subject of what is found in its scores."""


@dataclass(frozen=True)
class Finding:
    """One thing found before the run.

    `level`: "error" stops a run or spoils it, "warning" costs something or is probably not meant, "note" is worth
    knowing. `subject`: what it is about, e.g. "data.train_files" or "reward function". `text`: what was found.
    `cure`: what to change. `rows`: positions in the data set, from 0; empty where no row is to blame.
    """

    level: Level
    subject: str
    text: str
    cure: str
    rows: tuple[int, ...] = ()


def in_two(error: FovealError) -> tuple[str, str]:
    """What is wrong, and what to do, of a message that says both."""
    text, _, cure = str(error).partition(". ")
    return text.removesuffix("."), cure.removesuffix(".") or "Correct it"


def name_rows(rows: Sequence[int]) -> str:
    """The rows in words, at most twenty of them: "row 3", "rows 3, 7 and 9", "rows 0, 1, … (500 rows)"."""
    if not rows:
        return ""
    if len(rows) == 1:
        return f"row {rows[0]}"
    if len(rows) > _ROWS_NAMED:
        return f"rows {', '.join(str(row) for row in rows[:_ROWS_NAMED])}, … ({len(rows)} rows)"
    return f"rows {', '.join(str(row) for row in rows[:-1])} and {rows[-1]}"


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, then warnings, then notes; within a level by the first row."""
    return sorted(findings, key=lambda finding: (_ORDER[finding.level], finding.rows[:1]))


def exit_code(findings: Iterable[Finding]) -> int:
    """1 where there is an error, else 0: for scripts."""
    return int(any(finding.level == "error" for finding in findings))
