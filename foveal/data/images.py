"""Pictures: from what a row holds to encoded bytes, and from encoded bytes to pixels."""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import os
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from PIL import ExifTags, Image, ImageFile

from foveal.errors import DataError
from foveal.track.console import note
from foveal.types import Media

MAX_PIXELS = 256 * 1024 * 1024
"""The largest picture that is opened: as RGB it takes 1 GiB while it is being shrunk."""
ONE_AT_A_TIME_ABOVE = 16 * 1024 * 1024
"""Larger pictures are decoded one after the other, whatever the number of threads."""
SHRINK_ABOVE = 4 * 1024 * 1024
"""Pictures with more pixels than this are brought to the model's size while decoding, to bound memory."""

# Pillow's own limit warns at 89 megapixels and raises at 179; ours is one clear error. And a cut file must raise
# whatever other libraries in the process prefer: padded with grey it would be learned from.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS
ImageFile.LOAD_TRUNCATED_IMAGES = False
# Pillow takes memory in blocks of 16 MiB, which the C library keeps for each thread after they are freed (measured:
# 4.7 GB after 64-megapixel pictures in 16 threads). Blocks above 32 MiB go back to the system at once (1.1 GB).
Image.core.set_block_size(64 * 1024 * 1024)

BASE64_STARTS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "Qk", "SUkqA", "TU0AK")
"""PNG, JPEG, GIF, WebP, BMP and TIFF in base64."""
# EXIF orientation → what makes the picture upright; 5 to 8 exchange width and height.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
TURNED = {5, 6, 7, 8}
Image.init()
_WANTED = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO", "TGA")
FORMATS = [name for name in _WANTED if name in Image.OPEN]
"""What is opened of what Pillow knows: for some of the rest it starts other programs, as Ghostscript for PostScript."""
ANIMATED = {"GIF", "PNG", "WEBP", "AVIF", "TIFF"}
"""Formats in which further pictures are the rest of a sequence. (A JPEG's are another view, or a depth map.)"""

_large = threading.Lock()
_said_animated = False

Size: TypeAlias = tuple[int, int]
"""(height, width) in pixels, upright."""


class PictureError(DataError):
    """One picture or video cannot be read; `data.on_bad_row` decides whether its row is skipped."""


def media_values(value: Any, place: str) -> list[Any]:
    """What stands in a row's media column, as a list: absent, null, `[]`, `[null]` and "" all mean none.

    A single picture may stand there without a list, and a CSV cell may hold a JSON list of paths. `place` is for
    messages.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(
                f"{place}: starts with [ and is not a JSON list: {value[:80]!r}. Write it as "
                f'["a.png", "b.png"], with double quotes.'
            ) from error
    values = value if isinstance(value, list | tuple) else [value]
    return [item for item in values if not _is_null(item)]


def _is_null(value: Any) -> bool:
    if isinstance(value, dict):
        known = value.keys() & {"bytes", "path", "frames"}
        return not any(value[key] for key in known or value)
    if isinstance(value, float):  # what pandas writes for a missing cell
        return math.isnan(value)
    return value is None or (isinstance(value, str) and not value.strip())


def locate(
    value: Any, image_dir: str | None, name: str, noun: Literal["picture", "video"] = "picture"
) -> tuple[bytes | Path, str]:
    """Where the encoded picture (or video) is: (its bytes or its file, its name for messages). Reads nothing.

    Args:
        value: bytes; {"bytes": …, "path": …}; a path, relative to `image_dir`; base64, alone or as a data URL; a
            PIL picture.
        name: which picture it is, as "row 3, image 0"; a path is added to it.

    Raises:
        PictureError: the file is missing.
        DataError: a web address, or a type that is no picture.
    """
    if isinstance(value, dict):
        path = value.get("path")
        value = value.get("bytes") or path or value
        name = f"{name} ({path})" if isinstance(value, bytes) and path else name
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value), name
    if isinstance(value, str):
        value = value.removeprefix("file://")  # as in the messages of Qwen-VL's examples
    if isinstance(value, Image.Image):
        return _encode_png(value), name
    if isinstance(value, str) and value.startswith("data:"):
        return _from_data_url(value, name), name
    if isinstance(value, str) and len(value) > 60 and "." not in value and value.startswith(BASE64_STARTS):
        return _from_base64(value, name), name
    if isinstance(value, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", value):
        raise DataError(
            f"{name} is a web address ({value[:120]}), and nothing is downloaded from those unless "
            f"data.allow_urls=true, nor from others than http(s). Set it, or put the {noun}s' paths in the data, "
            f"relative to data.image_dir."
        )
    if isinstance(value, str | Path):
        path = media_path(value, image_dir)
        try:
            is_file = path.is_file()
        except OSError as error:  # such as a name that is too long
            raise PictureError(
                f"{name}: {str(value)[:60]!r}… ({len(str(value))} characters) is no path: {error.strerror}. A {noun} "
                f"in base64 begins with data:{'image/png' if noun == 'picture' else 'video/mp4'};base64,"
            ) from error
        if not is_file:
            raise PictureError(f"{name}: there is no file {path} (data.image_dir is {image_dir!r})")
        return path, f"{name} ({path})"
    raise DataError(
        f"{name} is a {type(value).__name__}; a {noun} is bytes, a path, {{'bytes': …, 'path': …}}, base64"
        + (" or a PIL picture." if noun == "picture" else ", a list of its frames or a folder of them.")
    )


def media_path(value: str | Path, image_dir: str | None) -> Path:
    """The file that a row names; a `~` is the home folder, but for names that only begin so, as `~draft.png`."""
    return Path(os.path.expanduser(Path(image_dir or "", value)))


def to_media(place: bytes | Path, name: str, kind: Literal["image", "video"] = "image") -> Media:
    """What `locate` found, as the file's own encoded bytes; PictureError if the file cannot be read."""
    if isinstance(place, bytes):
        return Media(kind, place, name)
    try:
        return Media(kind, place.read_bytes(), name)
    except OSError as error:
        raise PictureError(f"{name}: {error.strerror or error}") from error


