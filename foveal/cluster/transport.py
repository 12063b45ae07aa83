"""Prompts, answers and per-token columns as a few flat arrays, which is how they travel between processes.

Arrays are what a serialiser moves without looking at it. Nothing is padded, each distinct picture travels once in its
encoded form, and what the other side doesn't need (rows, ground truths, texts, processed pixels) doesn't travel at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from foveal.types import Group, Media, Prompt, Response, Role

_REASONS = ("stop", "length", "abort")
_ROLES: tuple[str, ...] = get_args(Role)


@dataclass(frozen=True)
class PackedPrompts:
    """P prompts with M media, K of them distinct.

    Attributes:
        uids: P names. rows: (P,) int64.
        lengths: (P, 2) int32, of both id lists; ids: int32, all of them, prompt by prompt.
        media: (P,) int32, media of each prompt; which: (M,) int32, the picture that each one is.
        kinds, names: of the M media.
        sizes: (K,) int64, bytes of each distinct picture; data: uint8, all their bytes.
    """

    uids: list[str]
    rows: np.ndarray
    lengths: np.ndarray
    ids: np.ndarray
    media: np.ndarray
    which: np.ndarray
    kinds: list[Any]
    names: list[str]
    sizes: np.ndarray
    data: np.ndarray


def pack_prompts(prompts: Sequence[Prompt]) -> PackedPrompts:
    media = [medium for prompt in prompts for medium in prompt.media]
    pictures: dict[bytes, int] = {}
    which = [pictures.setdefault(medium.data, len(pictures)) for medium in media]
    lists = [ids for prompt in prompts for ids in (prompt.token_ids, prompt.expanded_ids)]
    return PackedPrompts(
        uids=[prompt.uid for prompt in prompts],
        rows=np.array([prompt.row_index for prompt in prompts], np.int64),
        lengths=np.array([len(ids) for ids in lists], np.int32).reshape(-1, 2),
        ids=_joined([np.asarray(ids, np.int32) for ids in lists], np.int32),
        media=np.array([len(prompt.media) for prompt in prompts], np.int32),
        which=np.array(which, np.int32),
        kinds=[medium.kind for medium in media],
        names=[medium.name for medium in media],
        sizes=np.array([len(data) for data in pictures], np.int64),
        data=np.frombuffer(b"".join(pictures), np.uint8),
    )


def unpack_prompts(packed: PackedPrompts) -> list[Prompt]:
    """The prompts without rows and ground truths; features are made anew where they are needed."""
    pictures = [piece.tobytes() for piece in _pieces(packed.data, packed.sizes)]
    media = [
        Media(kind, pictures[number], name)
        for kind, number, name in zip(packed.kinds, packed.which, packed.names, strict=True)
    ]
    lists = _pieces(packed.ids, packed.lengths.ravel())
    prompts, taken = [], 0
    for uid, row, count in zip(packed.uids, packed.rows, packed.media, strict=True):
        token_ids, expanded_ids = next(lists).tolist(), next(lists).tolist()
        own = media[taken : taken + count]
        taken += count
        prompts.append(Prompt(uid, token_ids, expanded_ids, own, {}, int(row), None))
    return prompts


@dataclass(frozen=True)
class PackedResponses:
    """R responses of N tokens.

    Attributes:
        lengths: (R,) int32; tokens: (N,) int32.
        logprobs: (N,) float32, or None where the receiver doesn't need them.
        reasons, roles: (R,) uint8.
        spans: (S, 3) int32, each of which weights wrote what: response, first token, version.
    """

    lengths: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray | None
    reasons: np.ndarray
    roles: np.ndarray
    spans: np.ndarray


def pack_responses(responses: Sequence[Response], *, logprobs: bool = True) -> PackedResponses:
    spans = [(number, *span) for number, response in enumerate(responses) for span in response.weight_spans]
    return PackedResponses(
        lengths=np.array([len(r.token_ids) for r in responses], np.int32),
        tokens=_joined([r.token_ids.astype(np.int32) for r in responses], np.int32),
        logprobs=_joined([r.logprobs.astype(np.float32, copy=False) for r in responses], np.float32)
        if logprobs
        else None,
        reasons=np.array([_REASONS.index(r.finish_reason) for r in responses], np.uint8),
        roles=np.array([_ROLES.index(r.role) for r in responses], np.uint8),
        spans=np.array(spans, np.int32).reshape(-1, 3),
    )


def unpack_responses(packed: PackedResponses) -> list[Response]:
    """The responses; log-probabilities that didn't travel are empty."""
    nothing = np.zeros(0, np.float32)
    logprobs = [nothing] * len(packed.lengths)
    if packed.logprobs is not None:
        logprobs = [piece.copy() for piece in _pieces(packed.logprobs, packed.lengths)]
    responses = []
    for tokens, probabilities, reason, role in zip(
        _pieces(packed.tokens, packed.lengths), logprobs, packed.reasons, packed.roles, strict=True
    ):
        finish: Any = _REASONS[reason]
        kept: Any = _ROLES[role]
        responses.append(Response(tokens.astype(np.int64), probabilities, finish, role=kept))
    for number, first, version in packed.spans.tolist():
        responses[number].weight_spans.append((first, version))
    return responses


@dataclass(frozen=True)
class PackedGroups:
    """Groups to train on; their prompts are where they go already.

    Attributes:
        uids: of their prompts; counts: (G,) int32, responses of each.
    """

    uids: list[str]
    counts: np.ndarray
    responses: PackedResponses


def pack_groups(groups: Sequence[Group], *, logprobs: bool) -> PackedGroups:
    return PackedGroups(
        uids=[group.prompt.uid for group in groups],
        counts=np.array([len(group.responses) for group in groups], np.int32),
        responses=pack_responses([r for group in groups for r in group.responses], logprobs=logprobs),
    )


def unpack_groups(packed: PackedGroups, prompts: dict[str, Prompt]) -> list[Group]:
    responses = iter(unpack_responses(packed.responses))
    return [
        Group(prompts[uid], [next(responses) for _ in range(count)])
        for uid, count in zip(packed.uids, packed.counts, strict=True)
    ]


@dataclass(frozen=True)
class PackedColumn:
    """A column of some of a number of responses that both sides know in the same order.

    Attributes:
        which: int32, the responses that have it, ascending; values: float32, theirs.
    """

    which: np.ndarray
    values: np.ndarray


def pack_columns(responses: Sequence[Response], known: Sequence[set[str]], names: set[str]) -> dict[str, PackedColumn]:
    """The columns of `names` that responses have and the other side doesn't know.

    Args:
        known: of each response, columns that the other side has; what is packed here is added.
    """
    packed = {}
    for name in sorted(names):
        which = [i for i, response in enumerate(responses) if name in response.columns and name not in known[i]]
        if which:
            values = [np.asarray(responses[i].columns[name], np.float32) for i in which]
            packed[name] = PackedColumn(np.array(which, np.int32), _joined(values, np.float32))
        for i in which:
            known[i].add(name)
    return packed


def unpack_columns(packed: dict[str, PackedColumn], responses: Sequence[Response], known: Sequence[set[str]]) -> None:
    """Sets the columns, and adds their names to what the other side is known to have."""
    for name, column in packed.items():
        lengths = np.array([len(responses[i].token_ids) for i in column.which], np.int64)
        for i, values in zip(column.which, _pieces(column.values, lengths), strict=True):
            responses[i].columns[name] = values.copy()
            known[i].add(name)


def _joined(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _pieces(flat: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    end = 0
    for length in lengths.tolist():
        yield flat[end : end + length]
        end += length
