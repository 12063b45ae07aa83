"""Where a worker stands among those that train together."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    """By default alone.

    Attributes:
        rank, world: this worker's number, and how many there are.
        sharing: the processes that share each sequence with this one (Ulysses), consecutive ranks; None for none.
        apart: those that have other answers, one of each group that shares; None for all.
    """

    rank: int = 0
    world: int = 1
    sharing: dist.ProcessGroup | None = None
    apart: dist.ProcessGroup | None = None

    @property
    def alone(self) -> bool:
        return self.world == 1


def take_place(ulysses_size: int) -> Place:
    """This process's place, with torch.distributed initialised. Every process must call this.

    Args:
        ulysses_size: processes that share a sequence; divides their number.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if ulysses_size == 1:
        return Place(rank, world)
    sharing = [range(start, start + ulysses_size) for start in range(0, world, ulysses_size)]
    apart = [range(start, world, ulysses_size) for start in range(ulysses_size)]
    return Place(rank, world, _own(sharing, rank), _own(apart, rank))


def _own(groups: list[range], rank: int) -> dist.ProcessGroup:
    made = [(rank in ranks, dist.new_group(list(ranks))) for ranks in groups]  # every process takes part in all
    [group] = [group for is_own, group in made if is_own]
    assert isinstance(group, dist.ProcessGroup)
    return group
