"""How long each row's prompt is, from its text and its pictures' headers; in processes where that takes long."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from foveal.cluster.machines import machines
from foveal.data.media import MediaSize, refused_size
from foveal.data.prompts import PromptBuilder
from foveal.errors import FovealError

CHUNK = 256
THREADS = 8
"""Of a process, because opening pictures waits for the disk; the tokenizer has threads of its own."""
PIECE = 16
"""Rows that a thread takes at a time."""
TRIAL_SECONDS = 1.0
WORTH_SECONDS = 3.0
"""After the trial the rest goes to processes if it would take longer than this."""
STALLED_SECONDS = 120.0

FileStamp = tuple[str, int, int]
"""Path, bytes, and time of the last change in ns."""


@dataclass(frozen=True)
class Measured:
    """What was seen of a row.

    Attributes:
        tokens: of the expanded prompt; 0 where the row cannot be used.
        images, videos: how many it has.
        files: the files that they lie in.
        fault: why it cannot be used.
    """

    row: int
    tokens: int = 0
    images: int = 0
    videos: int = 0
    files: tuple[FileStamp, ...] = ()
    fault: FovealError | None = None


def measure(builder: PromptBuilder, rows: Sequence[int], pool: ThreadPoolExecutor) -> list[Measured]:
    """Looks at some rows, in order; what is wrong with one is its `fault`."""
    pieces = [rows[start : start + PIECE] for start in range(0, len(rows), PIECE)]
    seen = [one for piece in pool.map(lambda piece: [_look(builder, row) for row in piece], pieces) for one in piece]
    good = [one for one in seen if isinstance(one, _Good)]
    lengths = builder.processing.count_tokens([one.text for one in good], [one.sizes for one in good])
    measured = [replace(one.seen, tokens=length) for one, length in zip(good, lengths, strict=True)]
    return sorted([*measured, *(one for one in seen if isinstance(one, Measured))], key=lambda one: one.row)


def measure_all(builder: PromptBuilder, rows: Sequence[int], most_processes: int) -> Iterator[list[Measured]]:
    """Looks at all of `rows`, some at a time and in no order.

    It begins here, and goes on in processes when the first second shows that the rest would take longer than starting
    them is worth; where the run has joined a Ray cluster of several machines, in tasks on all of them.
    """
    chunks = deque(rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK))
    # Where the system doesn't say which processors are ours (macOS), forking is not safe either.
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [0]
    processes = min(most_processes, len(own))
    cluster = machines() if most_processes > 1 else []
    begin, done, inside = time.monotonic(), 0, False
    with ThreadPoolExecutor(THREADS) as pool:
        while chunks:
            found = measure(builder, chunks.popleft(), pool)
            inside = inside or any(one.images + one.videos and not one.files for one in found)
            yield found
            done += 1
            seconds = time.monotonic() - begin
            if (cluster or processes > 1) and seconds > TRIAL_SECONDS and seconds / done * len(chunks) > WORTH_SECONDS:
                break
    if chunks and cluster:
        from foveal.data.measure_cluster import measure_on_cluster

        # Pictures inside the rows take longer to send than to look at, and downloads would lie elsewhere.
        here_only = inside or builder.data.allow_urls
        yield from measure_on_cluster(builder, chunks, cluster, most_processes, here_only=here_only)
        processes = 1  # nothing is forked beside Ray's threads
    if chunks and processes > 1:
        yield from _measure_in_processes(builder, list(chunks), min(processes, len(chunks)))
    else:
        yield from _measure_here(builder, chunks)


def _measure_here(builder: PromptBuilder, chunks: Iterable[Sequence[int]]) -> Iterator[list[Measured]]:
    with ThreadPoolExecutor(THREADS) as pool:
        for chunk in chunks:
            yield measure(builder, chunk, pool)


@dataclass(frozen=True)
class _Good:
    """A row that lacks nothing but the number of its tokens."""

    seen: Measured
    text: str
    sizes: list[MediaSize]


def _look(builder: PromptBuilder, row: int) -> _Good | Measured:
    try:
        draft = builder.draft(row)
        files = tuple(stamp(file) for medium in draft.media for file in medium.files)
        sizes = draft.sizes()
        for size, medium in zip(sizes, draft.media, strict=True):
            try:
                builder.processing.visual_tokens(size)
            except ValueError as error:
                raise refused_size(medium.name, size, error) from error
        kinds = [medium.kind for medium in draft.media]
        seen = Measured(row, images=kinds.count("image"), videos=kinds.count("video"), files=files)
        return _Good(seen, draft.text, sizes)
    except FovealError as error:
        return Measured(row, fault=error)


def stamp(path: str | Path) -> FileStamp:
    """Changes when the file does; zeros where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return str(path), 0, 0
    return str(path), status.st_size, status.st_mtime_ns


def _measure_in_processes(
    builder: PromptBuilder, chunks: list[Sequence[int]], processes: int
) -> Iterator[list[Measured]]:
    """Each of the processes takes every `processes`-th chunk; what one leaves undone when it dies is done here.

    They are forked, as PyTorch's data loaders are: they share the rows and the tokenizer, and start at once.
    """
    context = multiprocessing.get_context("fork")
    left: dict[Connection, deque[Sequence[int]]] = {}
    children = []
    try:
        for number in range(processes):
            reader, writer = context.Pipe(duplex=False)
            left[reader] = deque(chunks[number::processes])
            child = context.Process(target=_child, args=(builder, list(left[reader]), writer, list(left)), daemon=True)
            with warnings.catch_warnings():  # Python 3.12 warns of forking beside threads
                warnings.simplefilter("ignore", DeprecationWarning)
                child.start()
            children.append(child)
            writer.close()
        readers = list(left)
        while readers:
            ready = wait(readers, STALLED_SECONDS)
            if not ready:  # a lock that another thread held at the fork
                for child in children:
                    child.kill()
            for reader in [one for one in readers if one in ready]:
                try:
                    found = reader.recv()
                except (EOFError, OSError):
                    readers.remove(reader)
                else:
                    left[reader].popleft()
                    yield found
    finally:
        for child in children:
            child.kill()
            child.join()
        for reader in left:
            reader.close()
    yield from _measure_here(builder, [chunk for own in left.values() for chunk in own])


def _child(builder: PromptBuilder, chunks: list[Sequence[int]], writer: Connection, readers: list[Connection]) -> None:
    import torch

    # The run's own handlers are inherited; Ctrl-C reaches the run, which ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Thread pools of the parent don't exist here.
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for reader in readers:  # so that writing fails, and this process ends, when the parent is gone
        reader.close()
    with suppress(BrokenPipeError), ThreadPoolExecutor(THREADS) as pool:
        for chunk in chunks:
            writer.send(measure(builder, chunk, pool))
