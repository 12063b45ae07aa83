"""Videos: from what a row holds to encoded bytes, and from encoded bytes to the frames that are sampled."""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from foveal.data.images import MAX_PIXELS, PictureError, Size, decode_image, locate, media_path, picture_size, to_media
from foveal.errors import DataError

MAX_FRAMES = 250_000
"""Of a video that is opened: more than two hours at 30 a second. Reaching the last one means decoding all before it."""
MISSING = 0.02
"""Part of the frames that a file may lack of what its header promises. Headers are often off by a few frames; a file
that was cut lacks more."""
PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
# Containers alone: playlists and scripts (m3u8, concat, …) would make the library open other files, or addresses.
FORMATS = "mov,matroska,avi,gif,mpegts,mpeg,mpegvideo,flv,ogg,asf,apng"
ZIP = b"PK\x03\x04"


@dataclass(frozen=True)
class Stills:
    """A video that is given as pictures.

    Attributes:
        frames: encoded bytes or files, in order.
        fps: how many a second they are; None where the row doesn't say, and they are taken as sampled already.
        folder: whose pictures they are, where the row names one.
    """

    frames: tuple[bytes | Path, ...]
    fps: float | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class VideoHeader:
    """What a video is before it is decoded.

    Attributes:
        frames: how many there are.
        fps: frames a second; None for pictures that are taken as sampled already.
        size: (height, width) of a frame in pixels, upright.
    """

    frames: int
    fps: float | None
    size: Size


def locate_video(value: Any, image_dir: str | None, name: str) -> tuple[bytes | Path | Stills, str]:
    """Where the video is, and its name for messages. Reads nothing but the names in a folder.

    Args:
        value: bytes; {"bytes": …, "path": …}; a path, relative to `image_dir`; a data URL; or its frames: a list of
            pictures in any form that `images.locate` takes, a folder of picture files, or {"frames": list or folder,
            "fps": number}.
        name: which video it is, as "row 3, video 0"; a path is added to it.

    Raises:
        PictureError: a file is missing, or there are no frames.
        DataError: a type that is no video.
    """
    if isinstance(value, dict) and value.get("frames"):
        fps = value.get("fps")
        if fps is not None and not _is_rate(fps):
            raise DataError(f"{name}: its fps is {fps!r}; it must be a number of frames a second above 0.")
        place, name = locate_video(value["frames"], image_dir, name)
        if not isinstance(place, Stills):
            raise DataError(f"{name}: its frames must be a list of pictures, or a folder of picture files.")
        return replace(place, fps=fps), name
    if isinstance(value, list | tuple):
        frames = [locate(frame, image_dir, f"{name}, frame {number}")[0] for number, frame in enumerate(value)]
        return _stills(frames, name)
    if isinstance(value, str | Path) and not str(value).startswith("data:"):
        path = media_path(value, image_dir)
        if _is_folder(path):
            files = sorted((file for file in path.iterdir() if file.suffix.lower() in PICTURES), key=_by_number)
            return _stills(files, f"{name} ({path})", path)
        if path.suffix.lower() in PICTURES:
            raise DataError(
                f"{name} ({path}) is a picture. Write the pictures of one video as a list of their own, "
                f'[["0.png", "1.png"]], or name the folder that they lie in.'
            )
    return locate(value, image_dir, name, "video")


