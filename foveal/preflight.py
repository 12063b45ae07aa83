"""What is checked before a device is taken: what this version can do, the model's family, its processor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foveal.algorithm import get_advantage, get_loss
from foveal.cluster.devices import settle_devices
from foveal.cluster.topology import topology_problems
from foveal.config import Config
from foveal.config.rules import missing, no_effect, remarks, unsupported
from foveal.data.processing import Processing, load_processing
from foveal.errors import ConfigError
from foveal.models.families import family_of, read_config
from foveal.models.lora_setup import adopt_adapters, check_adapters
from foveal.rollout.collect import training_sampling, validation_sampling
from foveal.rollout.engine import choose_engine
from foveal.rollout.transformers_engine import check_extra
from foveal.rollout.vllm_available import check_sampling, untested_version
from foveal.track.console import note, warn
from foveal.train.lowmem import check_torchao

if TYPE_CHECKING:
    import torch


def check_runnable(config: Config, *, scored: bool = True) -> None:
    """Refuses a configuration that cannot run, and says which of its keys have no effect.

    Args:
        scored: whether answers are; without, the keys of rewards and advantages don't matter.

    Raises:
        ConfigError: lists every key that a run needs and that isn't set, and everything that is not there yet; or there
            are fewer devices than it asks for, or they cannot be divided so; or the engine cannot run here, or cannot
            sample so; or the user's own estimator or loss cannot be loaded.
    """
    problems = missing(config, scored=scored) + unsupported(config)
    if problems:
        raise ConfigError("this configuration cannot run:\n" + "\n".join(f"  {line}" for line in problems))
    settle_devices(config)
    trains = scored and not config.trainer.val_only
    adopt_adapters(config)
    check_adapters(config, critic=trains and config.algorithm.uses_critic)
    engine = choose_engine(config, say=note)
    if problems := topology_problems(config, engine):
        raise ConfigError("the devices cannot work together like this:\n" + "\n".join(f"  {line}" for line in problems))
    _check_sampling(config, engine)
    if trains:
        if config.trainer.async_rollout:
            _correct_staleness(config)
        _check_algorithm(config)
        check_torchao(config)
    for line in no_effect(config, engine) + remarks(config):
        note(line)


def open_processing(config: Config) -> Processing:
    """The tokenizer and processor of the model, after its family has been recognised.

    Raises:
        ModelError: no such model, an unsupported family, or a folder without tokenizer or processor.
    """
    model = config.worker.actor.model
    assert model.model_path is not None
    family_of(read_config(model.model_path), model.model_path)
    processing = load_processing(
        model.model_path,
        tokenizer_path=model.tokenizer_path,
        trust_remote_code=model.trust_remote_code,
        min_pixels=config.data.min_pixels,
        max_pixels=config.data.max_pixels,
        chat_template=_chat_template(config),
        video_fps=config.data.video_fps,
    )
    processing.feature_dtype = _feature_dtype(config)
    return processing


def _feature_dtype(config: Config) -> torch.dtype | None:
    """bfloat16 on a GPU where all that reads pixel values would round them to it anyway: half the bytes to keep."""
    import torch

    worker = config.worker
    models = [worker.actor, *([worker.critic] if config.algorithm.uses_critic else [])]
    held = [(model.weights_dtype("cuda"), model.fsdp.mp_param_dtype) for model in models]
    compute = {mixed if weights == "fp32" else weights for weights, mixed in held}
    all_bf16 = compute | {worker.rollout.dtype} == {"bf16"}
    return torch.bfloat16 if all_bf16 and torch.cuda.is_available() else None


def _check_sampling(config: Config, engine: str) -> None:
    validation = validation_sampling(config)
    if engine == "transformers":
        check_extra(validation)
        return
    untested = untested_version()
    if untested is not None:
        warn(untested)
    for sampling in (validation, training_sampling(config)):
        check_sampling(sampling)


def _correct_staleness(config: Config) -> None:
    """Answers that are sampled ahead come from weights before the last update, which is corrected unless told
    otherwise."""
    algorithm, rollout = config.algorithm, config.worker.rollout
    if "algorithm.correction" in config.given or algorithm.old_logprobs == "rollout":
        return
    if not training_sampling(config).full_distribution:
        cuts = {"worker.rollout.top_p": rollout.top_p < 1, "worker.rollout.top_k": rollout.top_k > 0}
        warn(
            "trainer.async_rollout: answers are one step old, and nothing corrects for it, since with "
            f"{' and '.join(key for key, cuts_it in cuts.items() if cuts_it)} the engine's log-probabilities are not "
            "those of the distribution that is trained"
        )
        return
    algorithm.correction = "tis"
    note("trainer.async_rollout: answers are one step old, which algorithm.correction=tis corrects for")


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
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, UnicodeDecodeError) as error:  # RuntimeError: a `~name` without a home
        raise ConfigError(f"data.override_chat_template: cannot read {path!r} ({error}); give a Jinja file.") from error
