"""vLLM among processes of torch.distributed: what it must be told of them, and that their group outlives it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist


def process_count() -> int:
    """The processes of torch.distributed; 1 where it is not initialised."""
    return dist.get_world_size() if dist.is_initialized() else 1


def set_ranks(device: torch.device) -> None:
    """Sets RANK and LOCAL_RANK, from which vLLM's external launcher takes the process and its device.

    A launcher's own LOCAL_RANK may be another number: where each process sees one device only.
    """
    os.environ["RANK"] = str(dist.get_rank())
    os.environ["LOCAL_RANK"] = str(device.index or 0)


def any_of_engine(value: bool) -> bool:
    """Whether it is true in one of the processes that share an engine, each of which must ask."""
    from vllm.distributed.parallel_state import get_tp_group

    found = torch.tensor(value, dtype=torch.uint8)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=get_tp_group().cpu_group)
    return bool(found)


def shut_down(core: Any | None, *, keep_group: bool) -> None:
    """Ends vLLM in this process.

    Args:
        core: the engine core; None where it did not start, and only its process groups are left.
        keep_group: whether the default process group is the caller's; otherwise vLLM has made it, and it ends too.
    """
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    with _default_group_stays() if keep_group else nullcontext():
        if core is None:
            cleanup_dist_env_and_memory()
        else:
            core.shutdown()


@contextmanager
def _default_group_stays() -> Iterator[None]:
    """vLLM ends torch's default process group with its own, whoever made it."""
    destroy = dist.destroy_process_group

    def destroy_others(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    dist.destroy_process_group = destroy_others
    try:
        yield
    finally:
        dist.destroy_process_group = destroy
