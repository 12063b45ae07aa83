"""The look at rows on the CPUs of all machines of a Ray cluster: tasks, each with some rows."""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from foveal.cluster.machines import Machine
from foveal.cluster.ray_cluster import passed_on
from foveal.data.images import PictureError
from foveal.data.measure import STALLED_SECONDS, THREADS, Measured, measure
from foveal.data.prompts import PromptBuilder
from foveal.data.rows import Row, Rows
from foveal.errors import FovealError
from foveal.track.console import note


def measure_on_cluster(
    builder: PromptBuilder,
    chunks: deque[Sequence[int]],
    machines: Sequence[Machine],
    most: int,
    *,
    here_only: bool,
) -> Iterator[list[Measured]]:
    """Looks at all rows of `chunks`, which it empties as far as it gets; what is left when tasks stall is the caller's.

    The rows themselves travel, so that their files need not lie on every machine. A picture that a task cannot read is
    looked at again here; if it can be read here, the rest stays on this machine. Ray tries the task of a machine that
    left on another one.

    Args:
        machines: this one first.
        most: tasks at a time on each.
        here_only: whether to begin with this machine alone.
    """
    shared = ray.put(_without_rows(builder))
    here = NodeAffinitySchedulingStrategy(machines[0].node, soft=False)
    remote: Any = ray.remote
    task = remote(num_cpus=1, runtime_env={"env_vars": passed_on()})(_look_there)
    pending: dict[Any, Sequence[int]] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            while chunks or pending:
                used = machines[:1] if here_only else machines
                if chunks and len(pending) < sum(min(most, machine.cpus) for machine in used):
                    rows = chunks.popleft()
                    placed = task.options(scheduling_strategy=here if here_only else "SPREAD")
                    pending[placed.remote([shared], os.getcwd(), SentRows.of(builder.rows, rows), rows)] = rows
                    continue
                ready = ray.wait(list(pending), timeout=STALLED_SECONDS)[0] if pending else []
                if not ready:  # other work has all CPUs, or this machine none
                    chunks.extendleft(pending.values())
                    return
                rows = pending.pop(ready[0])
                try:
                    found = ray.get(ready[0])
                except RayError as error:
                    here_only = here_only or _stay("a task failed", error)
                    found = measure(builder, rows, pool)
                else:
                    if unread := [one.row for one in found if _is_unread(one)]:
                        again = {one.row: one for one in measure(builder, unread, pool)}
                        if not all(map(_is_unread, again.values())):
                            here_only = here_only or _stay("other machines do not see all pictures")
                        found = [again.get(one.row, one) for one in found]
                yield found
        finally:
            for reference in pending:
                with suppress(RayError):
                    ray.cancel(reference, force=True)


@dataclass(frozen=True)
class SentRows:
    """As `Rows`, but only some.

    Attributes:
        found: by its number each row, or why it cannot be read, with its name and its place for messages.
    """

    source: str
    columns: list[str]
    found: dict[int, tuple[Row | FovealError, str, str]]

    @classmethod
    def of(cls, rows: Rows, numbers: Sequence[int]) -> SentRows:
        found = {number: (_read(rows, number), rows.name(number), rows.place(number)) for number in numbers}
        return cls(rows.source, rows.columns, found)

    def __getitem__(self, index: int) -> Row:
        row = self.found[index][0]
        if isinstance(row, FovealError):
            raise row
        return row

    def name(self, index: int) -> str:
        return self.found[index][1]

    def place(self, index: int) -> str:
        return self.found[index][2]


def _read(rows: Rows, number: int) -> Row | FovealError:
    try:
        return rows[number]
    except FovealError as error:
        return error


def _without_rows(builder: PromptBuilder) -> PromptBuilder:
    light = copy.copy(builder)
    light.rows = SentRows("", [], {})  # type: ignore[assignment]
    return light


_kept: tuple[str, PromptBuilder] | None = None


def _look_there(shared: list[Any], folder: str, rows: SentRows, numbers: Sequence[int]) -> list[Measured]:
    """The task. Its builder is a reference in a list, which Ray leaves as it is."""
    global _kept
    os.chdir(folder)  # where relative paths start
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if _kept is None or _kept[0] != shared[0].hex():  # a tokenizer takes a while to unpack
        _kept = shared[0].hex(), ray.get(shared[0])
    builder = copy.copy(_kept[1])
    builder.rows = rows  # type: ignore[assignment]
    with ThreadPoolExecutor(THREADS) as pool:
        return measure(builder, numbers, pool)


def _is_unread(one: Measured) -> bool:
    return isinstance(one.fault, PictureError)


def _stay(why: str, error: RayError | None = None) -> bool:
    detail = f": {str(error).strip().splitlines()[-1]}" if error else ""
    note(f"the rows are looked at on this machine alone: {why}{detail}")
    return True
