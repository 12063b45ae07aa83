"""An answer's tokens as coloured pieces of text."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foveal.track.sample_files import TOKENS, read_tokens


@dataclass(frozen=True)
class Colour:
    """A number of a token that can be shown as a shade, the darker the more there is to see.

    Attributes:
        label: what the choice is called.
        bounds: where the shades 1 … 7 begin.
        low, high: what the lightest and the darkest shade mean.
    """

    label: str
    bounds: tuple[float, ...]
    low: str
    high: str


COLOURS = {
    "probability": Colour(
        "how unlikely each token was", (0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99), "the model was sure", "a surprise"
    ),
    "entropy": Colour(
        "how undecided the model was (entropy)", (0.01, 0.1, 0.3, 0.6, 1.0, 1.5, 2.5), "decided", "undecided"
    ),
    "gap": Colour(
        "how far engine and trainer disagree",
        (0.001, 0.005, 0.01, 0.03, 0.1, 0.3, 1.0),
        "they agree",
        "they disagree",
    ),
}


@dataclass(frozen=True)
class Piece:
    """A token as it is shown.

    Attributes:
        shade: 0 … 7, None where there is no number.
        about: all its numbers, for whoever points at it.
    """

    text: str
    shade: int | None
    about: str


class Vocabulary:
    """What the token ids of a run mean, read again when the file has changed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / TOKENS
        self._size = -1
        self._known: dict[int, str | bytes] = {}

    def read(self) -> dict[int, str | bytes]:
        size = self.path.stat().st_size if self.path.exists() else 0
        if size != self._size:
            self._known, self._size = dict(read_tokens(self.path)), size
        return self._known


def available(answers: Sequence[dict[str, Any]]) -> list[str]:
    """The colours for which some of the answers have numbers."""
    return [name for name in COLOURS if any(_values(answer, name) for answer in answers)]


def pieces(answer: dict[str, Any], colour: str, vocabulary: dict[int, str | bytes], limit: int) -> list[Piece]:
    """The first `limit` tokens of an answer. Tokens that are only parts of a letter make one piece."""
    columns = {name: answer.get(name) for name in ("logprobs", "trainer_logprobs", "entropies")}
    values = _values(answer, colour) if colour in COLOURS else []
    found: list[Piece] = []
    pending = b""
    for index, token in enumerate((answer.get("token_ids") or [])[:limit]):
        meaning = vocabulary.get(token, f"⟨{token}⟩")
        if isinstance(meaning, bytes):
            pending += meaning
            try:
                meaning, pending = pending.decode(), b""
            except UnicodeDecodeError:
                if len(pending) < 4:
                    continue
                meaning, pending = pending.decode(errors="replace"), b""
        elif pending:
            meaning, pending = pending.decode(errors="replace") + meaning, b""
        value = values[index] if index < len(values) else None
        shade = None if value is None or math.isnan(value) else bisect_right(COLOURS[colour].bounds, value)
        found.append(Piece(meaning, shade, _about(token, index, columns)))
    if pending:
        found.append(Piece(pending.decode(errors="replace"), None, ""))
    return found


def _values(answer: dict[str, Any], colour: str) -> list[float]:
    """What is shaded, by token; empty where nobody measured it."""
    engine, trainer = answer.get("logprobs") or [], answer.get("trainer_logprobs") or []
    if colour == "entropy":
        return answer.get("entropies") or []
    if colour == "gap":
        return [abs(a - b) for a, b in zip(engine, trainer, strict=False)]
    return [1 - math.exp(min(0.0, value)) for value in engine]


def _about(token: int, index: int, columns: dict[str, list[float] | None]) -> str:
    def at(name: str) -> float | None:
        values = columns[name] or []
        return values[index] if index < len(values) else None

    engine, trainer, entropy = at("logprobs"), at("trainer_logprobs"), at("entropies")
    lines = [f"token {index + 1}, id {token}"]
    if engine is not None:
        lines.append(f"probability {math.exp(min(0.0, engine)):.1%} (log {engine:.4f})")
    if trainer is not None:
        lines.append(f"log-probability in the trainer {trainer:.4f}")
    if engine is not None and trainer is not None:
        lines.append(f"difference {abs(engine - trainer):.5f}")
    if entropy is not None:
        lines.append(f"entropy {entropy:.3f}")
    return "\n".join(lines)
