"""How many bytes a second reach each GPU of one host when all of them gather, or sum, the same weights."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

REPEATS = 10
WARM_UP = 3


def bandwidth(folder: Path, processes: int, tiny: bool) -> dict[str, Any]:
    """Measures all-gather and reduce-scatter among so many processes, one for each GPU, or over gloo without.

    Args:
        folder: for what the processes tell each other.

    Returns:
        bytes a second that each process receives from the others, of whole tensors of `bytes` bytes in bfloat16; and
        whether every GPU can reach every other's memory.
    """
    cuda = torch.cuda.is_available()
    size = 2**22 if tiny else 2**29
    if processes > 1:
        mp.spawn(_measure, (folder, processes, size), processes)
    found: dict[str, Any] = {"backend": "nccl" if cuda else "gloo", "processes": processes, "bytes": size}
    return found | (torch.load(folder / "bandwidth.pt") if processes > 1 else {})


def _measure(rank: int, folder: Path, processes: int, size: int) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # A file, so that nothing else on this host has its port.
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder}/processes", rank=rank, world_size=processes
    )
    part = torch.ones(size // 2 // processes, dtype=torch.bfloat16, device=device)
    whole = part.repeat(processes)
    works = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    received = whole.nbytes * (processes - 1) / processes
    found: dict[str, Any] = {}
    for name, work in works.items():
        seconds = []
        for _ in range(WARM_UP + REPEATS):
            dist.barrier()
            started = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        found[name] = received / median(seconds[WARM_UP:])
    if rank == 0:
        if cuda:
            pairs = [(i, j) for i in range(processes) for j in range(processes) if i != j]
            found["peer_access"] = all(torch.cuda.can_device_access_peer(i, j) for i, j in pairs)
        torch.save(found, folder / "bandwidth.pt")
    dist.destroy_process_group()
