"""Every answer that is kept, in the run's folder, for pandas and for `foveal view`.

    samples/answers/val-00000020.parquet   the answers of one step and split, whole or not there at all
    samples/images/HASH.png                each picture once, as the data had it
    samples/tokens.jsonl                   {"id": 5, "text": " the"}: what the token ids in the answers mean

A part is written beside its place and renamed. A step that is done again, by a run that went on from an older
checkpoint, replaces its part, and the parts of later steps go with the first one that is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np

from foveal.track import console
from foveal.types import Group, Media, Prompt, Response

if TYPE_CHECKING:
    import pyarrow

FOLDER = "samples"
ANSWERS, IMAGES, TOKENS = f"{FOLDER}/answers", f"{FOLDER}/images", f"{FOLDER}/tokens.jsonl"
PART = re.compile(r"(train|val)-(\d{8})\.parquet")
ROW_GROUP = 256
"""Rows that a reader has to read together."""
LARGE_SHARE = 0.2
"""Of the free disk, that samples may take without a warning."""

Split: TypeAlias = Literal["train", "val"]
_SIGNATURES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"GIF8": "gif", b"BM": "bmp", b"RIFF": "webp"}


def part_name(split: str, step: int) -> str:
    """What `PART` matches."""
    return f"{split}-{step:08d}.parquet"


class Tokenizer(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: list[int]) -> Any: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> Any: ...


@cache
def schema() -> pyarrow.Schema:
    """The columns of a part; the per-token ones are null where nobody computed them."""
    import pyarrow as pa

    floats = pa.list_(pa.float32())
    return pa.schema(
        {
            "step": pa.int32(),  # whose weights answered; of a training answer, the step that it was sampled for
            "split": pa.string(),
            "row": pa.int32(),  # of the data set, from 0
            "uid": pa.string(),
            "group": pa.int32(),  # answers to one prompt have the same number within a part
            "answer": pa.int32(),  # number within the group
            "role": pa.string(),
            "overall": pa.float32(),
            "rewards": pa.map_(pa.string(), pa.float32()),
            "advantage": pa.float32(),  # mean over the answer's tokens
            "length": pa.int32(),  # tokens
            "finish_reason": pa.string(),
            "prompt": pa.string(),
            "response": pa.string(),
            "ground_truth": pa.string(),
            "images": pa.list_(pa.string()),  # names of files in samples/images; "" for what is not kept
            "media": pa.list_(pa.string()),  # where they came from
            "token_ids": pa.list_(pa.int32()),
            "logprobs": floats,  # the engine's
            "trainer_logprobs": floats,
            "entropies": floats,  # nats
        }
    )


class SampleFiles:
    """Writes the samples of a run. What cannot be written is one warning, and the run goes on without samples.

    Args:
        run_dir: the run's folder.
        tokenizer: says what the prompts and tokens are.
        after: steps that were done before this process.

    Attributes:
        failed: whether something could not be written, after which nothing more is.
        written: bytes of what this process wrote.
    """

    def __init__(self, run_dir: Path, tokenizer: Tokenizer, after: int = 0) -> None:
        self.run_dir = run_dir
        self.tokenizer = tokenizer
        self._after: int | None = after
        self._seen = np.zeros(0, dtype=bool)
        self._images: set[str] = set()
        self._foreseen = False
        self.failed = False
        self.written = 0

    def part(self, split: Split, step: int) -> SamplePart:
        """An empty part, to which answers are added before it is written."""
        return SamplePart(self, split, step)

    def keep_media(self, media: Sequence[Media]) -> list[str]:
        """Stores pictures that are not there yet; returns their file names, "" for videos and unknown formats."""
        return [self._keep_image(medium.data) if medium.kind == "image" else "" for medium in media]

    def _keep_image(self, data: bytes) -> str:
        kind = next((kind for start, kind in _SIGNATURES.items() if data.startswith(start)), None)
        if kind is None:
            return ""
        name = f"{hashlib.sha256(data).hexdigest()[:32]}.{kind}"
        if name not in self._images:
            path = self.run_dir / IMAGES / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                _replace(path, data)
                self.written += len(data)
            self._images.add(name)
        return name

    def keep_tokens(self, ids: Sequence[np.ndarray]) -> None:
        """Adds what these tokens mean, where it is not known yet."""
        path = self.run_dir / TOKENS
        if not self._seen.size:
            self._seen = np.zeros(1, dtype=bool)
            self._note([token for token, _ in read_tokens(path)])
        flat = np.concatenate(ids) if ids else np.zeros(0, dtype=np.int64)
        new = [token for token in np.unique(flat).tolist() if token >= self._seen.size or not self._seen[token]]
        if not new:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="ascii", newline="\n") as file:
            # an empty line ends what a killed run may have left half written
            file.write("\n" + "".join(json.dumps(_meaning(token, self.tokenizer)) + "\n" for token in new))
        self._note(new)

    def _note(self, tokens: list[int]) -> None:
        highest = max(tokens, default=0)
        if highest >= self._seen.size:
            self._seen = np.concatenate([self._seen, np.zeros(highest + 1024 - self._seen.size, dtype=bool)])
        self._seen[tokens] = True

    def drop_later(self) -> None:
        """Removes, once, the parts of steps that this process is going to do again."""
        if self._after is None:
            return
        for path in (self.run_dir / ANSWERS).glob("*.parquet"):
            found = PART.fullmatch(path.name)
            if found and int(found[2]) > self._after:
                path.unlink(missing_ok=True)
        self._after = None

    def foresee(self, size: int, steps: int) -> None:
        """Says once what the samples of the steps that are left may take, where that is much of the free disk.

        Args:
            size: bytes of a step's.
        """
        if self._foreseen or self.failed or not size:
            return
        self._foreseen = True
        try:
            free = shutil.disk_usage(self.run_dir).free
        except OSError:
            return
        if size * steps > LARGE_SHARE * free:
            console.warn(
                f"answers and pictures of a training step take {size / 1e6:.1f} MB in {self.run_dir / FOLDER}, those "
                f"of the {steps:,} steps that are left up to {size * steps / 1e9:.1f} GB; {free / 1e9:.1f} GB are "
                "free. trainer.log_training_samples=8 keeps those of eight prompts a step, 0 none; files in "
                "samples/answers may be deleted at any time."
            )

    def give_up(self, error: Exception) -> None:
        """Says that samples can't be written; no more are."""
        self.failed = True
        console.warn(f"cannot write to {self.run_dir / FOLDER} ({error}); the run goes on without keeping samples.")


