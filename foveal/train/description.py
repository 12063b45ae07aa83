"""What a checkpoint's actor is, besides its state: found out once a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from foveal.models.lora import adapter_config, has_lora
from foveal.train.files import write_json
from foveal.train.state import distinct_tensors


@dataclass(frozen=True)
class Description:
    """The same at every save of a run.

    Attributes:
        entries: of `foveal.json`, by `foveal.train.checkpoint.ActorInfo`'s names.
        files: content by place of configuration, tokenizer and processor in the Hugging Face folder.
    """

    entries: dict[str, Any]
    files: dict[Path, bytes]

    def write_files(self, folder: Path) -> None:
        for place, content in self.files.items():
            path = folder / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def describe_actor(
    model: nn.Module,
    *,
    source_path: str,
    save_processing: Callable[[Path], None],
    override_config: dict[str, Any] | None = None,
) -> Description:
    """Puts the description together.

    Args:
        source_path: the folder or hub id that `model` was loaded from.
        save_processing: writes tokenizer, processor and chat template into the folder it is given.
        override_config: top-level keys of config.json that were changed when the model was loaded.
    """
    with TemporaryDirectory() as place:
        folder = Path(place)
        save_processing(folder)
        _copy_configuration(source_path, folder, override_config or {})
        files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    entries = {
        "model_class": type(model).__name__.removeprefix("FSDP"),
        "source": source_path,
        "source_dtype": _source_dtype(source_path),
        "tied_weights": len(distinct_tensors(model)) < len(model.state_dict()),
        "lora": adapter_config(model) if has_lora(model) else None,
    }
    return Description(entries, files)


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
    if (noted := noted_dtype(config)) is not None:
        return noted
    found = cached_file(source, "model.safetensors", _raise_exceptions_for_missing_entries=False)
    if found is None:
        index = _required_file(source, "model.safetensors.index.json").read_text(encoding="utf-8")
        found = str(_required_file(source, next(iter(json.loads(index)["weight_map"].values()))))
    with safe_open(found, framework="pt") as weights:
        return str(weights.get_tensor(next(iter(weights.keys()))).dtype).removeprefix("torch.")


def noted_dtype(config: dict[str, Any]) -> str | None:
    """The dtype that the content of a config.json states, as "bfloat16"; None where it states none."""
    for place in (config, config.get("text_config") or {}):
        for key in ("dtype", "torch_dtype"):
            if isinstance(place.get(key), str):
                return str(place[key]).removeprefix("torch.")
    return None


def _required_file(source: str, name: str) -> Path:
    from transformers.utils import cached_file

    return Path(str(cached_file(source, name)))
