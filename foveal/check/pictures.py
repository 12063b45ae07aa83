"""What is odd about pictures that the processor takes: their shape, their kind, where they lie."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from foveal.check.kinds import Faults
from foveal.data.images import FORMATS, ONE_AT_A_TIME_ABOVE, Size, picture_size
from foveal.data.processing import Processing
from foveal.data.prompts import Draft
from foveal.data.video import Stills

THIN = 30
"""Longer than wide, or the other way, by this factor: hardly ever meant."""
TINY = 10


class PictureCheck:
    """Looks at the headers of pictures.

    Attributes:
        sizes: (height, width) of each picture that was looked at.
        tokens: of all of them together.
    """

    def __init__(self, image_dir: str | None, processing: Processing, faults: Faults) -> None:
        self._folder = Path(image_dir).expanduser().resolve() if image_dir else None
        self._faults = faults
        self._oddities: dict[Path, list[str]] = {}
        self._processing = processing
        self.sizes: list[Size] = []
        self.tokens = 0

    def look(self, draft: Draft) -> None:
        row = draft.row_index
        for medium in draft.media:
            for path in medium.files:
                if self._folder is not None and not path.resolve().is_relative_to(self._folder):
                    self._faults.add("outside", row, name=medium.name, folder=self._folder)
            if not isinstance(medium.place, Stills) and medium.kind == "image":
                size = picture_size(medium.place, medium.name)
                self.sizes.append(size)
                self.tokens += self._processing.visual_tokens(size)
                self._look_at_shape(row, medium.name, size)
                for kind in self._of_file(medium.place):
                    self._faults.add(kind, row, name=medium.name)

    def _look_at_shape(self, row: int, name: str, size: Size) -> None:
        height, width = size
        kind = (
            "thin" if max(size) >= THIN * min(size)
            else "tiny" if max(size) < TINY
            else "large" if height * width > ONE_AT_A_TIME_ABOVE
            else None
        )  # fmt: skip
        if kind is not None:
            self._faults.add(kind, row, name=name, width=width, height=height)

    def _of_file(self, source: bytes | Path) -> list[str]:
        if isinstance(source, bytes):
            return _oddities(source)
        if source not in self._oddities:
            self._oddities[source] = _oddities(source)
        return self._oddities[source]


def _oddities(source: bytes | Path) -> list[str]:
    """Kinds of what is done to a picture and its author may not expect."""
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            found = ["animated"] if getattr(image, "is_animated", False) else []
            return [*found, "printing colours"] if image.mode == "CMYK" else found
    except Exception:  # damaged behind its header: decoding says so
        return []