def pack_stills(stills: Stills, name: str) -> bytes:
    """The pictures as one file: an archive without compression, whose comment says how many a second they are.

    Raises:
        PictureError: a picture's file cannot be read.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.comment = json.dumps({"fps": stills.fps}).encode()
        for number, frame in enumerate(stills.frames):
            data = to_media(frame, f"{name}, frame {number}").data
            archive.writestr(zipfile.ZipInfo(f"{number:08d}"), data)
    return buffer.getvalue()


def unpack_stills(data: bytes, name: str) -> bytes | Stills:
    """The pictures, as bytes, that `pack_stills` made one file of; any other video as it is.

    Raises:
        PictureError: an archive of another kind.
    """
    if not data.startswith(ZIP):
        return data
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it is compressed")
            fps = json.loads(archive.comment)["fps"]
            if fps is not None and not _is_rate(fps):
                raise ValueError(f"its fps is {fps!r}")
            return Stills(tuple(archive.read(entry) for entry in archive.infolist()), fps)
    except (ValueError, KeyError, TypeError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
        raise PictureError(f"{name}: an archive is no video; give a list of pictures, or a folder ({error})") from error


def video_header(place: bytes | Path | Stills, name: str) -> VideoHeader:
    """How many frames of what size there are. One frame is decoded, no more.

    Raises:
        PictureError: not a video, damaged, or beyond `MAX_FRAMES` or `images.MAX_PIXELS`.
    """
    if isinstance(place, bytes):
        place = unpack_stills(place, name)
    if isinstance(place, Stills):
        return VideoHeader(len(place.frames), place.fps, picture_size(place.frames[0], f"{name}, frame 0"))
    with _opened(place, name) as (container, stream):
        frames = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        rate = stream.average_rate or stream.guessed_rate
        if not frames or not rate:
            raise PictureError(f"{name}: it has no frames, or doesn't say how many a second")
        if frames > MAX_FRAMES:
            raise PictureError(f"{name}: {frames:,} frames are more than the limit of {MAX_FRAMES:,}")
        container.seek(0)
        first = next(container.decode(stream), None)
        if first is None:
            raise PictureError(f"{name}: its first frame cannot be decoded")
        if first.width * first.height > MAX_PIXELS:
            raise PictureError(f"{name}: frames of {first.width}x{first.height} are more than {MAX_PIXELS:,} pixels")
        size = (first.height, first.width) if first.rotation % 180 == 0 else (first.width, first.height)
        return VideoHeader(frames, float(rate), size)


def read_frames(
    place: bytes | Stills, name: str, indices: Sequence[int], reduce: Callable[[np.ndarray], np.ndarray]
) -> list[np.ndarray]:
    """Decodes the frames of these numbers (ascending, from 0, repeats allowed) to upright RGB.

    Args:
        place: what `unpack_stills` makes of a video's bytes.
        reduce: brings a frame, (height, width, 3) uint8, to the size that it is used in, as soon as it is decoded: the
            video never lies in memory as a whole.

    Raises:
        PictureError: damaged, or cut: it ends well before the frames that its header promises.
    """
    frames = _decoded_stills(place, name, indices) if isinstance(place, Stills) else _decoded(place, name, indices)
    found: list[np.ndarray] = []
    last = -1
    for last, frame in frames:
        reduced = reduce(frame)
        while len(found) < len(indices) and indices[len(found)] == last:
            found.append(reduced)
    if len(found) < len(indices):
        if last < indices[-1] * (1 - MISSING) - 1:
            raise PictureError(f"{name}: it is cut: {last + 1} of its frames can be decoded, not {indices[-1] + 1}")
        found += [reduced] * (len(indices) - len(found))
    return found


def _decoded(data: bytes, name: str, indices: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """The frames of these numbers, or in the place of those that are not there the very last one."""
    wanted = set(indices)
    with _opened(data, name) as (container, stream):
        number, frame = -1, None
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                yield number, _upright(frame, f"{name}, frame {number}")
            if number >= indices[-1]:
                return
        if frame is not None:
            yield number, _upright(frame, f"{name}, frame {number}")


def _upright(frame: Any, name: str) -> np.ndarray:
    if frame.is_corrupt:
        raise PictureError(f"{name}: it is damaged")
    # `rotation` counts degrees against the clock, as `rot90` does.
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90))


def _decoded_stills(stills: Stills, name: str, indices: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    first = picture_size(stills.frames[0], f"{name}, frame 0")
    for number in sorted(set(indices)):
        frame = stills.frames[number]
        assert isinstance(frame, bytes)
        pixels = np.array(decode_image(frame, f"{name}, frame {number}"))
        if pixels.shape[:2] != first:
            raise PictureError(
                f"{name}, frame {number}: {pixels.shape[1]}x{pixels.shape[0]}, but frame 0 is {first[1]}x{first[0]}; "
                f"all frames of a video must be of one size"
            )
        yield number, pixels


@contextmanager
def _opened(place: bytes | Path, name: str) -> Iterator[tuple[Any, Any]]:
    """The container and its video stream; whatever decoding raises becomes a PictureError."""
    try:
        import av
    except ImportError as error:
        raise DataError(
            f"{name}: decoding videos needs the package av: `pip install 'foveal[video]'`. A video may also be given "
            f"as a list of its frames."
        ) from error
    try:
        # An open file and not its path, which the library would take for an address where it looks like one.
        with (
            io.BytesIO(place) if isinstance(place, bytes) else place.open("rb") as file,
            av.open(file, options={"format_whitelist": FORMATS}) as container,
        ):
            if not container.streams.video:
                raise PictureError(f"{name}: there are no pictures in it, only {container.format.long_name} streams")
            yield container, container.streams.video[0]
    except PictureError:
        raise
    except av.error.FFmpegError as error:
        raise PictureError(f"{name}: not a video in a known format, or damaged: {error.strerror}") from error
    except OSError as error:
        raise PictureError(f"{name}: {error.strerror or error}") from error


def _stills(frames: Sequence[bytes | Path], name: str, folder: Path | None = None) -> tuple[Stills, str]:
    if not frames:
        raise PictureError(f"{name}: there are no pictures in it")
    return Stills(tuple(frames), folder=folder), name


def _is_rate(fps: Any) -> bool:
    return isinstance(fps, int | float) and 0 < fps < math.inf


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long
        return False


def _by_number(path: Path) -> list[tuple[int, str]]:
    """So that frame_10 comes after frame_9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]
