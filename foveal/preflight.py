"""What is checked before a device is taken: what this version can do, the model's family, its processor."""

from __future__ import annotations

from pathlib import Path

from foveal.algorithm import get_advantage, get_loss
from foveal.config import Config
from foveal.config.rules import missing, no_effect, remarks, unsupported
from foveal.data.processing import Processing, load_processing
from foveal.errors import ConfigError
from foveal.models.families import family_of, read_config
from foveal.rollout.collect import validation_sampling
from foveal.rollout.engine import choose_engine
from foveal.rollout.transformers_engine import check_extra
from foveal.track.console import note
from foveal.types import Sampling


def check_runnable(config: Config) -> None:
    """Refuses a configuration that cannot run, and says which of its keys have no effect.

    Raises:
        ConfigError: lists every key that a run needs and that isn't set, and everything that is not there yet; or the
            user's own estimator or loss cannot be loaded.
    """
    problems = missing(config) + unsupported(config)
    if problems:
        raise ConfigError("this configuration cannot run:\n" + "\n".join(f"  {line}" for line in problems))
    choose_engine(config.worker.rollout.name, say=note)
    _check_validation(validation_sampling(config))
    if not config.trainer.val_only:
        _check_algorithm(config)
    for line in no_effect(config) + remarks(config):
        note(line)


def open_processing(config: Config) -> Processing:
    """The tokenizer and processor of the model, after its family has been recognised.

    Raises:
        ModelError: no such model, an unsupported family, or a folder without tokenizer or processor.
    """
    model = config.worker.actor.model
    assert model.model_path is not None
    family_of(read_config(model.model_path), model.model_path)
    return load_processing(
        model.model_path,
        tokenizer_path=model.tokenizer_path,
        trust_remote_code=model.trust_remote_code,
        min_pixels=config.data.min_pixels,
        max_pixels=config.data.max_pixels,
        chat_template=_chat_template(config),
    )


def _check_validation(sampling: Sampling) -> None:
    check_extra(sampling)
    if type(sampling.max_tokens) is not int or sampling.max_tokens < 1:
        raise ConfigError(
            f"worker.rollout.val_override_config.max_tokens: {sampling.max_tokens!r} given; allowed: an integer ≥ 1"
        )


def _check_algorithm(config: Config) -> None:
    """Loads the estimator and the loss, which may be in files of the user's, and refuses what they can't be given."""
    name = config.algorithm.adv_estimator
    estimator = get_advantage(name)
    get_loss(config.worker.actor.loss_type)
    if estimator.needs_group and config.worker.rollout.n == 1:
        raise ConfigError(
            f"worker.rollout.n: 1 given, but algorithm.adv_estimator={name} compares the answers to one prompt; set "
            "worker.rollout.n to 2 or more"
        )


def _chat_template(config: Config) -> str | None:
    path = config.data.override_chat_template
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.override_chat_template: cannot read {path!r} ({error}); give a Jinja file.") from error
