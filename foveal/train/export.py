"""Turning a checkpoint into a Hugging Face folder that anyone can load."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from foveal.errors import CheckpointError, ConfigError
from foveal.models.loading import DTYPES as SHORT_DTYPES
from foveal.track.console import note
from foveal.train.checkpoint import HUGGINGFACE, actor_folder, check_actor, load_trained
from foveal.train.files import free_space, fsync_tree, write_json
from foveal.train.state import distinct_tensors

DTYPES = SHORT_DTYPES | {str(dtype).removeprefix("torch."): dtype for dtype in SHORT_DTYPES.values()}
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


def export(local_dir: Path, target: Path | None = None, dtype: str | None = None) -> Path:
    """Writes the trained weights with configuration, tokenizer and processor as a Hugging Face folder.

    Everything is written beside `target` and checked first; the weights come in last, so `target` never holds a part of
    a model. Files of other names in `target` stay. Names and layouts are those of transformers' `save_pretrained`.

    Args:
        local_dir: `…/global_step_N/actor`, or `…/global_step_N`.
        target: `local_dir/huggingface` by default.
        dtype: a key of `DTYPES`; by default that of the model which training started from. Weights are cast once.

    Returns:
        The folder.

    Raises:
        CheckpointError: a damaged or incomplete checkpoint, weights that are not finite, or a full disk.
        ConfigError: unknown `dtype`.
    """
    allowed = f"not a type that weights are saved in. Allowed: {', '.join(DTYPES)}."
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: {allowed}")
    actor = actor_folder(local_dir)
    target = target or actor / HUGGINGFACE
    name = dtype or check_actor(actor).source_dtype
    if name not in DTYPES:
        raise CheckpointError(f"{actor}: the weights that training started from are {name}, {allowed} Give --dtype.")
    model = load_trained(actor, dtype=DTYPES[name])
    _check_finite(model, actor, name)
    partial = target.with_name(f"{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        _write(model, actor / HUGGINGFACE, partial)
        _check_written(model, partial)
        fsync_tree(partial)
        _put_in_place(partial, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{target}: cannot write the model: {error} ({free_space(target)}).") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def merge_command(argv: list[str]) -> int:
    """`foveal merge` and `scripts/model_merger.py`.

    Returns:
        0

    Raises:
        CheckpointError: as `export` and `upload`.
    """
    parser = argparse.ArgumentParser(prog="foveal merge", description="Turn a checkpoint into a Hugging Face folder.")
    parser.add_argument("--local_dir", type=Path, required=True, help="the folder global_step_N/actor of a run")
    parser.add_argument("--target", type=Path, help="folder to write (default: LOCAL_DIR/huggingface)")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (default: that of the source model)")
    parser.add_argument("--hf_upload_path", metavar="ID", help="Hugging Face repository to push the folder to")
    options = parser.parse_args(argv)
    folder = export(options.local_dir, options.target, options.dtype)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    note(f"saved {size / 1e9:.3g} GB of weights, tokenizer and configuration to {folder}")
    if options.hf_upload_path:
        note(f"uploaded to {upload(folder, options.hf_upload_path)}")
    return 0


def upload(folder: Path, repo_id: str) -> str:
    """Pushes a Hugging Face folder to the Hub, making the repository when it is absent; returns its address.

    Raises:
        CheckpointError: the Hub cannot be reached or refuses; the folder stays.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repo_id, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=folder)
    except Exception as error:  # the HTTP client's own errors share no base with the Hub's
        raise CheckpointError(
            f"--hf_upload_path {repo_id}: the upload failed ({type(error).__name__}: {error}). The model lies in "
            f"{folder}; log in with `hf auth login` and repeat, or push it with `hf upload {repo_id} {folder}`."
        ) from error
    return str(address)


def _check_finite(model: nn.Module, actor: Path, dtype: str) -> None:
    bad = [name for name, tensor in model.named_parameters() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise CheckpointError(
            f"{actor}: {len(bad)} weights hold values that are not finite in {dtype} (the first is {bad[0]}). Training "
            "diverged, or the values are too large for this type: use an earlier checkpoint, or --dtype bf16."
        )


def _write(model: Any, configuration: Path, folder: Path) -> None:
    """Fills `folder` with the weights and with the files of `configuration`, which replace transformers' own."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    shutil.copytree(configuration, folder, ignore=shutil.ignore_patterns(*WEIGHTS), dirs_exist_ok=True)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    _set_dtype(config, str(model.dtype).removeprefix("torch."))
    write_json(path, config)


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Sets the dtype at the top, and wherever a part of the model states one; all other keys stay."""
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    config[key] = dtype
    for part in config.values():
        if isinstance(part, dict) and {"dtype", "torch_dtype"} & part.keys() and "quant_method" not in part:
            _set_dtype(part, dtype)


def _check_written(model: nn.Module, folder: Path) -> None:
    """Opens the weight files and compares them with the model: they must hold as many numbers.

    Not by name: `save_pretrained` may store tensors under other names and layouts than the module has (experts).
    """
    expected = sum(tensor.numel() for tensor in distinct_tensors(model).values())
    written = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dictionary)
                written += math.prod(weights.get_slice(name).get_shape())
    if written != expected:
        raise CheckpointError(f"{folder}: {written:,} of {expected:,} numbers were written; the model is incomplete.")


def _put_in_place(partial: Path, target: Path) -> None:
    """Moves the files of `partial` into `target`: old weights go first, new ones come last."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in WEIGHTS:
        for old in target.glob(pattern):
            old.unlink()
    files = [path.relative_to(partial) for path in partial.rglob("*") if path.is_file()]
    for file in sorted(files, key=lambda file: (file.name.endswith(".index.json"), file.suffix == ".safetensors")):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial / file, target / file)
    fsync_tree(target)
