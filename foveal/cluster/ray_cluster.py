"""The Ray cluster of a run: joined where there is one, else started on this machine; and the place of each worker."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, cast

import ray
import ray._private.worker as ray_worker
from ray._private.services import canonicalize_bootstrap_address
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from foveal.config import Config
from foveal.errors import ConfigError, WorkerError
from foveal.train.staging import available_memory

_STORE_BYTES = 8 << 30
"""Most that the object store of a cluster of our own may take; what travels in a step is far less."""
_PASSED_ON = ("HF_", "NCCL_", "GLOO_", "VLLM_", "TORCH_", "TOKENIZERS_", "TRITON_", "PYTORCH_", "CUDA_LAUNCH")
"""Beginnings of the environment variables that workers get from the trainer's process."""
_PATIENCE = 120
"""Seconds for resources that the cluster has to become free."""
_JOINING = 5
"""Seconds for machines that may just be joining, and for the cluster to accept a connection."""
_LONGEST_TMPDIR = 107 - len("/ray/session_2026-12-01_00-49-25_758251_4194304/sockets/plasma_store")
"""Bytes; the paths of Ray's sockets begin with it, and systems take 107."""


class Cluster:
    """Resources for `trainer.nnodes` × `trainer.n_gpus_per_node` workers, held until `close`.

    Joins the cluster that RAY_ADDRESS names or that `ray start` started on this machine, and otherwise starts one,
    which ends with this process. A worker takes a GPU where the cluster has any, else a CPU.

    Raises:
        ConfigError: the cluster hasn't got so many devices.
        WorkerError: they don't become free.
    """

    def __init__(self, config: Config) -> None:
        trainer = config.trainer
        self.timeline = trainer.ray_timeline
        self._group: PlacementGroup | None = None
        self._is_guest = ray.is_initialized()  # joined before, for the data and the rewards (`machines.joined`)
        self._is_own = not self._is_guest and connect(trainer.devices)
        try:
            self.device = _kind()
            _check_size(config, _JOINING)
            bundle = {"CPU": float(trainer.n_gpus_per_node)}
            if self.device == "GPU":
                bundle["GPU"] = float(trainer.n_gpus_per_node)
            # A bundle is one machine's share, and strictly spread ones lie on different machines.
            self._group = placement_group([bundle] * trainer.nnodes, strategy="STRICT_SPREAD")
            if not self._group.wait(_PATIENCE):
                _check_size(config, 0)
                raise WorkerError(
                    f"the cluster's devices did not become free within {_PATIENCE} s; another run may hold them "
                    "(`ray status` shows what is in use)."
                )
        except BaseException:
            self.close()
            raise

    def start(self, actor_class: Any, bundle: int, *arguments: Any) -> Any:
        """Starts an actor with one device of the bundle's machine."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        assert self._group is not None
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        options: dict[str, Any] = {"num_cpus": 1, "scheduling_strategy": strategy, "max_restarts": 0}
        if self.device == "GPU":
            options["num_gpus"] = 1
        if not self._is_own:  # whose processes have other variables
            options["runtime_env"] = {"env_vars": passed_on()}
        return actor_class.options(**options).remote(*arguments)

    def close(self) -> None:
        """Gives the resources back; a cluster of our own ends."""
        if not ray.is_initialized():
            return
        if self.timeline:
            with suppress(OSError):
                ray.timeline(self.timeline)
        if self._group is not None:
            with suppress(Exception):  # it is gone with its cluster
                remove_placement_group(self._group)
            self._group = None
        if not self._is_guest:
            ray.shutdown()


def wait_for_devices(config: Config) -> None:
    """Waits until the cluster that a run has joined has enough devices again: `trainer.stage_timeout` seconds at most.

    Raises:
        ConfigError: it hasn't, with what it has.
    """
    with visiting() as is_there:
        if is_there:  # else a cluster of our own, or the next to join it says why it can't
            _check_size(config, config.trainer.stage_timeout)


@contextmanager
def visiting() -> Iterator[bool]:
    """Joins, for a look, the cluster that a run would join; whether there is one."""
    try:
        joined = _join()
    except ConnectionError:
        joined = False
    if not joined:
        yield False
        return
    try:
        yield True
    finally:
        ray.shutdown()


def connect(devices: int) -> bool:
    """Joins or starts the cluster; whether it is our own.

    Raises:
        ConfigError: the cluster that RAY_ADDRESS names cannot be joined, or Ray wouldn't give workers a GPU each.
    """
    for name in os.environ:
        if name.startswith("RAY_EXPERIMENTAL_NOSET_") and os.environ[name] not in ("", "0"):
            raise ConfigError(f"{name} is set: every worker would see all GPUs and take the first one; unset it.")
    store = min(_STORE_BYTES, int(0.3 * (available_memory() or _STORE_BYTES)))
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: what drives a GPU would wait for whatever runs
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray will do, and warns of until then
    internals: Any = ray_worker
    internals.print_to_stdstream = lambda *_, **__: None  # deaths, of which our own messages say more
    try:
        if _join():
            return False
        cores = max(os.cpu_count() or 1, devices)
        ray.init("local", num_cpus=cores, object_store_memory=store, include_dashboard=False, **_quiet())
        return True
    except ConnectionError as error:
        raise ConfigError(
            f"cannot join the Ray cluster: {str(error).splitlines()[0].rstrip('.')}. Start it (`ray start --head`), or "
            "unset RAY_ADDRESS to run on this machine alone; `ray stop` clears what a dead cluster left."
        ) from error


def _join() -> bool:
    """Joins the cluster that a run joins; whether there is one.

    Raises:
        ConfigError: as `_address`.
        ConnectionError: as `_address`, or it does not answer.
    """
    address = _address()
    if address is None:
        return False
    _reach(address)
    ray.init(address, **_quiet())
    return True


def _address() -> str | None:
    """Of the cluster that a run joins, as `ray.init` would without an address; None where it starts its own. With
    "auto" Ray would also take what another run has started for itself.

    Raises:
        ConfigError: RAY_ADDRESS is none.
        ConnectionError: it is "auto", and no cluster runs here.
    """
    folder = os.environ.get("TMPDIR", "")
    if not folder.isascii() or len(folder) > _LONGEST_TMPDIR:
        os.environ.setdefault("RAY_TMPDIR", "/tmp")
    logging.getLogger("ray").setLevel(logging.ERROR)  # it would tell of other runs' clusters
    try:
        address: str | None = canonicalize_bootstrap_address(cast(str, None))  # its annotation says less than its text
    except ValueError as error:
        raise ConfigError(
            f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS')}: must be host:port of the cluster's head, as `ray start "
            "--head` prints it (Ray's client and its dashboard are other addresses), or local for this machine alone"
        ) from error
    return address


def _reach(address: str) -> None:
    """Raises ConnectionError where nothing answers at an address, for which Ray would wait minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _JOINING).close()
    except OSError as error:
        raise ConnectionError(f"nothing answers at {address} ({error.strerror or error})") from error


