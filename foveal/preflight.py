"""What is checked before a device is taken: what this version can do, the model's family, its processor."""

from __future__ import annotations

from pathlib import Path

from foveal.config import Config
from foveal.config.rules import no_effect, unsupported
from foveal.data.processing import Processing, load_processing
from foveal.errors import ConfigError
from foveal.models.families import family_of, read_config
from foveal.track.console import note


def check_runnable(config: Config) -> None:
    """Says which keys have no effect, and refuses what this version cannot do.

    Raises:
        ConfigError: lists everything that is asked for and not there yet.
    """
    for line in no_effect(config):
        note(line)
    problems = unsupported(config)
    if problems:
        raise ConfigError("this configuration asks for what this version cannot do:\n" + "\n".join(problems))


def open_processing(config: Config) -> Processing:
    """The tokenizer and processor of the model, after its family has been recognised.

    Raises:
        ConfigError: no model path.
        ModelError: no such model, an unsupported family, or a folder without tokenizer or processor.
    """
    model = config.worker.actor.model
    if not model.model_path:
        raise ConfigError(
            "worker.actor.model.model_path is not set. Give the folder of a Hugging Face model, or a hub id such as "
            "Qwen/Qwen2.5-VL-3B-Instruct."
        )
    family_of(read_config(model.model_path), model.model_path)
    template = config.data.override_chat_template
    return load_processing(
        model.model_path,
        tokenizer_path=model.tokenizer_path,
        trust_remote_code=model.trust_remote_code,
        min_pixels=config.data.min_pixels,
        max_pixels=config.data.max_pixels,
        chat_template=Path(template).read_text(encoding="utf-8") if template else None,
    )
