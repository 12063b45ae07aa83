"""`foveal check`, the data: every row looked at, pictures of some decoded, and prompts shown as they will be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from foveal.check.findings import Finding, in_order, in_two
from foveal.check.kinds import Faults
from foveal.check.page import Shown, show, write_page
from foveal.check.pictures import PictureCheck
from foveal.check.rows import Seen, TextCheck, spread
from foveal.config import Config
from foveal.config.schema_data import DataConfig
from foveal.data.images import PictureError
from foveal.data.length_cache import Lengths
from foveal.data.processing import Processing
from foveal.data.prompts import PromptBuilder
from foveal.data.source import open_rows, split_weight
from foveal.data.survey import look_at_rows
from foveal.errors import DataError, FovealError
from foveal.preflight import open_processing
from foveal.track import console

DECODED = 1000
"""Rows whose pictures are decoded, unless told otherwise."""
THREADS = 8
ON_PAGE = 24
"""Sound rows on the page of each source, and as many with a fault."""
IN_TERMINAL = 2
REPAIR = "Repair or replace the file, correct data.image_dir, or leave the row out"
# What differs between two messages of one kind: names, paths, numbers.
VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\([^()]*\)|\S*/\S*|\d+|(?<=image)s|(?<=mark)s|(?<=video)s")


@dataclass
class Looked:
    """What was found in one source.

    Attributes:
        usable: rows that a run would take.
        lines: the account.
        builder: of its prompts; None where the source cannot be read.
    """

    findings: list[Finding]
    usable: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    builder: PromptBuilder | None = None


def check_data(
    config: Config,
    rows: int = DECODED,
    page: Path | None = None,
    say: Callable[[str], None] = console.note,
    *,
    processing: Processing | None = None,
) -> list[Finding]:
    """Looks at every row of `data.train_files` and `data.val_files`; needs the model's processor, but no weights.

    Args:
        rows: how many rows of each source have their pictures decoded, evenly spread.
        page: an HTML file to write, with prompts and their pictures.
        say: takes the lines of the account: counts, lengths, and two prompts in full.
        processing: the model's, where it is open already.

    Raises:
        ModelError: the model has no processor, or its family is not known.
        DataError: the page cannot be written.
    """
    processing = processing or open_processing(config)
    findings: list[Finding] = []
    lines: list[str] = []
    shown: list[Shown] = []
    trained: Seen = {}
    for split in ("train", "val"):
        sources = config.data.train_files if split == "train" else config.data.val_files
        seen: Seen = trained if split == "train" else {}
        usable = 0.0
        for spec in [sources] if isinstance(sources, str) else sources or []:
            source, weight = split_weight(spec)
            looked = _look_at_source(config, processing, source, split, seen, trained, rows)
            shown += _show(looked, ON_PAGE if page is not None else IN_TERMINAL)
            usable += len(looked.usable) * weight
            findings += looked.findings
            lines += looked.lines
            for line in looked.lines:
                say(line)
        if sources and split == "train" and not any(finding.level == "error" for finding in findings):
            findings += _too_few(config, round(usable))
    for one in [one for one in shown if not one.faults][:IN_TERMINAL]:
        say(one.text())
    findings = in_order(findings)
    if page is not None:
        write_page(page, shown, findings, lines)
    return findings


def _look_at_source(
    config: Config, processing: Processing, source: str, split: str, seen: Seen, trained: Seen, rows: int
) -> Looked:
    data = config.data
    subject = _subject(data, source, split)
    try:
        builder = PromptBuilder(data, processing, open_rows(data, source))
    except DataError as error:
        return Looked([Finding("error", subject, *in_two(error))])
    lengths, broken = look_at_rows(builder, split)
    faults = Faults()
    for row, fault in broken.items():
        _add_error(faults, row, fault, config)
    checked = [row for row in range(len(builder.rows)) if row not in broken]
    pictures = PictureCheck(data.image_dir, processing, faults)
    _look_inside(builder, checked, faults, pictures, seen, trained)
    with_media = [row for row in checked if lengths.images[row] or lengths.videos[row]]
    decoded = spread(with_media, rows)
    undecodable = _undecodable(builder, decoded, split)
    for row, fault in undecodable.items():
        _add_error(faults, row, fault, config)
    too_long = np.flatnonzero(lengths.tokens > data.max_prompt_length).tolist()
    findings = [
        *faults.findings(subject),
        *_too_long(config, lengths, too_long, subject),
        *_no_pictures(builder, subject),
    ]
    usable = [row for row in checked if row not in undecodable and lengths.tokens[row] <= data.max_prompt_length]
    lines = [
        f"{split}: {len(builder.rows)} rows of {source}, {len(usable)} of them usable",
        *_statistics(config, lengths, usable, pictures),
    ]
    if len(decoded) < len(with_media):
        lines.append(
            f"  pictures of {len(decoded)} of {len(with_media)} rows decoded; --rows {len(with_media)}: of all"
        )
    return Looked(findings, usable, lines, builder)


def _subject(data: DataConfig, source: str, split: str) -> str:
    """The key, and where it names several sources, which one: rows are counted in each from 0."""
    sources = data.train_files if split == "train" else data.val_files
    several = isinstance(sources, list) and len(sources) > 1
    return f"data.{split}_files ({source})" if several else f"data.{split}_files"


def _look_inside(
    builder: PromptBuilder, rows: list[int], faults: Faults, pictures: PictureCheck, seen: Seen, trained: Seen
) -> None:
    text = TextCheck(builder.data, builder.processing, faults, seen, trained if trained is not seen else {})
    with console.phase("looking into the rows", len(rows)) as advance:
        for row in rows:
            draft = builder.draft(row)
            text.look(draft, builder.rows.place(row))
            pictures.look(draft)
            advance(1)
    text.finish()


def _undecodable(builder: PromptBuilder, rows: Sequence[int], split: str) -> dict[int, FovealError]:
    """Why pictures of these rows cannot be decoded, by row."""

    def decode(row: int) -> FovealError | None:
        media = builder.draft(row).media
        try:
            if any(medium.kind == "video" for medium in media):
                builder.build(row, "check")
            else:  # half the time
                builder.processing.pictures([medium.read() for medium in media])
        except FovealError as error:
            return error
        return None

    found: dict[int, FovealError] = {}
    with ThreadPoolExecutor(THREADS) as pool, console.phase(f"{split}: decoding pictures", len(rows)) as advance:
        for row, error in zip(rows, pool.map(decode, rows), strict=True):
            if error is not None:
                found[row] = error
            advance(1)
    return found


def _add_error(faults: Faults, row: int, error: FovealError, config: Config) -> None:
    text, cure = in_two(error)
    if isinstance(error, PictureError):
        skipped = config.data.on_bad_row == "skip"
        cure = f"{REPAIR}{'; a run leaves it out (data.on_bad_row=skip)' if skipped else ''}"
        faults.add_other(VARIABLE.sub("*", text), row, "warning" if skipped else "error", text, cure)
    else:
        faults.add_other(VARIABLE.sub("*", text), row, "error", text, cure)


def _too_long(config: Config, lengths: Lengths, rows: list[int], subject: str) -> list[Finding]:
    if not rows:
        return []
    data, longest = config.data, max(rows, key=lambda row: int(lengths.tokens[row]))
    images = int(lengths.images[longest])
    text = (
        f"{len(rows)} of {len(lengths.tokens)} rows {'is' if len(rows) == 1 else 'are'} longer than "
        f"data.max_prompt_length={data.max_prompt_length} tokens; the longest, row {longest}, has "
        f"{lengths.tokens[longest]}, with {images} image{'' if images == 1 else 's'}"
    )
    cure = "Raise data.max_prompt_length or lower data.max_pixels"
    if data.filter_overlong_prompts:
        return [Finding("warning", subject, text, f"{cure}; a run leaves such rows out", tuple(rows))]
    return [Finding("error", subject, text, f"{cure}, or set data.filter_overlong_prompts=true", tuple(rows))]


def _too_few(config: Config, usable: int) -> list[Finding]:
    data = config.data
    batch = max(data.rollout_batch_size, data.mini_rollout_batch_size or 0)
    if usable >= batch:
        return []
    text = f"{usable} usable rows, and a batch takes {batch}"
    cure = "Lower it to at most the number of rows, and worker.actor.global_batch_size to a divisor of it; or add rows"
    return [Finding("error", "data.rollout_batch_size", text, cure)]


def _no_pictures(builder: PromptBuilder, subject: str) -> list[Finding]:
    """A column that looks like pictures, when the one of the configuration is not there."""
    data, rows = builder.data, builder.rows
    try:
        row = rows[0]
    except DataError:
        return []
    if {data.image_key, data.video_key} & {*rows.columns, *row}:  # a chat's own pictures are in the row alone
        return []
    named = [column for column in rows.columns if re.search("image|picture|photo|video", column, re.IGNORECASE)]
    held = [column for column, value in row.items() if column in named or _looks_like_picture(value)]
    if not held:
        return []
    text = f"no row has pictures in {data.image_key!r} (data.image_key), and the column {held[0]!r} looks like it"
    return [Finding("warning", subject, text, f"Set data.image_key={held[0]}")]


def _looks_like_picture(value: object) -> bool:
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, dict):
        return isinstance(value.get("bytes"), bytes)
    return isinstance(value, bytes) or (
        isinstance(value, str)
        and bool(re.fullmatch(r"\S+\.(png|jpe?g|webp|gif|bmp)|data:image/.*", value, re.IGNORECASE))
    )


def _statistics(config: Config, lengths: Lengths, usable: list[int], pictures: PictureCheck) -> Iterable[str]:
    if not usable:
        return
    tokens, images, videos = lengths.tokens[usable], lengths.images[usable], lengths.videos[usable]
    yield (
        f"  tokens of a prompt: median {np.median(tokens):.0f}, 95 % up to {np.quantile(tokens, 0.95):.0f}, "
        f"longest {tokens.max()} (data.max_prompt_length={config.data.max_prompt_length})"
    )
    if videos.any():
        yield f"  videos: {videos.sum()} in {np.count_nonzero(videos)} rows, at most {videos.max()} in one"
    if not images.any():
        return
    sizes = np.array(pictures.sizes)
    height, width = np.median(sizes, axis=0)
    largest = sizes[np.argmax(sizes.prod(axis=1))]
    yield (
        f"  images: {images.sum()} in {np.count_nonzero(images)} rows, at most {images.max()} in one; median size "
        f"{width:.0f}x{height:.0f}, largest {largest[1]}x{largest[0]}, {pictures.tokens / len(sizes):.0f} tokens each"
    )


def _show(looked: Looked, most: int) -> list[Shown]:
    """Rows with a fault, and as many without."""
    faults: dict[int, list[tuple[str, str]]] = {}
    for finding in looked.findings:
        for row in finding.rows:
            faults.setdefault(row, []).append((finding.level, finding.text))
    sound = [row for row in looked.usable if row not in faults]
    rows = [*sorted(faults)[:most], *spread(sound, most)]
    return [show(looked.builder, row, faults.get(row, [])) for row in rows] if looked.builder is not None else []
