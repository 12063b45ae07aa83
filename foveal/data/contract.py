"""The contract between data, engine and trainer, proved for every prompt: what is checked here cannot fail hours later.

`check_prompt` compares ids, marks, grids and features when a prompt is built; `check_layout` positions and the mask of
visual tokens when it is laid out for the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foveal.data.rows import count
from foveal.errors import DataError
from foveal.types import IntArray, Prompt

if TYPE_CHECKING:
    import torch

    from foveal.data.processing import Processing

PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
MISFIT = "The model's processor, tokenizer and chat template do not fit each other."
MOST_STAMP_TOKENS = 32
"""Of the time that stands before a frame of a video."""


def check_prompt(prompt: Prompt, processing: Processing) -> None:
    """Proves that placeholders, media, grids, features and both id lists of a prompt (which has its features) agree.

    Raises:
        DataError: names the row and the numbers that differ.
    """
    where = _where(prompt)
    features = prompt.features or {}
    for kind, token_id in processing.placeholders.items():
        grid = features.get(f"{kind}_grid_thw")
        grids = grid.tolist() if grid is not None else []
        patches = sum(t * h * w for t, h, w in grids)
        pixels = features.get(PIXELS[kind])
        rows = len(pixels) if pixels is not None else 0
        media = sum(medium.kind == kind for medium in prompt.media)
        tokens = sum(t * h * w // processing.merge_length for t, h, w in grids)
        placeholders, expanded = prompt.token_ids.count(token_id), prompt.expanded_ids.count(token_id)
        if not (placeholders == media == len(grids) and expanded == tokens and rows == patches):
            raise DataError(
                f"{where}: {count(media, kind)}, {placeholders} placeholders, grids of {len(grids)}; {expanded} {kind} "
                f"tokens, {tokens} features; {rows} patches, {patches} in the grids. Each must agree. {MISFIT}"
            )
    media_without = [medium.name for medium in prompt.media if medium.kind not in processing.placeholders]
    if media_without:
        raise DataError(f"{where}: the model has no placeholder for {', '.join(media_without)}.")
    largest = max(prompt.expanded_ids, default=0)
    if processing.vocabulary is not None and largest >= processing.vocabulary:
        raise DataError(
            f"{where}: token id {largest}; the model has ids 0 to {processing.vocabulary - 1}. The tokenizer is not "
            f"the model's (worker.actor.model.tokenizer_path)."
        )
    if not _expands(prompt, processing, features):
        raise DataError(
            f"{where}: the processor's {len(prompt.expanded_ids)} token ids are not the prompt's "
            f"{len(prompt.token_ids)} with each placeholder expanded by its features, so engine and trainer would see "
            f"different prompts. {MISFIT}"
        )


def check_layout(prompt: Prompt, positions: torch.Tensor, visual: IntArray, features: int) -> None:
    """Proves that positions and visual tokens fit the prompt's ids.

    Args:
        positions: (A, P + 1) int64, of the P expanded tokens and of the first token after them.
        visual: places of the visual tokens in the prompt.
        features: how many features the prompt's pictures and videos have.

    Raises:
        DataError: names the row and what does not fit.
    """
    import torch

    length = len(prompt.expanded_ids)
    text = torch.ones(length + 1, dtype=torch.bool)
    text[torch.from_numpy(visual)] = False
    of_text = positions[:, text] if positions.shape[1] == length + 1 else positions[:, :0]
    faults = {
        f"positions for {positions.shape[1]} tokens instead of {length + 1}": positions.shape[1] != length + 1,
        f"{len(visual)} visual tokens, {features} features": len(visual) != features,
        "a negative position": bool((positions < 0).any()),
        "text whose positions differ between the axes": bool((of_text != of_text[:1]).any()),
        "text whose positions do not grow": bool((of_text[0].diff() <= 0).any()),
    }
    found = [fault for fault, is_so in faults.items() if is_so]
    if found:
        raise DataError(
            f"{_where(prompt)}: {'; '.join(found)}. The positions are those of the installed transformers; a version "
            f"between 5.16 and 5.19 is supported."
        )


def _expands(prompt: Prompt, processing: Processing, features: dict[str, torch.Tensor]) -> bool:
    """Whether the expanded ids are the others with each placeholder in the place of its visual tokens."""
    kinds = {token_id: kind for kind, token_id in processing.placeholders.items()}
    grids: dict[str, Any] = {
        kind: iter(features[f"{kind}_grid_thw"].tolist() if f"{kind}_grid_thw" in features else ()) for kind in PIXELS
    }
    ids, place = prompt.expanded_ids, 0
    for token in prompt.token_ids:
        if token not in kinds:
            if ids[place : place + 1] != [token]:
                return False
            place += 1
            continue
        time, height, width = next(grids[kinds[token]])
        frame = height * width // processing.merge_length
        if kinds[token] == "video" and processing.stamps_frames:
            place = _after_frames(ids, place, token, time, frame)
        else:
            place = _after_run(ids, place, token, time * frame)
        if place < 0:
            return False
    return place == len(ids)


def _after_run(ids: Sequence[int], place: int, token: int, length: int) -> int:
    """Where the ids go on after so many of one token; -1 if they are not there."""
    return place + length if list(ids[place : place + length]) == [token] * length else -1


def _after_frames(ids: Sequence[int], place: int, token: int, frames: int, length: int) -> int:
    """As `_after_run`, of frames that each have their time and a token that begins them before, one that ends after."""
    for _ in range(frames):
        limit = place + MOST_STAMP_TOKENS
        while place < min(len(ids), limit) and ids[place] != token:
            place += 1
        place = _after_run(ids, place, token, length)
        if place < 0 or place >= len(ids) or ids[place] == token:
            return -1
        place += 1
    return place


def _where(prompt: Prompt) -> str:
    return f"row {prompt.row_index} ({prompt.uid})"
