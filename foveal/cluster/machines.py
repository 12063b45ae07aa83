"""The machines of a run's Ray cluster, whose CPUs score answers and look at rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from foveal.config import Config

_joined = False


@dataclass(frozen=True)
class Machine:
    """A node of the cluster.

    Attributes:
        node: Ray's id.
        name: for messages.
        cpus: that Ray may use there.
    """

    node: str
    name: str
    cpus: int


@contextmanager
def joined(config: Config) -> Iterator[None]:
    """Joins the Ray cluster where the run has several devices and there may be several machines.

    Those are `trainer.nnodes`, or whatever belongs to the cluster that RAY_ADDRESS names. Otherwise nothing happens:
    the workers of one machine start Ray when they are needed.

    Raises:
        ConfigError: the cluster cannot be joined.
    """
    global _joined
    trainer = config.trainer
    if trainer.devices == 1 or (trainer.nnodes == 1 and os.environ.get("RAY_ADDRESS", "") in ("", "local")):
        yield
        return
    import ray

    from foveal.cluster.ray_cluster import connect

    connect(trainer.devices)
    _joined = True
    try:
        yield
    finally:
        _joined = False
        ray.shutdown()


def machines() -> list[Machine]:
    """The machines of the cluster that `joined` has joined, this one first; none where there are fewer than two."""
    if not _joined:
        return []
    import ray

    own = ray.get_runtime_context().get_node_id()
    found = [
        Machine(
            node["NodeID"],
            f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:6]})",
            int(node["Resources"].get("CPU", 0)),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    found.sort(key=lambda machine: machine.node != own)
    return found if len(found) > 1 else []
