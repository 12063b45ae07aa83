"""How many devices a machine has, where the configuration leaves it open or asks for more than there are."""

from __future__ import annotations

import os
from importlib.util import find_spec

from foveal.config import Config
from foveal.errors import ConfigError
from foveal.track.console import note


def settle_devices(config: Config) -> None:
    """Puts a number into `trainer.n_gpus_per_node` where it is -1: every GPU of a machine, or one worker without any.

    With one machine these are the GPUs that this process sees; with several, what Ray says of the running cluster's
    largest `trainer.nnodes` machines, of which the smallest decides. A number that was given stays.

    Raises:
        ConfigError: without a running cluster, more GPUs than this machine has are asked for, or several machines.
    """
    trainer = config.trainer
    asked = trainer.n_gpus_per_node
    if trainer.nnodes > 1:
        if asked == -1:
            trainer.n_gpus_per_node = _of_each_machine(trainer.nnodes)
            note(f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: what Ray says of the machines")
        return
    here = _here()
    if asked == -1:
        trainer.n_gpus_per_node = max(here, 1)
        if here > 1:
            note(f"trainer.n_gpus_per_node={here}: all that are here")
    elif 0 < here < asked and _gpus_of_cluster() is None:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f" (CUDA_VISIBLE_DEVICES={seen})" if seen is not None else ""
        raise ConfigError(
            f"trainer.n_gpus_per_node={asked}, but this machine has {here} GPU{'s' * (here > 1)}{hidden}: set "
            f"trainer.n_gpus_per_node={here}, or -1 for all that are there"
        )


def _here() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _of_each_machine(machines: int) -> int:
    if find_spec("ray") is None:
        return 1  # enough to be told that several devices need Ray
    found = _gpus_of_cluster()
    if found is None:
        raise ConfigError(
            f"trainer.nnodes={machines} but no Ray cluster runs here: start it with `ray start --head` on this machine "
            "and `ray start --address=…` on the others, or set trainer.nnodes=1"
        )
    return max(sorted(found, reverse=True)[:machines][-1], 1)


def _gpus_of_cluster() -> list[int] | None:
    """GPUs of each machine of the cluster that a run would join; None where it would start one of its own."""
    if find_spec("ray") is None:
        return None
    import ray

    from foveal.cluster.ray_cluster import visiting

    with visiting() as is_there:
        if not is_there:
            return None
        return [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
