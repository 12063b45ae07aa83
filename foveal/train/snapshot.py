"""What a checkpoint will hold, taken at one moment and written then or later."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from foveal.errors import CheckpointError
from foveal.track import console
from foveal.train.checkpoint import write_actor
from foveal.train.description import Description
from foveal.train.export import export
from foveal.train.processes import in_first_process
from foveal.train.state import write_manifest, write_state


@dataclass(frozen=True)
class Snapshot:
    """States of a worker's models.

    Attributes:
        actor, critic: from `foveal.train.state.take_state`; no critic is None.
        description: of the actor.
        copied: whether the states are copies, so that training may go on while they are written.
        outline: the actor's model on the meta device, for a checkpoint that holds Hugging Face weights too.
    """

    actor: dict[str, Any]
    critic: dict[str, Any] | None
    description: Description
    copied: bool
    outline: nn.Module | None = None

    def write(self, folder: Path) -> None:
        """Writes the folders `actor` and, where there is one, `critic` of a checkpoint. Hugging Face weights are made
        from the actor's files, which takes neither its device nor memory for a model; if that fails a warning says so.

        With several processes every one must call this.

        Raises:
            OSError: the disk refused (full, read-only, …).
        """
        write_actor(folder / "actor", self.actor, self.description)
        if self.critic is not None:
            manifest = write_state(folder / "critic", self.critic)
            in_first_process(lambda: write_manifest(folder / "critic", manifest))
        if self.outline is not None:
            in_first_process(lambda: _add_weights(folder / "actor", self.outline))


def _add_weights(actor: Path, outline: nn.Module | None) -> None:
    try:
        export(actor, model=outline)
    except CheckpointError as error:
        console.warn(f"the checkpoint is saved without Hugging Face weights (trainer.save_hf): {error}")
