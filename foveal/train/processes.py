"""What the processes that train together agree on besides tensors, over a CPU group of their own.

A group of their own, because saving talks while the main threads train.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")
_PATIENCE = timedelta(hours=2)
"""Others wait as long as the slowest process writes."""


def several_processes() -> bool:
    """Whether others train along. A process group alone doesn't say so: vLLM makes one of a single process."""
    return dist.is_initialized() and dist.get_world_size() > 1


def is_first_process() -> bool:
    return not several_processes() or dist.get_rank() == 0


def saving_group() -> dist.ProcessGroup | None:
    """The group, which all processes make together at the first call; None where there is one process."""
    return _beside(dist.group.WORLD) if several_processes() else None


@lru_cache(maxsize=1)
def _beside(_world: dist.ProcessGroup) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    assert isinstance(group, dist.ProcessGroup)
    return group


def in_first_process(work: Callable[[], object]) -> None:
    """Does `work` in process 0 while the others wait; what it raises there, all raise."""
    if not several_processes():
        work()
        return
    failure: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            work()
        except Exception as error:
            failure[0] = error
    dist.broadcast_object_list(failure, src=0, group=saving_group())
    if failure[0] is not None:
        raise failure[0]


def from_all(mine: T) -> list[T]:
    """What each process gives, in the order of their ranks."""
    if not several_processes():
        return [mine]
    found: list[T] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine, group=saving_group())
    return found
