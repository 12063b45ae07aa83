"""Checkpoints that EasyR1 itself wrote, as weights of a model of today's transformers.

global_step_N/actor/model_world_size_W_rank_R.pt   each process's part of the weights (foveal.train.rank_files)
global_step_N/actor/huggingface/                   configuration, tokenizer, processor
global_step_N/actor/lora_adapter/                  adapter_config.json, where a newer version trained LoRA
experiment_config.json                             the run's configuration
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from foveal.errors import CheckpointError
from foveal.models.adapter_files import CONFIG, PREFIX, peft_config, read_info, tensor_name
from foveal.models.disk_names import first_names, names_in_module
from foveal.models.loading import empty_model
from foveal.models.lora import FACTORS, Factors, merged
from foveal.models.lora_targets import short_names
from foveal.models.named_tensors import saved_tensors
from foveal.train.checkpoint import HUGGINGFACE
from foveal.train.description import noted_dtype
from foveal.train.rank_files import RankFiles
from foveal.train.state import check_names

ADAPTER = "lora_adapter"
_FACTOR = re.compile(r"(?P<layer>.+)\.lora_(?P<letter>[AB])\.(?P<adapter>[^.]+)\.weight")
_OTHER_ADAPTER = re.compile(r"\.(lora_[^.]+|modules_to_save|original_module|base_layer)\.")


class EasyR1Checkpoint:
    """An open checkpoint; a context manager.

    Args:
        actor: the folder `global_step_N/actor`.
        lora_alpha: of its adapters; None looks for it in the checkpoint and in the run's configuration.

    Attributes:
        dtype: of the weights by config.json, as "float32": EasyR1 notes there the type that it trained in.
        numbers: how many the model's weights have together.
        has_lora: whether adapters were trained.

    Raises:
        CheckpointError: files are missing, damaged, of several runs, or hold anything but tensors; or the weights are
            not those of the model in `huggingface/`; or alpha is unknown.
        ModelError: config.json is missing, or of an unsupported model.
    """

    def __init__(self, actor: Path, lora_alpha: float | None = None) -> None:
        self._files = RankFiles(actor)
        try:
            self._stored, self._factors = _without_peft(actor, self._files.weights)
            self.has_lora = bool(self._factors)
            self._alpha = _find_alpha(actor, lora_alpha) if self.has_lora else 0.0
            self._model, config = _read_configuration(actor)
            self.dtype = noted_dtype(config) or self._files.first_dtype
            self._in_module, self._as_on_disk = _placed(self._model, self._stored, _major(config))
            self.numbers = self._check(actor)
        except BaseException:
            self._files.close()
            raise

    def __enter__(self) -> EasyR1Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Names as on the Hub, and full weights: with the adapter's product added in float32, rounded once to `dtype`.

        One weight is in memory at a time, as saved and cast, and in float32 where it has an adapter.

        Raises:
            CheckpointError: the numbers of a weight are damaged.
        """
        yield from saved_tensors(self._model, self._in_module, lambda name: self._full(self._in_module[name], dtype))
        for name in self._as_on_disk:
            yield name, self._full(name, dtype)

    def adapter(self, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The adapters as peft saves them: named tensors, and the content of adapter_config.json."""
        tensors: dict[str, torch.Tensor] = {}
        targets = []
        for module_name, name in self._in_module.items():
            if factors := self._read_factors(name):
                targets.append(layer := module_name.removesuffix(".weight"))
                for factor, tensor in zip(FACTORS, factors, strict=True):
                    tensors[tensor_name(layer, factor)] = tensor.to(dtype)
        rank = next(iter(tensors.values())).shape[0]
        return tensors, peft_config(None, rank, self._alpha, short_names(self._model, targets))

    def _full(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        weight = self._files.read(self._stored[name])
        factors = self._read_factors(name)
        if factors is None:
            return weight.to(dtype) if weight.is_floating_point() else weight
        return merged(weight, factors, self._alpha / factors[0].shape[0], dtype)

    def _read_factors(self, name: str) -> Factors | None:
        pair = self._factors.get(name.removesuffix(".weight"))
        return None if pair is None else (self._files.read(pair["A"]), self._files.read(pair["B"]))

    def _check(self, actor: Path) -> int:
        """Sees that the weights are exactly the model's, drops other names of tied ones, and counts the numbers."""
        state = self._model.state_dict(keep_vars=True)
        first = first_names(state)
        for alias in [name for name in self._in_module if name in state and first[id(state[name])] != name]:
            self._drop(actor, alias, first[id(state[alias])])
        shapes = {name: self._files.weights[self._stored[stored]].shape for name, stored in self._in_module.items()}
        sizes: dict[str, int] = {}
        for stored, name in self._as_on_disk.items():
            sizes[name] = sizes.get(name, 0) + math.prod(self._files.weights[self._stored[stored]].shape)
        for name, size in sizes.items():  # several make one weight, in another layout
            fits = name in state and size == state[name].numel()
            shapes[name] = tuple(state[name].shape) if fits else (size,)
        check_names(actor, shapes, {name: state[name] for name in first.values()})
        return sum(state[name].numel() for name in first.values())

    def _drop(self, actor: Path, alias: str, name: str) -> None:
        """Takes out one of two tied weights, which must be equal."""
        dropped = self._in_module.pop(alias)
        kept = self._in_module.get(name)
        if kept is not None and not torch.equal(*(self._files.read(self._stored[n]) for n in (dropped, kept))):
            raise CheckpointError(
                f"{actor}: by config.json {alias} is tied to {name}, but the two differ. Set tie_word_embeddings to "
                f"false in {actor / HUGGINGFACE / 'config.json'} to keep both."
            )


def _without_peft(actor: Path, names: Iterable[str]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Weight → its name in the files; layer with an adapter → "A" and "B" → the names of these."""
    stored: dict[str, str] = {}
    factors: dict[str, dict[str, str]] = {}
    for name in names:
        plain = name.removeprefix(PREFIX)
        if match := _FACTOR.fullmatch(plain):
            of_layer = factors.setdefault(match["layer"], {})
            if match["letter"] in of_layer:
                raise CheckpointError(f"{actor}: {match['layer']} has several adapters; only one can be merged.")
            of_layer[match["letter"]] = name
            continue
        if plain.endswith((".base_layer.weight", ".base_layer.bias")):
            plain = plain.replace(".base_layer.", ".")
        if _OTHER_ADAPTER.search(plain):
            raise CheckpointError(
                f"{actor}: {name} belongs to an adapter of another kind than LoRA of linear layers, which is all that "
                "can be merged here. Merge it with the program that wrote it."
            )
        stored[plain] = name
    for layer, pair in factors.items():
        if len(pair) < 2 or f"{layer}.weight" not in stored:
            raise CheckpointError(f"{actor}: {layer} has an adapter, but not all of lora_A, lora_B and its weight.")
    return stored, factors


def _find_alpha(actor: Path, given: float | None) -> float:
    """Alpha of the adapters, which the weights don't tell."""
    if given is not None:
        return given
    adapter = actor / ADAPTER
    # verl's merger writes 0 for one that it doesn't know
    if (adapter / CONFIG).is_file() and (alpha := read_info(str(adapter), f"{actor}: model").alpha):
        return alpha
    run = actor.absolute().parents[1] / "experiment_config.json"
    try:
        return float(json.loads(run.read_text(encoding="utf-8"))["worker"]["actor"]["model"]["lora"]["alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{actor}: alpha of the adapters is unknown: neither {adapter / CONFIG} says it nor does {run} as "
            "worker.actor.model.lora.alpha. Give the one of the training run with --lora_alpha."
        ) from error


def _read_configuration(actor: Path) -> tuple[Any, dict[str, Any]]:
    """The model without weights, and the content of config.json."""
    folder = actor / HUGGINGFACE
    model = empty_model(str(folder), dtype=torch.float32, device=torch.device("cpu"), section=f"{actor}: model")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return model, config


def _major(config: dict[str, Any]) -> int:
    """First number of the version of transformers that wrote config.json."""
    match = re.match(r"\d+", str(config.get("transformers_version")))
    return int(match[0]) if match else 4


def _placed(model: Any, names: Iterable[str], transformers_major: int) -> tuple[dict[str, str], dict[str, str]]:
    """What the weights are in today's module.

    Returns:
        Name in the module → weight, where both have the same layout. And weight → name in the module, where the weight
        lies as in the Hub's files, from which loading makes another layout (experts).
    """
    if transformers_major >= 5:
        return {name: name for name in names}, {}
    # until transformers 5, modules held their weights in the layouts of the files
    find = names_in_module(model)
    in_module: dict[str, str] = {}
    as_on_disk: dict[str, str] = {}
    for name in names:
        renamed, pattern = find(name)
        if pattern is None:
            in_module[renamed] = name
        else:
            as_on_disk[name] = renamed
    return in_module, as_on_disk
