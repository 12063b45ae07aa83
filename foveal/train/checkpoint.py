"""The folders of a checkpoint. The actor's holds its state, and what a Hugging Face folder needs besides.

actor/.metadata, *.distcp   foveal.train.state
actor/foveal.json           ActorInfo
actor/huggingface/          config.json and generation_config.json of the source model, tokenizer, processor
critic/…, foveal.json       its state alone (foveal.train.critic); only where there is a critic
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from foveal.errors import CheckpointError
from foveal.train.files import write_json
from foveal.train.state import Manifest, distinct_tensors, load_state, read_manifest, save_state, write_manifest

HUGGINGFACE = "huggingface"


@dataclass(frozen=True)
class ActorInfo(Manifest):
    """What `foveal.json` says of an actor.

    Attributes:
        model_class: name of the class in transformers, as "Qwen3VLForConditionalGeneration".
        source: the folder or hub id that training started from.
        source_dtype: in which the source model's weights are stored, as "bfloat16": the dtype of an export.
        tied_weights: whether some weights go by two names (usually output head and token embedding).
    """

    model_class: str
    source: str
    source_dtype: str
    tied_weights: bool


def save_actor(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    source_path: str,
    save_processing: Callable[[Path], None],
    override_config: dict[str, Any] | None = None,
) -> None:
    """Writes the weights, the optimizer's state and the configuration files of a model into `folder`.

    With a process group every process must call this.

    Args:
        folder: made when absent.
        optimizer: None leaves its state out (`trainer.save_model_only`).
        source_path: the folder or hub id that `model` was loaded from.
        save_processing: writes tokenizer, processor and chat template into the folder it is given.
        override_config: top-level keys of config.json that were changed when the model was loaded.

    Raises:
        OSError: the disk refused (full, read-only, …).
    """
    tied = len(distinct_tensors(model)) < len(model.state_dict())
    manifest = save_state(folder, model, optimizer)
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    hf_folder = folder / HUGGINGFACE
    hf_folder.mkdir(exist_ok=True)
    save_processing(hf_folder)
    _copy_configuration(source_path, hf_folder, override_config or {})
    info = ActorInfo(
        **asdict(manifest),
        model_class=type(model).__name__.removeprefix("FSDP"),
        source=source_path,
        source_dtype=_source_dtype(source_path),
        tied_weights=tied,
    )
    write_manifest(folder, info)


def load_actor(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Reads weights (cast to the model's own dtype) and, when asked for, the optimizer's state, all in place.

    Args:
        folder: an actor folder or the `global_step_N` folder around it.
        optimizer: starts afresh, with a line that says so, where the checkpoint holds weights only.

    Raises:
        CheckpointError: a file is missing or cut, or the checkpoint belongs to another model or optimizer.
    """
    folder = actor_folder(folder)
    load_state(folder, check_actor(folder), model, optimizer)


def load_trained(folder: Path, *, dtype: torch.dtype, attn_implementation: str = "sdpa") -> nn.Module:
    """Builds the model of a checkpoint on the CPU with its trained weights, cast once to `dtype`, in eval mode.

    Only the checkpoint is read: the model that training started from need not exist any more.

    Raises:
        CheckpointError: as `load_actor`, or a missing or unknown config.json.
    """
    import transformers
    from transformers.initialization import no_init_weights

    folder = actor_folder(folder)
    info = check_actor(folder)
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
        model = model_class._from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    model.tie_weights()
    load_actor(folder, model, None)
    return model.eval()


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


def _copy_configuration(source: str, target: Path, overrides: dict[str, Any]) -> None:
    """Copies config.json and, where there is one, generation_config.json."""
    from transformers.utils import cached_file

    shutil.copyfile(_required_file(source, "config.json"), target / "config.json")
    generation = cached_file(
        source,
        "generation_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if generation is not None:
        shutil.copyfile(generation, target / "generation_config.json")
    if overrides:
        path = target / "config.json"
        write_json(path, json.loads(path.read_text(encoding="utf-8")) | overrides)


def _source_dtype(source: str) -> str:
    """The dtype of the source model's weights, as "bfloat16": what config.json says, else what its first weight is."""
    from safetensors import safe_open
    from transformers.utils import cached_file

    config = json.loads(_required_file(source, "config.json").read_text(encoding="utf-8"))
    for place in (config, config.get("text_config", {})):
        for key in ("dtype", "torch_dtype"):
            if isinstance(place.get(key), str):
                return str(place[key]).removeprefix("torch.")
    found = cached_file(source, "model.safetensors", _raise_exceptions_for_missing_entries=False)
    if found is None:
        index = _required_file(source, "model.safetensors.index.json").read_text(encoding="utf-8")
        found = str(_required_file(source, next(iter(json.loads(index)["weight_map"].values()))))
    with safe_open(found, framework="pt") as weights:
        return str(weights.get_tensor(next(iter(weights.keys()))).dtype).removeprefix("torch.")


def _required_file(source: str, name: str) -> Path:
    from transformers.utils import cached_file

    return Path(str(cached_file(source, name)))