def _quiet() -> dict[str, Any]:
    return {"log_to_driver": False, "logging_level": "error", "namespace": f"foveal-{os.getpid()}"}


@cache
def _kind() -> str:
    """What a worker takes: a GPU where the cluster has any. Decided once: a run whose machines with GPUs have left must
    not go on without."""
    return "GPU" if ray.cluster_resources().get("GPU") else "CPU"


def _check_size(config: Config, patience: float) -> None:
    """Raises ConfigError where the cluster still lacks devices after so many seconds."""
    trainer, device = config.trainer, _kind()
    end = time.monotonic() + patience
    while True:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        found = [[int(node["Resources"].get(kind, 0)) for kind in (device, "CPU")] for node in nodes]
        if sum(min(counts) >= trainer.n_gpus_per_node for counts in found) >= trainer.nnodes:
            return
        if time.monotonic() > end:
            break
        time.sleep(0.5)
    listed = ", ".join(
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:6]}): {count}"
        + (f" with only {cpus} CPUs, and each worker takes one" if cpus < count else "")
        for node, (count, cpus) in zip(nodes, found, strict=True)
    )
    waited = f" after {patience:g} s of waiting" if patience > _JOINING else ""
    raise ConfigError(
        f"trainer.nnodes={trainer.nnodes} and trainer.n_gpus_per_node={trainer.n_gpus_per_node} given, but "
        f"the Ray cluster has these {device}s{waited}: {listed}. Set both to what there is, or start Ray on the other "
        "machines (`ray start --address=…`)."
    )


def passed_on() -> dict[str, str]:
    """The environment variables that a process on another machine gets from this one."""
    return {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
