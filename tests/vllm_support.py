"""A live vLLM engine with a tiny model, on the CPU, and the trainer's side of it."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from foveal.config import Config, load_config
from foveal.data.processing import Processing, load_processing
from foveal.data.video import Stills, pack_stills
from foveal.models.attention import install
from foveal.models.loading import load_model
from foveal.models.lora import adapter_config, adapter_tensors, add_lora, lora_layers
from foveal.models.named_tensors import named_tensors
from foveal.quickstart.tiny import Family, build_tiny
from foveal.rollout.vllm_engine import VllmEngine
from foveal.train.layout import PromptLayouts
from foveal.train.scorer import TokenScorer
from foveal.train.scoring import Packer, write_logprobs
from foveal.types import Group, Media, Prompt


class Side:
    """A model, its processing, and an engine that samples with its weights."""

    def __init__(self, folder: Path, family: Family, *overrides: str) -> None:
        if not folder.exists():
            build_tiny(folder, family)
        self.processing: Processing = load_processing(str(folder))
        self.config: Config = load_config(
            [
                f"worker.actor.model.model_path={folder}",
                "worker.rollout.n=5",
                "worker.rollout.name=vllm",
                "worker.rollout.max_num_batched_tokens=1024",
                "data.max_prompt_length=256",
                "data.max_response_length=256",
                "data.rollout_batch_size=12",
                "worker.actor.global_batch_size=12",
                "worker.rollout.tensor_parallel_size=1",
                "trainer.n_gpus_per_node=1",
                *overrides,
            ]
        )
        device = torch.device("cpu")
        self.model: Any = load_model(str(folder), dtype=torch.float32, device=device)
        install(self.model)
        self.version = -1
        if self.config.worker.actor.model.lora.rank:
            add_lora(self.model, self.config.worker.actor.model.lora)
        self.engine = VllmEngine(self.config, self.processing, model_path=str(folder), device=device, images=2)
        self.hand_over()

    def hand_over(self) -> None:
        self.version += 1
        apart = self.engine.takes_adapters
        self.engine.update_weights(named_tensors(self.model, merge=not apart), self.version)
        if apart:
            self.hand_over_adapter()

    def hand_over_adapter(self) -> None:
        self.engine.update_adapter(adapter_tensors(self.model), adapter_config(self.model), self.version)

    def change_adapter(self, part: str = "") -> None:
        """Gives the adapters of a part of the model other values."""
        generator = torch.Generator().manual_seed(self.version + 1)
        for name, layer in lora_layers(self.model).items():
            if part in name:
                layer.lora_B.data = 0.3 * torch.randn(layer.lora_B.shape, generator=generator)

    @contextmanager
    def other_weights(self) -> Iterator[None]:
        """Within the block the model's weights may be changed; at its end both sides have those from before."""
        saved = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        try:
            with torch.no_grad():
                yield
        finally:
            with torch.no_grad():
                for name, weight in self.model.named_parameters():
                    weight.copy_(saved[name])
            self.hand_over()

    def gap(self, groups: list[Group], temperature: float = 1.0) -> float:
        """The largest difference between the engine's log-probabilities and the trainer's."""
        scorer = TokenScorer(
            self.model, forbidden_ids=self.processing.forbidden_ids, temperature=temperature, autocast=None
        )
        packer = Packer(
            budget=4096,
            shared_prefix=True,
            layouts=PromptLayouts(self.model, self.processing.features),
            device=torch.device("cpu"),
        )
        responses = [r for g in groups for r in g.responses if len(r.token_ids)]
        for response in responses:
            response.columns.pop("trainer", None)  # of former weights
        write_logprobs(scorer, packer, groups, "trainer")
        return max(float(np.abs(r.logprobs - r.columns["trainer"]).max()) for r in responses)

    def prompt(self, number: int, pictures: int, question: str = "", videos: int = 0, frames: int = 12) -> Prompt:
        media = [picture(10 * number + k) for k in range(pictures)]
        media += [video(10 * number + k, frames) for k in range(videos)]
        parts: list[dict[str, str]] = [{"type": medium.kind} for medium in media]
        question = question or f"What is shown, {number}? " * (1 + number % 3)
        content = [*parts, {"type": "text", "text": question}]
        text = self.processing.render([{"role": "user", "content": content}])
        ids, expanded, features = self.processing.encode(text, media)
        return Prompt(f"train-0-{number}", ids, expanded, media, {}, number, "", features)

    def prompts(self, pictures: Iterable[int]) -> list[Prompt]:
        return [self.prompt(number, count) for number, count in enumerate(pictures)]


def video(seed: int, frames: int = 12) -> Media:
    """Small and long: the positions along its time go beyond those of its height and width."""
    stills = Stills(tuple(picture(seed + number, 32, 64).data for number in range(frames)), fps=2.0)
    return Media("video", pack_stills(stills, "video"), f"video {seed}")


def picture(seed: int, height: int = 64, width: int = 96) -> Media:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return Media("image", data.getvalue(), f"picture {seed}")
