"""The processes that train one model together, as one of them sees the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from foveal.config.schema_model import FsdpConfig
from foveal.models.positions import backbone
from foveal.models.vision import vision_tower
from foveal.train.packing import Part
from foveal.train.sharding import (
    device_mesh,
    gathers_once,
    held_bytes,
    is_trained,
    mixed_precision,
    shard,
    sums_at_end,
)
from foveal.types import Prompt


class Peers:
    """What keeps the processes of a group in step: sharded weights are gathered by all of them at once, or by none.

    Args:
        scorer: the sharded module that the micro-batches go through, with its model.
        device: of this process.
        sums_at_end: gradients wait, whole, for an optimizer step's last micro-batch before they are summed over
            processes: less to send, but memory for all gradients in each; from `sharding.sums_at_end`.
        gathers_once: weights stay gathered until the end of an optimizer step; from `sharding.gathers_once`.
        held_bytes: what that takes on the device; from `sharding.held_bytes`.
        group: those that have different answers; None for all.
    """

    def __init__(
        self,
        scorer: nn.Module,
        device: torch.device,
        *,
        sums_at_end: bool,
        gathers_once: bool,
        held_bytes: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.held_bytes = held_bytes
        self._sums_at_end, self._gathers_once = sums_at_end, gathers_once
        self._scorer = scorer
        self._device = device
        self._group = group
        self._model = scorer.get_submodule("model")
        self._units = [module for module in scorer.modules() if isinstance(module, FSDPModule)]
        tower = vision_tower(self._model)
        self._tower_together = tower is not None and is_trained(tower)
        in_tower = set(tower.parameters()) if tower is not None else set()
        others = (p for p in scorer.parameters() if p not in in_tower)
        self._tower_alone = self._tower_together and not any(p.requires_grad for p in others)
        if isinstance(tower, FSDPModule):
            # FSDP2 asks every unit for its gradient, and stumbles over one that was never gathered: rows may be text.
            tower.unshard()
            tower.reshard()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each number summed over the processes."""
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(total, group=self._group)
        found: list[float] = total.tolist()
        return found

    def align(self, micro_batches: list[list[Part]]) -> list[list[Part]]:
        """As many micro-batches as the process with most has, each with a picture if another process's has one.

        What is added has no answers and changes no result: a prompt of one token, or of the smallest picture.
        """
        own = [float(_has_pictures(self._model, parts)) for parts in micro_batches]
        [longest] = self._most([len(own)])
        own += [0.0] * (int(longest) - len(own))
        together = self._most(own) if self._tower_together else own
        if self._tower_alone and any(together):
            together[-1] = 1.0  # only a last micro-batch with a backward pass sums gradients over processes
        aligned = []
        for number, (has, must) in enumerate(zip(own, together, strict=True)):
            parts = micro_batches[number] if number < len(micro_batches) else []
            if must > has:
                parts = [*parts, Part(_picture(self._model), [])]
            aligned.append(parts or [Part(_prompt([0], {}), [])])
        return aligned

    def before_backward(self, *, last: bool) -> None:
        """Says whether this is the last micro-batch of an optimizer step."""
        for unit in self._units:
            unit.set_is_last_backward(last)
            unit.set_requires_gradient_sync(last or not self._sums_at_end, recurse=False)
            unit.set_reshard_after_backward(last or not self._gathers_once, recurse=False)

    def after_backward(self) -> None:
        """After the last micro-batch: also what had no part in its backward pass lets go of the weights of others."""
        for unit in self._units:
            unit.reshard()

    def _most(self, values: list[float]) -> list[float]:
        most = torch.tensor(values, device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        return most.tolist()


def spread(
    scorer: nn.Module,
    model_path: str,
    fsdp: FsdpConfig,
    device: torch.device,
    *,
    adapter: str | None = None,
    role: str = "actor",
    section: str = "worker.actor.model",
    group: dist.ProcessGroup | None = None,
) -> Peers:
    """Shards a scorer around an empty model (`loading.empty_model`) over all processes and fills it from the files.

    Args:
        scorer: `TokenScorer` or `ValueScorer`, without autocast; what is not trained must be frozen by now.
        adapter: that the model's adapters start from, as in `fill_weights`.
        role: "actor", "ref" or "critic", whose `fsdp` it is, and section: that names the model; for messages.
        group: as in `Peers`.

    Raises:
        ConfigError: as `device_mesh`.
        ModelError: as `fill_weights`.
    """
    from foveal.models.filling import fill_weights  # needs parts of transformers that one process does without

    def fill(model: nn.Module) -> None:
        offloaded = fsdp.enable_cpu_offload
        fill_weights(model, model_path, device=device, offloaded=offloaded, adapter=adapter, section=section)

    return spread_with(scorer, fill, fsdp, device, role=role, group=group)


def spread_with(
    scorer: nn.Module,
    fill: Callable[[nn.Module], None],
    fsdp: FsdpConfig,
    device: torch.device,
    *,
    role: str = "actor",
    group: dist.ProcessGroup | None = None,
) -> Peers:
    """As `spread`, where `fill` gives the sharded model its weights."""
    precision = mixed_precision(fsdp, device)
    shard(scorer, fsdp, device_mesh(fsdp, device.type, f"worker.{role}.fsdp"), precision)
    fill(scorer.get_submodule("model"))
    chosen = {
        "sums_at_end": sums_at_end(scorer, fsdp, precision, device),
        "gathers_once": gathers_once(scorer, fsdp, device),
    }
    return Peers(scorer, device, held_bytes=held_bytes(scorer, fsdp, **chosen), group=group, **chosen)


def _has_pictures(model: Any, parts: Sequence[Part]) -> bool:
    config = backbone(model).config
    placeholders = {getattr(config, f"{kind}_token_id", None) for kind in ("image", "video")}
    return any(not placeholders.isdisjoint(part.prompt.expanded_ids) for part in parts)


def _picture(model: Any) -> Prompt:
    """A prompt of the smallest picture, black: one visual token."""
    config = backbone(model).config
    vision = config.vision_config
    merge = vision.spatial_merge_size
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    features = {
        "pixel_values": torch.zeros(merge**2, values),
        "image_grid_thw": torch.tensor([[1, merge, merge]]),
    }
    return _prompt([0, config.image_token_id], features)


def _prompt(ids: list[int], features: dict[str, torch.Tensor]) -> Prompt:
    return Prompt("idle", ids, ids, [], {}, -1, None, features)