def _encode_png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    (image.convert("RGB") if image.mode in {"CMYK", "YCbCr", "HSV", "LAB"} else image).save(buffer, "PNG")
    return buffer.getvalue()


def _from_data_url(url: str, name: str) -> bytes:
    head, _, body = url.partition(",")
    if not head.endswith(";base64"):
        raise DataError(f"{name}: a data URL must be base64 (data:image/png;base64,…), this one starts {head[:60]!r}.")
    return _from_base64(body, name)


def _from_base64(text: str, name: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise PictureError(f"{name}: not valid base64: {error}") from error


def picture_size(place: bytes | Path, name: str) -> Size:
    """(height, width) of the upright picture, from the file's header alone.

    Raises:
        PictureError: not a picture, or more than `MAX_PIXELS`.
    """
    try:
        with _open(place, name) as image:
            if image.format in ANIMATED and image.is_animated:  # type: ignore[attr-defined]
                _say_animated(name)
            width, height = image.size
            return (width, height) if _orientation(image) in TURNED else (height, width)
    except PictureError:
        raise
    except Exception as error:
        raise PictureError(f"{name}: {error}") from error


def decode_image(data: bytes, name: str, target: Callable[[Size], Size | None] | None = None) -> Image.Image:
    """Decodes the whole picture to upright RGB.

    EXIF orientation is applied, transparency is laid on white, 16-bit greys are scaled to 8 bits, of an animation the
    first frame is taken.

    Args:
        target: the model's own rule from a picture's size to the size that it is resized to. A picture of more than
            `SHRINK_ABOVE` pixels is brought to that size here, where decoding can help, instead of in the processor;
            where the rule gives None, it is not.

    Raises:
        PictureError: damaged, truncated (never padded), not a picture, or more than `MAX_PIXELS`.
    """
    height, width = picture_size(data, name)
    try:
        # The lock goes round the whole decoding: a picture's memory is freed when `_decode` returns.
        with _large if width * height > ONE_AT_A_TIME_ABOVE else nullcontext():
            return _decode(data, name, target if width * height > SHRINK_ABOVE else None)
    except PictureError:
        raise
    except Exception as error:  # decoders raise almost anything on damaged files
        raise PictureError(f"{name}: {error}") from error


def _decode(data: bytes, name: str, target: Callable[[Size], Size | None] | None) -> Image.Image:
    with _open(data, name) as image:
        orientation = _orientation(image)
        width, height = image.size
        turned = orientation in TURNED
        new_size = target((width, height) if turned else (height, width)) if target is not None else None
        if new_size is None:
            pixels = _on_white(_eight_bit(image))
        else:
            pixels = _shrunk(image, new_size if turned else new_size[::-1])
        return pixels.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else pixels


def _open(place: bytes | Path, name: str) -> ImageFile.ImageFile:
    try:
        image = Image.open(io.BytesIO(place) if isinstance(place, bytes) else place, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise PictureError(f"{name}: more than {MAX_PIXELS:,} pixels: {error}") from error
    except Image.UnidentifiedImageError as error:
        raise PictureError(f"{name}: not a picture in a known format ({', '.join(FORMATS)})") from error
    if image.width * image.height > MAX_PIXELS:
        image.close()
        raise PictureError(f"{name}: {image.width}x{image.height} is more than the limit of {MAX_PIXELS:,} pixels")
    return image


def _say_animated(name: str) -> None:
    """Once a run: thousands of rows may be alike."""
    global _said_animated
    if not _said_animated:
        _said_animated = True
        note(f"{name}: an animation; of those the first picture is used. As a video it belongs into data.video_key.")


def _orientation(image: ImageFile.ImageFile) -> int:
    # Pillow turns a TIFF upright by itself.
    if image.format == "TIFF":
        return 1
    # Pillow decodes a whole PNG to look for EXIF behind its pixels.
    if image.format == "PNG" and not image.info.keys() & {"exif", "Raw profile type exif"}:
        return 1
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged beside sound pixels; everything else shows the picture as it is stored
        return 1


def _shrunk(image: ImageFile.ImageFile, size: tuple[int, int]) -> Image.Image:
    """In this (width, height)."""
    # A JPEG decodes at 1/2, 1/4 or 1/8 for a fraction of the memory; twice the final size keeps detail.
    image.draft(None, (2 * size[0], 2 * size[1]))
    return _on_white(_eight_bit(image).resize(size, Image.Resampling.BICUBIC))


def _eight_bit(image: Image.Image) -> Image.Image:
    """RGB, RGBA, L, LA or CMYK, in which resizing is right (a palette's or 16-bit picture's resizing is not)."""
    if image.mode.startswith("I"):
        # 16-bit greys come as I;16 or I; Pillow's own conversion would clip at 255.
        grey = np.asarray(image)
        if grey.min() < 0 or grey.max() > 65535:
            raise ValueError("a picture of 32-bit numbers has no defined range; save it with 8 or 16 bits")
        return Image.fromarray((grey >> 8).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("a picture of floating-point numbers has no defined range; save it with 8 or 16 bits")
    if image.has_transparency_data:
        return image if image.mode in {"RGBA", "LA"} else image.convert("RGBA")
    return image if image.mode in {"RGB", "L", "CMYK"} else image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode not in {"RGBA", "LA"}:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image)
    return white.convert("RGB")
