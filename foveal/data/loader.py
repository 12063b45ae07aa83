"""The order in which rows become prompts: epochs, shuffling, skipping what cannot be read, exact resumption."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from foveal.data.ahead import start_ahead
from foveal.data.images import PictureError
from foveal.data.prompts import PromptBuilder
from foveal.data.source import open_rows
from foveal.data.survey import left_out, report, survey
from foveal.errors import DataError
from foveal.track.console import note
from foveal.types import Prompt

if TYPE_CHECKING:
    from foveal.config import Config
    from foveal.data.processing import Processing


THREADS = min(16, os.cpu_count() or 1)
AHEAD_THREADS = min(4, THREADS)
"""Few, because they share the interpreter with the thread that drives the device; a step leaves them time enough."""


class PromptLoader:
    """Prompts of the usable rows of one source, batch by batch.

    A row whose picture turns out to be damaged when it is decoded is reported once with its reason and left out from
    then on (or ends the run, with `data.on_bad_row: stop`); the next row takes its place.

    While a batch is in use, the one that will probably follow is built in the background. Only building happens there:
    which rows are taken or skipped is decided, and errors are raised, when the batch is asked for.

    Args:
        usable: numbers of the rows to take from.
        most_images: how many a prompt of these rows has at most.

    Attributes:
        skipped: reason by row number, of the rows left out since the loader was opened.
        left_out: the reasons of those that were left out when it was opened.
    """

    def __init__(
        self,
        builder: PromptBuilder,
        usable: Sequence[int],
        split: Literal["train", "val"],
        *,
        most_images: int = 0,
        left_out: Sequence[str] = (),
    ) -> None:
        self.builder = builder
        self.left_out = left_out
        self._account: Path | None = None
        self.split = split
        self.most_images = most_images
        self.skipped: dict[int, str] = {}
        self._usable = list(usable)
        self._digest = f"{zlib.crc32(np.asarray(self._usable, dtype=np.int64).tobytes()):08x}"
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)
        self._ahead: dict[tuple[int, int], Future[Prompt]] = {}  # by row and epoch

    def __len__(self) -> int:
        """Usable rows; fewer once damaged ones have been met."""
        return len(self._usable) - len(self.skipped)

    def steps_per_epoch(self, batch: int) -> int:
        """Whole batches in an epoch."""
        return len(self) // batch

    def keep_account(self, path: Path) -> None:
        """Adds a line to a JSONL file for each row that is left out, those until now and those to come."""
        self._account = path
        for reason in [*self.left_out, *self.skipped.values()]:
            self._write_down(reason)

    def _write_down(self, reason: str) -> None:
        if self._account is not None:
            # A file's name may hold bytes that are no UTF-8; their escapes are those of JSON.
            with self._account.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(json.dumps({"split": self.split, "reason": reason}, ensure_ascii=False) + "\n")

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts. What is left of an epoch is dropped when it is not enough.

        Raises:
            DataError: the whole set has fewer rows than that, or a row is wrong.
        """
        while True:
            self.require(count)
            if len(self._order) - self._position >= count:
                prompts, self._position = self._fill(self._order, self._position, count, self._epoch)
                if len(prompts) == count:
                    self._prepare(*self._expected(count))
                    return prompts
            self._epoch += 1
            self._position = 0
            self._order = self._order_of(self._epoch)

    def batches(self) -> Iterator[list[Prompt]]:
        """All prompts once, unshuffled, `data.val_batch_size` at a time (-1: all at once); the last may be fewer."""
        limit = self.builder.data.val_batch_size
        limit = limit if limit > 0 else len(self._usable)
        position = 0
        while position < len(self._usable):
            prompts, position = self._fill(self._usable, position, limit, 0)
            if prompts:
                self._prepare(self._unskipped(self._usable, position, limit), 0)
                yield prompts
        self.require(1)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as plain JSON."""
        data = self.builder.data
        order = {"rows": len(self._usable), "shuffle": data.shuffle, "seed": data.seed, "usable": self._digest}
        return {"epoch": self._epoch, "position": self._position, **order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from where `state_dict` was taken.

        Raises:
            DataError: the rows or their order are not the same, so that going on would repeat or leave out rows.
        """
        now = self.state_dict()
        changed = [
            f"{key} was {state[key]}, is {now[key]}"
            for key in ("rows", "shuffle", "seed", "usable")
            if state.get(key, now[key]) != now[key]
        ]
        if changed:
            raise DataError(
                f"cannot resume in the middle of {self.builder.rows.source}: {'; '.join(changed)} (rows counts usable "
                "ones, usable tells them apart). Resume with the data and settings of the checkpoint, or begin the "
                "rows anew with trainer.restart_data=true."
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    def rebuild(self, uid: str) -> Prompt:
        """The prompt that `take` gave under this uid.

        Raises:
            DataError: its row or a picture cannot be read any more.
        """
        return self.builder.build(int(uid.rpartition("-")[2]), uid)

    def _fill(self, order: list[int], position: int, count: int, epoch: int) -> tuple[list[Prompt], int]:
        """Up to `count` prompts of the rows from `position` on, and the position after the last row that was read."""
        prompts: list[Prompt] = []
        with ThreadPoolExecutor(min(THREADS, count)) as pool:  # decoding and processing pictures free the interpreter
            while len(prompts) < count and position < len(order):
                rows = order[position : position + count - len(prompts)]
                built = pool.map(lambda row: self._prompt(row, epoch), rows)
                prompts += [prompt for prompt in built if prompt is not None]
                position += len(rows)
        return prompts, position

    def _prompt(self, row: int, epoch: int) -> Prompt | None:
        if row in self.skipped:
            return None
        try:
            return self._take_or_build(row, epoch)
        except PictureError as error:
            if self.builder.data.on_bad_row == "stop":
                raise DataError(
                    f"{error}. Repair the picture, or set data.on_bad_row=skip to leave its row out."
                ) from error
            self.skipped[row] = str(error)
            self._write_down(str(error))
            note(f"{self.split}: skipped {error} (skipped so far: {len(self.skipped)})")
            return None

    def _take_or_build(self, row: int, epoch: int) -> Prompt:
        ahead = self._ahead.pop((row, epoch), None)
        if ahead is None or ahead.cancel():  # cancelled: it was still waiting for one of the few threads
            return self._build((row, epoch))
        prompt = ahead.result()
        self.builder.processing.features(prompt)  # made again if they had no room while it waited
        return prompt

    def _build(self, key: tuple[int, int]) -> Prompt:
        row, epoch = key
        return self.builder.build(row, f"{self.split}-{epoch}-{row}")

    def _prepare(self, rows: list[int], epoch: int) -> None:
        """Starts building the prompts of these rows, instead of whatever else was prepared."""
        for future in self._ahead.values():
            future.cancel()
        self._ahead = start_ahead(self._build, [(row, epoch) for row in rows], AHEAD_THREADS)

    def _expected(self, count: int) -> tuple[list[int], int]:
        """The rows, and their epoch, that the next `take` returns unless it meets a damaged picture."""
        rows = self._unskipped(self._order, self._position, count)
        if len(rows) == count:
            return rows, self._epoch
        return self._unskipped(self._order_of(self._epoch + 1), 0, count), self._epoch + 1

    def _unskipped(self, order: list[int], position: int, count: int) -> list[int]:
        return list(islice((row for row in islice(order, position, None) if row not in self.skipped), count))

    def _order_of(self, epoch: int) -> list[int]:
        if not self.builder.data.shuffle or self.split == "val":
            return self._usable
        order = np.random.default_rng((self.builder.data.seed, epoch)).permutation(len(self._usable))
        return [self._usable[index] for index in order]

    def require(self, count: int) -> None:
        """Raises DataError if fewer than `count` rows are usable."""
        if len(self) >= count:
            return
        first = f" First unreadable picture: {next(iter(self.skipped.values()))}." if self.skipped else ""
        key, others = (
            "data.rollout_batch_size",
            "and worker.actor.global_batch_size (and data.mini_rollout_batch_size) ",
        )
        if self.split == "val":
            key, others = "data.val_batch_size", ""
        raise DataError(
            f"{self.builder.rows.source} has {len(self)} usable rows, and a batch takes {count}.{first} Lower {key} "
            f"{others}to at most the number of rows, or add rows."
        )


def open_loader(config: Config, processing: Processing, split: Literal["train", "val"]) -> PromptLoader:
    """Reads `data.train_files` or `data.val_files`, looks at every row, and says in a line or two what is used.

    Raises:
        DataError: the source, a row or a picture is wrong, or there are fewer rows than a batch takes.
        ModelError: there are pictures and the model takes text only.
    """
    data = config.data
    spec = data.train_files if split == "train" else data.val_files
    if not spec:
        raise DataError(f"data.{split}_files is not set. Give a file, a folder or a hub id, as PATH_OR_HUB_ID@split.")
    rows = open_rows(data, spec)
    builder = PromptBuilder(data, processing, rows)
    found = survey(builder, split)
    for line in report(found, data, rows, split):
        note(line)
    reasons = left_out(found, data, rows)
    loader = PromptLoader(builder, found.usable, split, most_images=found.most_images, left_out=reasons)
    if split == "train":
        loader.require(max(data.rollout_batch_size, data.mini_rollout_batch_size or 0))
    return loader
