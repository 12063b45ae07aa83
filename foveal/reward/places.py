"""On which machine each process of a reward function runs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from foveal.cluster.machines import Machine, machines
from foveal.reward.contract import FunctionInfo, FunctionSpec, Outcome
from foveal.reward.process import Call, RewardProcess
from foveal.track.console import note

if TYPE_CHECKING:
    from foveal.reward.host import Host


class PlaceLost(Exception):
    """A machine left, or cannot run the function; the text says what happened. Not the function's fault."""


class Process(Protocol):
    """What a pool needs of a process, wherever that is; methods as in `RewardProcess`."""

    @property
    def alive(self) -> bool: ...

    @property
    def outgrown(self) -> bool: ...

    def load(self) -> FunctionInfo: ...

    def call(self, call: Call) -> list[Outcome]: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class Places:
    """Deals the processes of one function over the machines of the run's cluster, by their CPUs; the first stays here.

    Without a cluster of several machines all are here. Each process has a slot, which one thread uses.

    Args:
        memory_limit: as in `RewardProcess`.
        count: most processes.
        here: all on this machine.
    """

    def __init__(self, spec: FunctionSpec, memory_limit: float | None, count: int, *, here: bool = False) -> None:
        self.spec = spec
        self._memory_limit = memory_limit
        self._of_slot = [None] * count if here or count == 1 else dealt(machines(), count)
        self._hosts: dict[int, Host] = {}
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def start(self, slot: int) -> Process:
        """A fresh process, whose `load` and `call` raise PlaceLost where the machine is to blame."""
        machine = self._of_slot[slot]
        if machine is None:
            return RewardProcess(self.spec, self._memory_limit)
        from foveal.reward.host import Host, HostedProcess

        if slot not in self._hosts:
            self._hosts[slot] = Host(machine)
        return HostedProcess(self.spec, self._memory_limit, self._hosts[slot])

    def leave(self, slot: int, lost: PlaceLost) -> None:
        """From now on the slot's processes are here. Says so once for each machine."""
        machine = self._of_slot[slot]
        assert machine is not None
        self._of_slot[slot] = None
        with self._lock:
            told = machine.node in self._told
            self._told.add(machine.node)
        if not told:
            note(f"{self.spec.label}: scoring goes on here instead of on {machine.name}: {lost}")

    def close(self) -> None:
        """Gives the other machines' CPUs back."""
        for host in self._hosts.values():
            host.end()


def dealt(found: list[Machine], count: int) -> list[Machine | None]:
    """A machine for each of `count` processes, None for this one, the first of `found`."""
    taken = {machine: 0 for machine in found if machine.cpus}
    places: list[Machine | None] = [None]
    if found and found[0] in taken:
        taken[found[0]] = 1
    while len(places) < count:
        machine = min(taken, key=lambda one: (taken[one] + 1) / one.cpus, default=None)
        if machine is not None:
            taken[machine] += 1
        places.append(None if machine is None or machine == found[0] else machine)
    return places
