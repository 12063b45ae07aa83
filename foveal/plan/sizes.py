"""What a model's config.json says of its size: its weights counted, on the meta device, and what they compute."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foveal.config import Config
from foveal.config.schema_model import ModelConfig
from foveal.errors import FovealError, ModelError
from foveal.models.flops import FlopCounter
from foveal.models.loading import empty_model
from foveal.models.lora import is_factor
from foveal.models.lora_setup import empty_adapted
from foveal.models.parts import freeze_parts, part_of
from foveal.models.positions import decoder_of
from foveal.models.vision import vision_tower
from foveal.train.sharding import is_trained, whole_weights


@dataclass(frozen=True)
class ModelSizes:
    """A model as a configuration has it trained.

    Attributes:
        config: of the transformers model.
        parameters: its weights, without adapters.
        adapters: weights of these.
        trained: weights that are.
        tower_trained: whether any of the vision tower are.
        whole: weights that are not spread over devices: those of the vision tower that aren't trained.
        tower: all weights of the vision tower and what follows it, as a model that isn't trained has them whole.
        layer: weights of the largest decoder layer.
        embedding: weights of the token embedding, as many as of an output layer.
        tied: the output layer is the embedding.
        units: modules that are gathered on their own where the model is spread over devices (`sharding.shard`).
        flops: counts operations.
    """

    config: Any
    parameters: int
    adapters: int
    trained: int
    tower_trained: bool
    whole: int
    tower: int
    layer: int
    embedding: int
    tied: bool
    units: int
    flops: FlopCounter

    @property
    def text(self) -> Any:
        return self.config.get_text_config()

    @property
    def sees(self) -> bool:
        """Whether the model takes pictures."""
        return getattr(self.config, "vision_config", None) is not None

    @property
    def key_bytes(self) -> int:
        """Bytes of keys and values of a token in all layers, in 16 bits."""
        text = self.text
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return 2 * 2 * int(text.num_hidden_layers * text.num_key_value_heads * head)


def with_folder(config: Config) -> Config:
    """The configuration with each `model_path` that names a config.json replaced by a folder that holds it."""
    config = config.model_copy(deep=True)
    for model in (config.worker.actor.model, config.worker.critic.model):
        path = Path(model.model_path or "")
        if path.suffix == ".json" and path.is_file():
            model.model_path = str(path.parent if path.name == "config.json" else _copy_of(path.resolve()).name)
    return config


def measure(model: ModelConfig, source: str) -> ModelSizes:
    """Counts a model's weights from its configuration alone; takes seconds the first time.

    Args:
        model: what is trained of it.
        source: folder or hub id.

    Raises:
        ModelError: there is no such model, its family isn't supported, or its config.json describes none.
    """
    try:
        return _measured(model.model_dump_json(), source)
    except FovealError:
        raise
    except Exception as error:  # of transformers' classes, whatever numbers that cannot be make them raise
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{source}: no model can be built from its config.json ({type(error).__name__}: {reason}). Give the "
            "config.json of a Hugging Face model as it was published."
        ) from error


@lru_cache(maxsize=32)
def _measured(model_json: str, source: str) -> ModelSizes:
    keys = ModelConfig.model_validate_json(model_json)
    model: Any
    if keys.lora.rank:
        model = empty_adapted(keys, source)
    else:
        model = empty_model(
            source,
            dtype=torch.float32,
            device=torch.device("cpu"),
            trust_remote_code=keys.trust_remote_code,
            override_config=keys.override_config,
        )
        freeze_parts(model, keys)
    named = dict(model.named_parameters())
    adapters = sum(p.numel() for name, p in named.items() if is_factor(name))
    tower = vision_tower(model)
    blocks = [] if tower is None else [block for block in tower.get_submodule("blocks").children() if is_trained(block)]
    layers = decoder_of(model).layers
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    return ModelSizes(
        config=model.config,
        parameters=sum(p.numel() for p in named.values()) - adapters,
        adapters=adapters,
        trained=sum(p.numel() for p in named.values() if p.requires_grad),
        tower_trained=any(p.requires_grad for name, p in named.items() if part_of(name) == "vision"),
        whole=sum(p.numel() for p in whole_weights(model)),
        tower=0 if tower is None else sum(p.numel() for name, p in tower.named_parameters() if not is_factor(name)),
        layer=max(_count(layer) for layer in layers),
        embedding=embedding.numel(),
        tied=tied,
        units=len(layers) + (blocks != []) + (not tied) + 1,
        flops=FlopCounter(model),
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@lru_cache
def _copy_of(path: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder that is gone when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="foveal-plan-")
    (Path(folder.name) / "config.json").write_bytes(path.read_bytes())
    return folder
