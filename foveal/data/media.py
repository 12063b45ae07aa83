"""A picture or video of a row, found but not read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from foveal.data.images import PictureError, Size, locate, picture_size, to_media
from foveal.data.video import Stills, VideoHeader, locate_video, pack_stills, video_header
from foveal.types import Media

MediaSize: TypeAlias = Size | VideoHeader
"""What decides the number of a picture's or video's tokens, known without decoding it."""


@dataclass(frozen=True)
class MediaSource:
    """Where a picture or video lies.

    Attributes:
        place: its encoded bytes, its file, or the frames of a video.
        name: for messages, as "row 3, image 0 (a.png)".
    """

    kind: Literal["image", "video"]
    place: bytes | Path | Stills
    name: str

    @classmethod
    def find(cls, kind: Literal["image", "video"], value: Any, folder: str | None, name: str) -> MediaSource:
        """From what a row holds; errors as `images.locate` and `video.locate_video`."""
        return cls(kind, *(locate(value, folder, name) if kind == "image" else locate_video(value, folder, name)))

    @property
    def files(self) -> list[Path]:
        """The files that it is read from, and the folder whose every picture it is."""
        places = (*self.place.frames, self.place.folder) if isinstance(self.place, Stills) else (self.place,)
        return [place for place in places if isinstance(place, Path)]

    def size(self) -> MediaSize:
        """From the header alone.

        Raises:
            PictureError: it cannot be read.
        """
        if self.kind == "video":
            return video_header(self.place, self.name)
        assert not isinstance(self.place, Stills)
        return picture_size(self.place, self.name)

    def read(self) -> Media:
        """The file's own encoded bytes; PictureError if it cannot be read."""
        if isinstance(self.place, Stills):
            return Media(self.kind, pack_stills(self.place, self.name), self.name)
        return to_media(self.place, self.name, self.kind)


def refused_size(name: str, size: MediaSize, error: ValueError) -> PictureError:
    """For a picture or video of a size that the model's processor does not take."""
    height, width = size.size if isinstance(size, VideoHeader) else size
    return PictureError(f"{name}: {width}x{height}: {error}")
