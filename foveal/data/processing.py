"""The model's own tokenizer and processor: text, pictures and videos to token ids and features."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foveal.data.feature_cache import FeatureCache
from foveal.data.images import Size, decode_image
from foveal.data.media import MediaSize, refused_size
from foveal.data.video import VideoHeader
from foveal.data.video_rule import VideoRule, bound_video_pixels
from foveal.errors import DataError, ModelError
from foveal.models.families import read_config
from foveal.types import Group, Media, Prompt

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

# What the processor returns about the text; the trainer computes masks, token types and positions itself.
TEXT_OUTPUTS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
VISION_ID_KEYS = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
MODEL_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
)


class Processing:
    """The tokenizer and processor of one model.

    Attributes:
        tokenizer: of the model, or of `tokenizer_path`.
        processor: None for models that take text only.
        model_type: as in config.json.
        forbidden_ids: vision and placeholder ids, never to be sampled; empty for models that take text only.
        eos_ids: every id that ends an answer: those of generation_config.json, config.json and the tokenizer.
        pad_id: fills batches.
        feature_dtype: what pixel values are rounded to when they are made; None leaves float32.
        placeholders: the id that stands for a picture, and that for a video, by kind; those that the model has.
        stamps_frames: a video's tokens are interrupted by the time of each frame, as in Qwen3-VL.
        vocabulary: how many ids the model knows; None where its configuration doesn't say.
    """

    def __init__(
        self,
        model_path: str,
        tokenizer_path: str | None,
        tokenizer: PreTrainedTokenizerBase,
        processor: ProcessorMixin | None,
        config: Mapping[str, Any],
        chat_template: str | None,
        video_fps: float = 2.0,
    ) -> None:
        self.tokenizer = tokenizer
        self.processor = processor
        self.model_type: str = config["model_type"]
        self.placeholders = _placeholders(processor, config)
        self.stamps_frames = hasattr(processor, "_calculate_timestamps")
        self.vocabulary: int | None = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
        self.forbidden_ids = _vision_ids(tokenizer, config) if processor is not None else []
        self.eos_ids = _eos_ids(model_path, tokenizer, config)
        self.feature_dtype: torch.dtype | None = None
        self.pad_id: int = _first(tokenizer.pad_token_id, config.get("pad_token_id"), *self.eos_ids)
        self._model_path = model_path
        self._tokenizer_path = tokenizer_path or model_path
        self._own_template = chat_template
        self._forbidden_texts = [str(tokenizer.convert_ids_to_tokens(token)) for token in self.forbidden_ids]
        self._tokens_of_size: dict[MediaSize, int] = {}
        self._videos = VideoRule(processor, video_fps) if "video" in self.placeholders else None
        self._feature_cache = FeatureCache()
        if chat_template is not None:
            tokenizer.chat_template = chat_template
            if processor is not None:
                processor.chat_template = chat_template
        if tokenizer.chat_template is None and getattr(processor, "chat_template", None) is None:
            raise ModelError(
                f"{model_path} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json). "
                f"Use an instruction-tuned model, or give a Jinja file as data.override_chat_template."
            )

    @property
    def image_token_id(self) -> int | None:
        """The placeholder of a picture; None where the model has none."""
        return self.placeholders.get("image")

    @property
    def merge_length(self) -> int:
        """Patches that make one visual token."""
        return self.processor.image_processor.merge_size**2 if self.processor is not None else 1

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The chat template's text for `messages`, up to where the answer starts; one placeholder per medium."""
        of_processor = self.processor is not None and self.processor.chat_template is not None
        renderer: Any = self.processor if of_processor else self.tokenizer
        return renderer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def neutralise(self, text: str) -> str:
        """`text` with the model's vision tokens broken by a zero-width space, so that they are read as plain text.

        A row that quotes `<|image_pad|>` would otherwise hold a placeholder without a picture.
        """
        for token in self._forbidden_texts:
            if token in text:
                text = text.replace(token, f"{token[:2]}\u200b{token[2:]}")
        return text

    def encode(self, text: str, media: Sequence[Media]) -> tuple[list[int], list[int], dict[str, torch.Tensor]]:
        """Tokenises a rendered chat and runs the processor, once.

        Returns:
            The unexpanded ids; the expanded ids; the features: `pixel_values` (patches, values), float32 or
            `feature_dtype`, and `image_grid_thw` (images, 3) int64, in patches; for videos `pixel_values_videos`,
            `video_grid_thw` and, in Qwen2.5-VL, `second_per_grid_ts` (videos,) float32. Without media the ids are the
            same and features are empty.

        Raises:
            PictureError: a picture or video cannot be decoded, or is of a size that the processor refuses.
            DataError: the chat template did not place one placeholder per medium.
        """
        token_ids = self._tokenise([text])[0]
        if not media:
            return token_ids, list(token_ids), {}
        for kind, token_id in self.placeholders.items():
            found, wanted = token_ids.count(token_id), sum(medium.kind == kind for medium in media)
            if found != wanted:
                raise DataError(
                    f"{media[0].name}: the chat template put {found} {kind} placeholders for {wanted} {kind}s. It must "
                    f"write one for each part of type {kind} (see data.override_chat_template)."
                )
        output = self._process(media, text=[text], add_special_tokens=False)
        return token_ids, output["input_ids"][0].tolist(), self._only_features(output)

    def features(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        """What `encode` made of the prompt's media; made again from their bytes where it was left behind or dropped."""
        features = prompt.features
        if features is None:
            features = self._only_features(self._process(prompt.media)) if prompt.media else {}
            prompt.features = features
        if features:
            self._feature_cache.keep(prompt)
        return features

    def hold(self, prompt: Prompt) -> None:
        """Counts the features of a prompt that nobody uses yet: where memory is short, they go before those in use."""
        if prompt.features:
            self._feature_cache.keep(prompt, used=False)

    def pictures(self, media: Sequence[Media]) -> list[Image]:
        """The pictures among the media decoded as the processor gets them (upright RGB).

        Raises:
            PictureError: one cannot be decoded, or is of a size that the processor refuses.
        """
        media = [one for one in media if one.kind == "image"]
        images = [decode_image(one.data, one.name, self._model_size()) for one in media]
        for image, medium in zip(images, media, strict=True):
            size = (image.height, image.width)
            try:
                self.visual_tokens(size)
            except ValueError as error:
                raise refused_size(medium.name, size, error) from error
        return images

    def count_tokens(self, texts: Sequence[str], sizes: Sequence[Sequence[MediaSize]]) -> list[int]:
        """Lengths of the expanded ids, from the sizes of each text's pictures and videos: no pixel is touched.

        Raises:
            ValueError: the processor refuses a size (the Qwen families do beyond an aspect ratio of 200).
        """
        return [
            len(ids) + sum(self.visual_tokens(size) - 1 for size in own)
            for ids, own in zip(self._tokenise(list(texts)), sizes, strict=True)
        ]

    def visual_tokens(self, size: MediaSize) -> int:
        """Tokens that the processor makes of a picture of this (height, width), or of a video: what takes the place of
        its placeholder, the times of the frames included."""
        if size not in self._tokens_of_size:
            self._tokens_of_size[size] = self._count(size)
        return self._tokens_of_size[size]

    def decode(self, group: Group, *, skip_special_tokens: bool) -> None:
        """Sets the text of the group's responses."""
        for response in group.responses:
            ids = response.token_ids.tolist()
            response.text = str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def _count(self, size: MediaSize) -> int:
        processor: Any = self.processor
        if isinstance(size, VideoHeader):
            assert self._videos is not None
            return self._videos.tokens(size)
        if hasattr(processor, "_get_num_multimodal_tokens"):
            return int(processor._get_num_multimodal_tokens(image_sizes=[size]).num_image_tokens[0])
        from PIL import Image

        blank = Image.new("RGB", size[::-1])
        return len(processor(text=[processor.image_token], images=[blank], add_special_tokens=False)["input_ids"][0])

    def identity(self) -> str:
        """A digest of all that decides the tokens of a text and of a picture: other where they may be others."""
        import transformers

        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        parts = [
            transformers.__version__,
            backend.to_str() if backend is not None else json.dumps(self.tokenizer.get_vocab()),
            *(str(getattr(one, "chat_template", None)) for one in (self.tokenizer, self.processor)),
            *(str(token) for token in self.forbidden_ids),
        ]
        for part in ("image_processor", "video_processor"):
            processor = getattr(self.processor, part, None)
            parts.append(processor.to_json_string() if processor is not None else "")
        return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()

    def save(self, folder: str | Path) -> None:
        """Copies tokenizer, processor, chat template and generation config into `folder`, byte for byte.

        Only the chat template differs when `data.override_chat_template` replaced it: the model has been trained under
        the new one.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for source, names in (
            (self._model_path, (*MODEL_FILES, *TEMPLATE_FILES)),
            (self._tokenizer_path, (*TOKENIZER_FILES, *TEMPLATE_FILES)),
        ):
            for name in names:
                path = _source_file(source, name)
                if path is not None and not (self._own_template is not None and name in TEMPLATE_FILES):
                    shutil.copyfile(path, folder / name)
        if self._own_template is not None:
            (folder / TEMPLATE_FILES[0]).write_text(self._own_template, encoding="utf-8")

    def _process(self, media: Sequence[Media], **text: Any) -> Mapping[str, Any]:
        """The processor's output for these media, and for a text where one is given."""
        assert self.processor is not None
        arguments: dict[str, Any] = dict(text, return_tensors="pt")
        if images := self.pictures(media):
            arguments["images"] = images
        if videos := [medium for medium in media if medium.kind == "video"]:
            assert self._videos is not None
            clips, metadata = zip(*(self._videos.clip(medium) for medium in videos), strict=True)
            arguments["videos"] = list(clips)
            # Sampled and resized already, while they were decoded.
            arguments["videos_kwargs"] = {
                "video_metadata": list(metadata),
                "do_sample_frames": False,
                "do_resize": False,
            }
        return self.processor(**arguments)

    def _only_features(self, output: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        features = {name: value for name, value in output.items() if name not in TEXT_OUTPUTS}
        if self.feature_dtype is None:
            return features
        # Times are not rounded: positions are made of them.
        return {k: v.to(self.feature_dtype) if k.startswith("pixel_values") else v for k, v in features.items()}

    def _tokenise(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    def _model_size(self) -> Any:
        """The image processor's own rule, (height, width) → (height, width), where there is one to know."""
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor, smart_resize

        processor = self.processor.image_processor if self.processor is not None else None
        if not isinstance(processor, Qwen2VLImageProcessor):
            return None

        def rule(size: Size) -> Size:
            factor = processor.patch_size * processor.merge_size
            return smart_resize(*size, factor, processor.size["shortest_edge"], processor.size["longest_edge"])

        def target(size: Size) -> Size | None:
            # The processor applies its rule to what it is given. At extreme aspect ratios, where a side cannot be
            # shorter than a token, a second time would change the size once more.
            resized = rule(size)
            return resized if rule(resized) == resized else None

        return target


def load_processing(
    model_path: str,
    *,
    tokenizer_path: str | None = None,
    trust_remote_code: bool = False,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    chat_template: str | None = None,
    video_fps: float = 2.0,
) -> Processing:
    """Loads tokenizer and processor of a folder or hub id.

    Args:
        tokenizer_path: takes the tokenizer from elsewhere.
        min_pixels, max_pixels: bounds on a picture's size as the model sees it; None leaves the processor's own. A
            frame of a video is bounded by `max_pixels` alone.
        chat_template: the text of a Jinja chat template to use instead of the model's.
        video_fps: frames a second that are sampled from a video.

    Raises:
        ModelError: no such model, no tokenizer, no chat template, or a vision-language model without its processor.
    """
    from transformers import AutoTokenizer

    config = read_config(model_path)
    processor = _load_processor(model_path, trust_remote_code) if "vision_config" in config else None
    if processor is not None and tokenizer_path is None:
        tokenizer = processor.tokenizer
    else:
        source = tokenizer_path or model_path
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"cannot load a tokenizer from {source}: {_first_line(error)} "
                f"Copy tokenizer.json and tokenizer_config.json there from the base model."
            ) from error
        if processor is not None:
            processor.tokenizer = tokenizer
    if processor is not None:
        _bound_pixels(processor.image_processor, min_pixels, max_pixels)
        if getattr(processor, "video_processor", None) is not None:
            bound_video_pixels(processor.video_processor, max_pixels)
    return Processing(model_path, tokenizer_path, tokenizer, processor, config, chat_template, video_fps)


def _load_processor(model_path: str, trust_remote_code: bool) -> ProcessorMixin:
    from transformers import AutoProcessor

    names = ("preprocessor_config.json", "processor_config.json")
    missing = ModelError(
        f"{model_path} is a vision-language model without a loadable processor; it needs "
        f"{' or '.join(names)}, as transformers writes them. Copy them from the base model that it was trained from"
    )
    if os.path.isdir(model_path) and not any(Path(model_path, name).is_file() for name in names):
        raise ModelError(f"{missing}. Neither file is in the folder.")
    try:
        processor = AutoProcessor.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"{missing}. Loading says: {_first_line(error)}") from error
    if getattr(processor, "image_processor", None) is None:
        raise ModelError(f"{missing}. What is there makes a {type(processor).__name__} without an image processor.")
    return processor


def _bound_pixels(image_processor: Any, min_pixels: int | None, max_pixels: int | None) -> None:
    # transformers 5 keeps the bounds, which are numbers of pixels, under the names of edges.
    size = dict(image_processor.size)
    if min_pixels is not None:
        size["shortest_edge"] = min_pixels
    if max_pixels is not None:
        size["longest_edge"] = max_pixels
    image_processor.size = type(image_processor.size)(**size)


def _placeholders(processor: ProcessorMixin | None, config: Mapping[str, Any]) -> dict[str, int]:
    kinds = [kind for kind in ("image", "video") if getattr(processor, f"{kind}_processor", None) is not None]
    return {kind: config[f"{kind}_token_id"] for kind in kinds if config.get(f"{kind}_token_id") is not None}


def _vision_ids(tokenizer: PreTrainedTokenizerBase, config: Mapping[str, Any]) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    ids = {vocabulary[token] for token in VISION_TOKENS if token in vocabulary}
    return sorted(ids | {config[key] for key in VISION_ID_KEYS if config.get(key) is not None})


def _eos_ids(model_path: str, tokenizer: PreTrainedTokenizerBase, config: Mapping[str, Any]) -> list[int]:
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:  # a folder need not have one
        generation = None
    text_config = config.get("text_config") or {}
    ids: set[int] = set()
    for eos in (generation, config.get("eos_token_id"), text_config.get("eos_token_id"), tokenizer.eos_token_id):
        ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if not ids:
        raise ModelError(f"{model_path} names no end token: set eos_token_id in its generation_config.json.")
    return sorted(ids)


def _source_file(source: str, name: str) -> Path | None:
    """The file of a model folder, or of the hub's cache, where loading has put it; None if the model has none."""
    if os.path.isdir(source):
        path = Path(source, name)
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(source, name)
    return Path(cached) if isinstance(cached, str) else None


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
