"""Starting the processes of a run: which device gets which kind, in which order they are numbered, how they meet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
import torch

from foveal.cluster.actor import Actor
from foveal.cluster.crew import Crew
from foveal.cluster.failures import Whereabouts
from foveal.cluster.ray_cluster import Cluster
from foveal.config import Config


def gather(config: Config, cluster: Cluster, kind: type[Actor], devices: range, *, in_step: bool) -> Crew:
    """Starts a process for each of some devices, counted machine by machine. Ranks go by machine, and on each by GPU.

    Args:
        in_step: as of `Crew`.
    """
    trainer = config.trainer
    remote: Any = ray.remote
    actor_class = remote(concurrency_groups={"control": 1, "saving": 1})(kind)
    actors = [cluster.start(actor_class, device // trainer.n_gpus_per_node, os.getcwd()) for device in devices]
    unplaced = [Whereabouts(-1, "a machine of the cluster", "", "", 0, "")] * len(actors)
    crew = Crew(actors, unplaced, trainer.stage_timeout)
    try:
        places = crew.call("the start of the processes", "whereabouts")
    except BaseException:
        crew.close(0)
        raise
    order = sorted(
        range(len(actors)), key=lambda i: (places[i].host, places[i].node, len(places[i].gpu), places[i].gpu, i)
    )
    numbered = [places[i].with_rank(devices.start + rank) for rank, i in enumerate(order)]
    return Crew([actors[i] for i in order], numbered, trainer.stage_timeout, in_step=in_step)


def start(config: Config, crews: Sequence[Crew], shared: Any) -> tuple[list[list[Any]], list[tuple[str, int]]]:
    """Lets the processes of each crew meet among themselves, and all build what they hold at once.

    Args:
        shared: the last argument of `start`, of `Member` and `EngineMember`.

    Returns:
        what each process's `start` returned, crew by crew, and where the processes of each have met.
    """
    timeout = patience(config)
    # this process's number is that of its cores, unless OMP_NUM_THREADS says another, which is to count there too
    threads = max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // config.trainer.n_gpus_per_node))
    arguments: list[tuple[Any, ...]] = []
    addresses = []
    for crew in crews:
        world = len(crew.actors)
        address = crew.call("the start of the workers", "meet", partial(_meeting, world, timeout))[0]
        addresses.append(address)
        arguments += [(world, address, threads, timeout, shared)] * world
    found = everyone(crews).call("the start of the workers", "start", lambda rank: arguments[rank])
    results = []
    for crew in crews:
        results.append(found[: len(crew.actors)])
        found = found[len(crew.actors) :]
    return results, addresses


def _meeting(world: int, timeout: float, rank: int) -> tuple[int, int, float]:
    return rank, world, timeout


def everyone(crews: Sequence[Crew]) -> Crew:
    """Several crews to be called at once."""
    actors = [actor for crew in crews for actor in crew.actors]
    return Crew(actors, [place for crew in crews for place in crew.places], crews[0].timeout)


def patience(config: Config) -> float:
    """Seconds that a process waits for others: the trainer is to notice first."""
    return config.trainer.stage_timeout + 60.0
