"""Videos made by code."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np


def film_frames(count: int, height: int = 48, width: int = 64) -> np.ndarray:
    """(count, height, width, 3) uint8, grey: lighter from frame to frame, the upper half by 40 and the left by 20."""
    frames = np.zeros((count, height, width, 3), np.uint8)
    frames += (np.arange(count) % 32 * 6).astype(np.uint8)[:, None, None, None]
    frames[:, : height // 2] += 40
    frames[:, :, : width // 2] += 20
    return frames


def frame_number(frame: np.ndarray) -> int:
    """Which of the frames of `film_frames` (of the first 32) this is."""
    return round((float(frame.mean()) - 30) / 6)


def film(
    path: Path,
    count: int = 30,
    rate: int | Fraction = 10,
    *,
    height: int = 48,
    width: int = 64,
    codec: str = "libx264",
    rotation: int = 0,
    pixels: str = "yuv420p",
) -> Path:
    """Writes a video; the ending of its name decides the container."""
    import av

    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        stream.bit_rate = 2_000_000
        if rotation:
            stream.set_display_rotation(rotation)
        for frame in film_frames(count, height, width):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format=pixels)))
        container.mux(stream.encode())
    return path
