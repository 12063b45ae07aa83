"""`foveal merge` of checkpoints that EasyR1 wrote."""

from __future__ import annotations

from pathlib import Path

from foveal.errors import CheckpointError, ConfigError
from foveal.track.console import note
from foveal.train.checkpoint import HUGGINGFACE
from foveal.train.easyr1_checkpoint import ADAPTER, EasyR1Checkpoint
from foveal.train.hf_folder import DTYPES, write_adapter, write_hf


def export_easyr1(
    actor: Path, target: Path | None = None, dtype: str | None = None, *, lora_alpha: float | None = None
) -> Path:
    """Writes the weights of an EasyR1 checkpoint, adapters merged, as a Hugging Face folder (`hf_folder.write_hf`).

    Args:
        actor: `…/global_step_N/actor`.
        target: `actor/huggingface` by default.
        dtype: a key of `hf_folder.DTYPES`; by default what config.json says. Weights are cast once.
        lora_alpha: of its adapters, where the checkpoint and the run's configuration don't say it.

    Returns:
        The folder.

    Raises:
        CheckpointError, ModelError: as `EasyR1Checkpoint`; or weights that are not finite, or a full disk.
        ConfigError: unknown `dtype`.
    """
    with EasyR1Checkpoint(actor, lora_alpha) as checkpoint:
        name = dtype or checkpoint.dtype
        if name not in DTYPES:
            allowed = f"weights are saved in one of {', '.join(DTYPES)}."
            raise ConfigError(f"{actor}: {name} is no type to save weights in; {allowed} Give --dtype.")
        if dtype is None and name == "float32":
            note("config.json says float32, as EasyR1 trained; its own merger saves bfloat16, as --dtype bf16 does")
        return write_hf(
            target or actor / HUGGINGFACE,
            checkpoint.tensors(DTYPES[name]),
            expected=checkpoint.numbers,
            configuration=actor / HUGGINGFACE,
            dtype=DTYPES[name],
        )


def export_easyr1_adapter(
    actor: Path, target: Path | None = None, dtype: str | None = None, *, lora_alpha: float | None = None
) -> Path:
    """Writes the adapters of an EasyR1 checkpoint as a folder that peft loads.

    Args:
        target: `actor/lora_adapter` by default.
        dtype: by default float32, in which adapters are trained.

    Returns:
        The folder.

    Raises:
        CheckpointError, ModelError: as `EasyR1Checkpoint`; or all weights were trained.
    """
    with EasyR1Checkpoint(actor, lora_alpha) as checkpoint:
        if not checkpoint.has_lora:
            raise CheckpointError(f"{actor}: all weights were trained, there is no adapter. Merge without --adapter.")
        return write_adapter(target or actor / ADAPTER, *checkpoint.adapter(DTYPES[dtype or "float32"]))