class SamplePart:
    """The answers of one step and split."""

    def __init__(self, files: SampleFiles, split: Split, step: int) -> None:
        self._files = files
        self.split = split
        self.step = step
        self._rows: list[dict[str, Any]] = []
        self._groups = 0

    def add(self, groups: Sequence[Group]) -> None:
        """Takes scored groups; their pictures are written now, so that they need not be kept in memory."""
        if self._files.failed:
            return
        try:
            for group in groups:
                shared = self._of_prompt(group.prompt)
                self._rows += [
                    {**shared, "answer": number, **_of_response(response)}
                    for number, response in enumerate(group.responses)
                ]
                self._groups += 1
        except OSError as error:
            self._files.give_up(error)

    def _of_prompt(self, prompt: Prompt) -> dict[str, Any]:
        return {
            "step": self.step,
            "split": self.split,
            "row": prompt.row_index,
            "uid": prompt.uid,
            "group": self._groups,
            "prompt": _text(self._files.tokenizer.decode(prompt.token_ids)),
            "ground_truth": _text(prompt.answer),
            "images": self._files.keep_media(prompt.media),
            "media": [_text(medium.name) for medium in prompt.media],
        }

    def write(self) -> None:
        """Puts the part in its place."""
        if self._files.failed or not self._rows:
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        name = part_name(self.split, self.step)
        path = self._files.run_dir / ANSWERS / name
        hidden = path.with_name(f".{name}")  # pandas and pyarrow pass over names that begin with a dot
        floats = ["logprobs", "trainer_logprobs", "entropies"]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files.keep_tokens([row["token_ids"] for row in self._rows])
            columns = [pa.array([row[field.name] for row in self._rows], type=field.type) for field in schema()]
            with open(hidden, "wb") as file:  # of a path that is no UTF-8, pyarrow takes no text
                pq.write_table(
                    pa.table(columns, schema=schema()),
                    file,
                    row_group_size=ROW_GROUP,
                    compression="zstd",
                    compression_level=1,
                    use_dictionary=["uid", "prompt", "ground_truth"],  # of what an index needs it would slow reading
                    use_byte_stream_split=[f"{name}.list.element" for name in floats],
                    write_statistics=False,
                )
            self._files.drop_later()
            self._files.written += hidden.stat().st_size
            os.replace(hidden, path)
        except (OSError, pa.ArrowException) as error:
            self._files.give_up(error)


def _of_response(response: Response) -> dict[str, Any]:
    columns = response.columns
    advantages = columns.get("advantages")
    trainer = columns.get("trainer_logprobs", columns.get("old_logprobs"))
    return {
        "role": response.role,
        "overall": response.rewards.get("overall"),
        "rewards": [(_text(name), value) for name, value in response.rewards.items()],
        "advantage": float(advantages.mean()) if advantages is not None and len(advantages) else None,
        "length": len(response.token_ids),
        "finish_reason": response.finish_reason,
        "response": _text(response.text),
        "token_ids": np.asarray(response.token_ids, dtype=np.int32),
        "logprobs": np.asarray(response.logprobs, dtype=np.float32),
        # the very same array where the engine's were taken for the old ones
        "trainer_logprobs": None if trainer is None or trainer is response.logprobs else trainer.astype(np.float32),
        "entropies": columns.get("entropies"),
    }


def _text(value: Any) -> str:
    """As text; a lone surrogate, which no file can hold, becomes an escape."""
    return str(value).encode("utf-8", errors="backslashreplace").decode("utf-8")


def _replace(path: Path, data: bytes) -> None:
    hidden = path.with_name(f".{path.name}")
    hidden.write_bytes(data)
    os.replace(hidden, path)


def _meaning(token: int, tokenizer: Tokenizer) -> dict[str, Any]:
    text = str(tokenizer.decode([token]))
    if "\ufffd" in text and (data := _bytes(tokenizer.convert_ids_to_tokens([token])[0])) is not None:
        return {"id": token, "bytes": data.hex()}
    return {"id": token, "text": text}


@cache
def _byte_letters() -> dict[str, int]:
    """The letters that stand for bytes in the vocabulary of a byte-level BPE tokenizer, as in GPT-2."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _bytes(piece: str | None) -> bytes | None:
    letters = _byte_letters()
    return bytes(letters[letter] for letter in piece) if piece and all(letter in letters for letter in piece) else None


def read_tokens(path: Path) -> Iterator[tuple[int, str | bytes]]:
    """Yields (token id, its text, or its bytes where it is only part of a letter); broken lines are passed over."""
    if not path.is_file():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
                yield int(entry["id"]), bytes.fromhex(entry["bytes"]) if "bytes" in entry else str(entry["text"])
            except (ValueError, KeyError, TypeError, OverflowError):
                continue
