"""Sample answers as a table with pictures, for trackers that show one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from foveal.track.samples import Sample

if TYPE_CHECKING:
    from PIL import Image

    from foveal.types import Media

LONGEST_SIDE = 512
"""Pixels of a picture that a tracker gets: enough to see it, and little to upload."""
MOST_PICTURES = 4
"""Of a prompt."""


def sample_table(samples: list[Sample], show: Callable[[Image.Image], Any]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows: step, uid, prompt, a column for each picture, response, answer, a column for each reward.

    Args:
        show: what the tracker wants in place of a picture.
    """
    pictures = [list(sample_pictures(sample)) for sample in samples]
    most = max(map(len, pictures), default=0)
    parts = list(dict.fromkeys(part for sample in samples for part in sample.rewards))
    columns = ["step", "uid", "prompt", "images", *(f"image_{n + 1}" for n in range(most)), "response", "answer"]
    rows = []
    for sample, found in zip(samples, pictures, strict=True):
        shown = [show(picture) for picture in found] + [None] * (most - len(found))
        row = [sample.step, sample.uid, sample.prompt, ", ".join(sample.images), *shown, sample.response, sample.answer]
        rows.append([*row, *(sample.rewards.get(part) for part in parts)])
    return columns + [f"reward/{part}" for part in parts], rows


def sample_pictures(sample: Sample) -> Iterator[Image.Image]:
    """The first pictures of a sample's prompt, shrunk to `LONGEST_SIDE`; not those that cannot be read, nor videos."""
    from foveal.data.images import PictureError

    for medium in [medium for medium in sample.media if medium.kind == "image"][:MOST_PICTURES]:
        try:
            yield _thumbnail(medium)
        except PictureError:
            continue


def _thumbnail(medium: Media) -> Image.Image:
    from foveal.data.images import Size, decode_image

    def fitted(size: Size) -> Size:
        scale = LONGEST_SIDE / max(size)
        return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))

    picture = decode_image(medium.data, medium.name, fitted)
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    return picture
