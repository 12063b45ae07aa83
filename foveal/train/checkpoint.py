"""The folders of a checkpoint. The actor's holds its state, and what a Hugging Face folder needs besides.

actor/.metadata, *.distcp   foveal.train.state; and foveal.train.rng
actor/foveal.json           ActorInfo
actor/huggingface/          config.json and generation_config.json of the source model, tokenizer, processor
critic/…, foveal.json       its state alone (foveal.train.critic); only where there is a critic
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foveal.errors import CheckpointError
from foveal.models.lora import adapter_config, has_lora, restore_lora
from foveal.train.description import Description
from foveal.train.processes import in_first_process
from foveal.train.state import Manifest, load_state, read_manifest, write_manifest, write_state

HUGGINGFACE = "huggingface"


@dataclass(frozen=True, kw_only=True)
class ActorInfo(Manifest):
    """What `foveal.json` says of an actor.

    Attributes:
        model_class: name of the class in transformers, as "Qwen3VLForConditionalGeneration".
        source: the folder or hub id that training started from.
        source_dtype: in which the source model's weights are stored, as "bfloat16": the dtype of an export.
        tied_weights: whether some weights go by two names (usually output head and token embedding).
        lora: adapter_config.json of the adapters that were trained, whose base `source` is; None for all weights.
    """

    model_class: str
    source: str
    source_dtype: str
    tied_weights: bool
    lora: dict[str, Any] | None = None


def write_actor(folder: Path, state: dict[str, Any], description: Description) -> None:
    """Writes the weights, the optimizer's state and the configuration files of a model into `folder`.

    Training may go on meanwhile where `state` is a copy.

    With several processes every one must call this.

    Args:
        folder: made when absent.
        state: from `foveal.train.state.take_state`.
        description: from `describe_actor`.

    Raises:
        OSError: the disk refused (full, read-only, …).
    """
    manifest = write_state(folder, state)

    def describe() -> None:
        description.write_files(folder / HUGGINGFACE)
        write_manifest(folder, ActorInfo(**asdict(manifest), **description.entries))

    in_first_process(describe)


def load_actor(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Reads weights (cast to the model's own dtype) and, when asked for, the optimizer's state, all in place.

    Args:
        folder: an actor folder or the `global_step_N` folder around it.
        optimizer: starts afresh, with a line that says so, where the checkpoint holds weights only.

    Raises:
        CheckpointError: a file is missing or cut, or the checkpoint belongs to another model or optimizer.
    """
    folder = actor_folder(folder)
    info = check_actor(folder)
    _check_adapters(folder, info.lora, model)
    load_state(folder, info, model, optimizer)


def load_trained(folder: Path, *, dtype: torch.dtype) -> nn.Module:
    """Builds the model of a checkpoint on the CPU with its trained weights, cast once to `dtype`, in eval mode.

    Only the checkpoint is read: the model that training started from need not exist any more, unless adapters were
    trained. These stay adapters, in float32.

    Raises:
        CheckpointError: as `load_actor`, or a missing or unknown config.json.
        ModelError: the weights that the adapters belong to can't be read.
    """
    folder = actor_folder(folder)
    info = check_actor(folder)
    with nullcontext() if info.lora is None else torch.device("meta"):
        model = build_trained(folder, info, dtype=dtype)
    if info.lora is not None:
        from foveal.models.filling import fill_weights

        fill_weights(model, info.source, device=torch.device("cpu"))
    load_state(folder, info, model, None)
    return model.eval()


def empty_trained(folder: Path, *, dtype: torch.dtype) -> nn.Module:
    """The model that `load_trained` gives, on the meta device: to be sharded, then filled by `fill_trained`."""
    folder = actor_folder(folder)
    with torch.device("meta"):
        return build_trained(folder, check_actor(folder), dtype=dtype).eval()


def fill_trained(folder: Path, model: nn.Module, device: torch.device) -> None:
    """Fills the model of `empty_trained`, sharded or not.

    Raises:
        CheckpointError, ModelError: as `load_trained`.
    """
    from foveal.models.filling import fill_weights, make_room

    folder = actor_folder(folder)
    info = check_actor(folder)
    if info.lora is None:
        make_room(model, device)
    else:
        fill_weights(model, info.source, device=device)
    load_actor(folder, model, None)


def build_trained(folder: Path, info: ActorInfo, *, dtype: torch.dtype) -> nn.Module:
    """Builds the model of a checkpoint on the default device with its adapters, if it has any; no weights are set.

    Raises:
        CheckpointError: a missing or unknown config.json.
    """
    import transformers
    from transformers.initialization import no_init_weights

    model_class = getattr(transformers, info.model_class, None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise CheckpointError(f"{folder}: transformers {transformers.__version__} has no model {info.model_class}.")
    path = folder / HUGGINGFACE / "config.json"
    try:
        # by its own name: `from_pretrained` takes a default configuration where this file is missing
        config_class: Any = model_class.config_class
        config = config_class.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except Exception as error:  # each configuration class has checks and errors of its own
        raise CheckpointError(f"{path}: cannot read the model's configuration ({error}).") from error
    with no_init_weights():
        model: Any = model_class._from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.tie_weights()
    assert isinstance(model, nn.Module)
    if info.lora is not None:
        restore_lora(model, info.lora)
    return model


def _check_adapters(folder: Path, saved: dict[str, Any] | None, model: nn.Module) -> None:
    """Raises CheckpointError where the model's adapters are not of the kind that was saved."""
    ours = adapter_config(model) if has_lora(model) else None
    for key, what in (("r", "rank"), ("lora_alpha", "alpha")):
        theirs, now = (0 if config is None else config[key] for config in (saved, ours))
        if theirs != now:
            raise CheckpointError(
                f"{folder}: the checkpoint was trained with lora.{what}={theirs}, this run has {now}; set "
                f"worker.actor.model.lora.{what}={theirs}, or start from the merged checkpoint (`foveal merge`)."
            )
    if saved and ours and saved["target_modules"] != ours["target_modules"]:
        raise CheckpointError(
            f"{folder}: the checkpoint has adapters on {', '.join(saved['target_modules'])}, this run on "
            f"{', '.join(ours['target_modules'])}; set lora.target_modules, lora.exclude_modules and what is frozen as "
            "they were, or start from the merged checkpoint (`foveal merge`)."
        )


def actor_folder(folder: Path) -> Path:
    """Accepts `…/global_step_N/actor` and `…/global_step_N`."""
    return folder / "actor" if (folder / "actor").is_dir() else folder


def check_actor(folder: Path) -> ActorInfo:
    """Reads foveal.json and compares every shard file with the size noted there.

    Raises:
        CheckpointError: not an actor folder, written by a newer Foveal, or a file is missing or cut.
    """
    return read_manifest(folder, ActorInfo, what="an actor folder", cure="Give …/global_step_N/actor.")


def check_critic(folder: Path) -> Manifest:
    """Reads foveal.json of a critic's folder and compares every shard file with the size noted there.

    Raises:
        CheckpointError: no such folder, written by a newer Foveal, or a file is missing or cut.
    """
    return read_manifest(
        folder,
        Manifest,
        what="the critic",
        cure="To train a critic from a checkpoint without one, turn its actor into a model (`foveal merge`) and set "
        "worker.actor.model.model_path to the result, in a new run.",
    )
