"""Turning a checkpoint into a Hugging Face folder that anyone can load."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from foveal.errors import CheckpointError, ConfigError
from foveal.models.adapter_files import tensor_name
from foveal.models.lora import FACTORS, Factors
from foveal.models.named_tensors import saved_tensors
from foveal.train.checkpoint import HUGGINGFACE, ActorInfo, actor_folder, build_trained, check_actor
from foveal.train.easyr1_checkpoint import ADAPTER
from foveal.train.hf_folder import DTYPES, write_adapter, write_hf
from foveal.train.merging import BaseWeights
from foveal.train.safetensors_stream import SHARD_BYTES
from foveal.train.shards import ShardReader
from foveal.train.state import check_contents, check_names, saved_weights, weights_of

_NO_DTYPE = f"not a type that weights are saved in. Allowed: {', '.join(DTYPES)}."


def export(
    local_dir: Path,
    target: Path | None = None,
    dtype: str | None = None,
    *,
    model: nn.Module | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes the trained weights with configuration, tokenizer and processor as a Hugging Face folder.

    Weights are read, cast, converted and written some at a time, whatever number of processes saved them. Most memory
    goes to the largest weight, once as saved and once cast, or to the experts of a layer. Names and layouts are those
    of transformers' `save_pretrained`; adapters are added to the weights of the model that training started from, under
    the names that its files have. `target` never holds a part of a model (`hf_folder.write_hf`).

    Args:
        local_dir: `…/global_step_N/actor`, or `…/global_step_N`.
        target: `local_dir/huggingface` by default.
        dtype: a key of `DTYPES`; by default that of the model which training started from. Weights are cast once.
        model: the checkpoint's, on the meta device, given by the run that has just written it; by default it is built,
            and the checkpoint's files are compared with their checksums first.
        shard_bytes: most bytes of a safetensors file.

    Returns:
        The folder.

    Raises:
        CheckpointError: a damaged or incomplete checkpoint, weights that are not finite, or a full disk.
        ConfigError: unknown `dtype`, or `target` is the folder of the model that training started from.
    """
    actor, info = _open(local_dir, dtype)
    if dtype is None and info.source_dtype not in DTYPES:
        given = f"the weights that training started from are {info.source_dtype}"
        raise CheckpointError(f"{actor}: {given}, {_NO_DTYPE} Give --dtype.")
    to = DTYPES[dtype or info.source_dtype]
    reader = ShardReader(actor)
    saved = weights_of(reader.index)
    if model is None:
        check_contents(actor, info)
        with torch.device("meta"):
            model = build_trained(actor, info, dtype=to)
        check_names(actor, {name: entry.size for name, entry in saved.items()}, saved_weights(model))
    if info.lora is None:
        numbers = sum(entry.size.numel() for entry in saved.values())
        tensors = saved_tensors(model, saved, lambda name: reader.tensor(f"model.{name}", to))
    else:
        base = BaseWeights(info.source, model)
        numbers = base.numbers
        tensors = base.merged(lambda layer: _factors(reader, layer), info.lora["lora_alpha"] / info.lora["r"], to)
    target = target or actor / HUGGINGFACE
    if Path(info.source).is_dir() and target.resolve() == Path(info.source).resolve():
        raise ConfigError(f"--target {target}: the model that training started from lies there. Give another folder.")
    return write_hf(
        target,
        tensors,
        expected=numbers,
        configuration=actor / HUGGINGFACE,
        dtype=to,
        shard_bytes=shard_bytes,
    )


def export_adapter(local_dir: Path, target: Path | None = None, dtype: str | None = None) -> Path:
    """Writes the adapters of a checkpoint as a folder that peft loads, whole or not at all.

    Args:
        local_dir: `…/global_step_N/actor`, or `…/global_step_N`.
        target: `local_dir/lora_adapter` by default.
        dtype: a key of `DTYPES`; by default float32, in which adapters are trained.

    Returns:
        The folder.

    Raises:
        CheckpointError: as `export`; or all weights were trained.
        ConfigError: unknown `dtype`.
    """
    actor, info = _open(local_dir, dtype)
    if info.lora is None:
        raise CheckpointError(f"{actor}: all weights were trained, there is no adapter. Merge without --adapter.")
    to = DTYPES[dtype or "float32"]
    check_contents(actor, info)
    reader = ShardReader(actor)
    layers = [name.removesuffix(".lora_A") for name in weights_of(reader.index) if name.endswith(".lora_A")]
    named = {
        tensor_name(layer, factor): reader.tensor(f"model.{layer}.{factor}", to)
        for layer in layers
        for factor in FACTORS
    }
    return write_adapter(target or actor / ADAPTER, named, info.lora | {"base_model_name_or_path": info.source})


def _open(local_dir: Path, dtype: str | None) -> tuple[Path, ActorInfo]:
    """The actor's folder and what it says of itself, after a look at the type that is asked for."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: {_NO_DTYPE}")
    actor = actor_folder(local_dir)
    return actor, check_actor(actor)


def _factors(reader: ShardReader, layer: str) -> Factors | None:
    names = [f"model.{layer}.{factor}" for factor in FACTORS]
    if names[0] not in reader.index:
        return None
    a, b = (reader.tensor(name) for name in names)
    return a, b
