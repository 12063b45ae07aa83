"""What a model's own processor makes of a video: which frames, of what size, in how many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from foveal.data.images import Size
from foveal.data.media import refused_size
from foveal.data.video import VideoHeader, read_frames, unpack_stills, video_header
from foveal.types import Media

if TYPE_CHECKING:
    import torch

FRAME_TOKENS = 768
"""The most that a frame pair may take: VIDEO_MAX_TOKEN_NUM of qwen-vl-utils, which the Qwen-VL models come with."""


class VideoRule:
    """The sampling and resizing of a processor, at a number of frames a second.

    Args:
        processor: a Qwen-VL processor; its `video_processor` decides.
        fps: frames a second that are sampled (`data.video_fps`).
    """

    def __init__(self, processor: Any, fps: float) -> None:
        self.processor = processor
        self.video_processor = processor.video_processor
        self.fps = fps

    def sampled(self, header: VideoHeader) -> list[int]:
        """The numbers of the frames that are used, ascending.

        Pictures without a rate are all used, up to the processor's `max_frames`. A video of too few frames for one
        token's worth of time shows its last one again.
        """
        from transformers.video_utils import VideoMetadata

        temporal = self.video_processor.temporal_patch_size
        if header.frames <= temporal or (header.fps is None and header.frames <= self.video_processor.max_frames):
            numbers = list(range(header.frames))
            return numbers + numbers[-1:] * (temporal - header.frames)
        metadata = VideoMetadata(total_num_frames=header.frames, fps=header.fps or self.fps)
        return [int(number) for number in self.video_processor.sample_frames(metadata=metadata, fps=self.fps)]

    def grid(self, header: VideoHeader) -> tuple[int, int, int]:
        """Patches along time, height and width.

        Raises:
            ValueError: the processor refuses the size (beyond an aspect ratio of 200).
        """
        frames = len(self.sampled(header))
        height, width = self._frame_size(header.size, frames)
        patch = self.video_processor.patch_size
        return -(-frames // self.video_processor.temporal_patch_size), height // patch, width // patch

    def tokens(self, header: VideoHeader) -> int:
        """Tokens that take the place of the video's placeholder, those of its timestamps included; errors as `grid`."""
        import torch

        inputs = {"video_grid_thw": torch.tensor([self.grid(header)]), "video_metadata": [self._metadata(header)]}
        text = self.processor.replace_video_token(inputs, video_idx=0)
        pad = self.processor.video_token
        # The placeholders are special tokens, so what stands between them is tokenised by itself.
        rest = self.processor.tokenizer(text.replace(pad, ""), add_special_tokens=False)["input_ids"]
        return int(text.count(pad) + len(rest))

    def clip(self, medium: Media) -> tuple[torch.Tensor, Any]:
        """The sampled frames, (frames, 3, height, width) uint8 in the size that the model sees, and what the processor
        must be told of them.

        Raises:
            PictureError: damaged, not a video, or of a size that the processor refuses.
        """
        import torch
        from transformers.image_utils import SizeDict
        from transformers.video_processing_utils import BaseVideoProcessor

        place = unpack_stills(medium.data, medium.name)
        header = video_header(place, medium.name)
        metadata = self._metadata(header)
        try:
            height, width = self._frame_size(header.size, len(metadata.frames_indices))
        except ValueError as error:
            raise refused_size(medium.name, header, error) from error

        def reduce(frame: np.ndarray) -> np.ndarray:
            pixels = torch.from_numpy(frame).permute(2, 0, 1).contiguous()[None]
            resized = BaseVideoProcessor.resize(
                self.video_processor,
                pixels,
                size=SizeDict(height=height, width=width),
                resample=self.video_processor.resample,
            )
            return resized[0].numpy()

        frames = read_frames(place, medium.name, metadata.frames_indices, reduce)
        return torch.from_numpy(np.stack(frames)), metadata

    def _metadata(self, header: VideoHeader) -> Any:
        from transformers.video_utils import VideoMetadata

        fps = header.fps or self.fps
        return VideoMetadata(total_num_frames=header.frames, fps=fps, frames_indices=self.sampled(header))

    def _frame_size(self, size: Size, frames: int) -> Size:
        """The processor's own resizing, tried on pixels that take no memory: it has no other way to ask."""
        import torch

        own = self.video_processor
        blank = torch.empty((1, frames, 3, *size), dtype=torch.uint8, device="meta")
        resized = own.resize(
            blank,
            size=own.size,
            resample=own.resample,
            factor=own.patch_size * own.merge_size,
            temporal_factor=own.temporal_patch_size,
            cap_pixels_per_frame=own.cap_pixels_per_frame,
        )
        return resized.shape[-2], resized.shape[-1]


def bound_video_pixels(video_processor: Any, max_pixels: int | None) -> None:
    """Bounds the frames of videos by `data.max_pixels`, and a whole video by what Qwen's own code allows.

    That code (`fetch_video` of qwen-vl-utils) gives each frame an even share of a budget. transformers has it behind
    `cap_pixels_per_frame`, off up to 5.21, where a minute of video may have more tokens than the model's context.
    """
    from transformers import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor

    video_processor.cap_pixels_per_frame = True
    size = dict(video_processor.size)
    pixels_per_token = (video_processor.patch_size * video_processor.merge_size) ** 2
    largest = (
        FRAME_TOKENS * pixels_per_token if max_pixels is None else min(max_pixels, FRAME_TOKENS * pixels_per_token)
    )
    if isinstance(video_processor, Qwen3VLVideoProcessor):  # its size bounds all frames together
        video_processor.max_video_tokens = max(min(video_processor.max_video_tokens, largest // pixels_per_token), 1)
    elif isinstance(video_processor, Qwen2VLVideoProcessor):
        size["longest_edge"] = min(size["longest_edge"], largest)
    # The share is never below 1.05 times the lower bound, which would override the upper one.
    size["shortest_edge"] = min(size["shortest_edge"], int(largest / 1.05))
    video_processor.size = type(video_processor.size)(**size)
