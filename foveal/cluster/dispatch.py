"""Who gets which prompts and groups, and what each worker has already: each picture travels once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foveal.cluster.balance import assign, sizes_of
from foveal.cluster.delivery import Delivery
from foveal.cluster.transport import PackedColumn, PackedGroups, pack_columns, pack_groups, pack_prompts, unpack_columns
from foveal.types import Group, Prompt, Response


@dataclass
class _Batch:
    """What the workers train on.

    Attributes:
        owners: the team of each group.
        shares: the groups of each team.
        responses: of each team, in the order of its groups.
        known: of each of these, columns that the team has.
    """

    groups: list[Group]
    owners: list[int]
    shares: list[list[Group]]
    responses: list[list[Response]]
    known: list[list[set[str]]]


class Dispatch:
    """The trainer's side of what the workers have got.

    Args:
        world: workers.
        team_size: consecutive workers that share sequences, and so train on the same groups.
        engine_size: consecutive workers that share an engine, and so sample the same prompts.
        cost: of training on a group.
        batch_size: groups of an optimizer step.
        with_logprobs: whether training needs the engine's log-probabilities.
    """

    def __init__(
        self,
        world: int,
        *,
        team_size: int,
        engine_size: int,
        cost: Callable[[Group], float],
        batch_size: int,
        with_logprobs: bool,
    ) -> None:
        self.world = world
        self.team_size = team_size
        self.engine_size = engine_size
        self.teams = world // team_size
        self.engines = world // engine_size
        self._cost = cost
        self._batch_size = batch_size
        self._with_logprobs = with_logprobs
        self._held: list[dict[str, weakref.ref[Prompt]]] = [{} for _ in range(world)]
        self._batch: _Batch | None = None

    def share_prompts(self, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
        """Of each worker, the prompts that it answers: as many for each engine, as nobody knows the answers' lengths,
        and those of about as many tokens."""
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].expanded_ids))
        shares: list[list[int]] = [[] for _ in range(self.engines)]
        for place, i in enumerate(order):  # there and back again, so that no engine gets the longest of each round
            lap, engine = divmod(place, self.engines)
            shares[engine if lap % 2 == 0 else self.engines - 1 - engine].append(i)
        return [[prompts[i] for i in sorted(shares[rank // self.engine_size])] for rank in range(self.world)]

    def to_sample(self, rank: int, prompts: Sequence[Prompt]) -> Delivery:
        """What a worker needs to answer these prompts."""
        return self._delivery(rank, prompts)

    def to_train(self, groups: Sequence[Group], columns: set[str]) -> list[Delivery]:
        """Of each worker, what it needs for a pass over its part of the groups that reads or fills `columns`.

        The same groups again, the very objects, stay where they are.
        """
        batch, is_new = self._batch_of(groups)
        deliveries = []
        for team in range(self.teams):
            own = batch.shares[team]
            packed = pack_groups(own, logprobs=self._with_logprobs) if is_new else None
            filled = pack_columns(batch.responses[team], batch.known[team], columns)
            for rank in self._ranks(team):
                prompts = [group.prompt for group in own] if is_new else []
                deliveries.append(self._delivery(rank, prompts, packed, filled))
        return deliveries

    def take_columns(self, found: Sequence[dict[str, PackedColumn]]) -> None:
        """Writes what each worker has filled into the groups of the last `to_train`."""
        assert self._batch is not None
        for team in range(self.teams):  # its workers have filled the same
            unpack_columns(found[team * self.team_size], self._batch.responses[team], self._batch.known[team])

    def sizes(self, rank: int, batch_size: int) -> list[int]:
        """How many of a worker's groups go into each optimizer step, of `batch_size` groups together."""
        assert self._batch is not None
        return sizes_of(self._batch.owners, batch_size, rank // self.team_size)

    def end_step(self) -> None:
        """The next groups are others."""
        self._batch = None

    def _ranks(self, team: int) -> range:
        return range(team * self.team_size, (team + 1) * self.team_size)

    def _batch_of(self, groups: Sequence[Group]) -> tuple[_Batch, bool]:
        """The batch that these groups are, and whether the workers haven't got it yet."""
        if self._batch is not None and [id(g) for g in self._batch.groups] == [id(g) for g in groups]:
            return self._batch, False
        costs = [self._cost(group) for group in groups]
        owners = assign(costs, self._homes(groups), self._batch_size, self.teams)
        shares: list[list[Group]] = [[] for _ in range(self.teams)]
        for group, owner in zip(groups, owners, strict=True):
            shares[owner].append(group)
        responses = [[response for group in share for response in group.responses] for share in shares]
        known: list[list[set[str]]] = [[set() for _ in own] for own in responses]
        self._batch = _Batch(list(groups), owners, shares, responses, known)
        return self._batch, True

    def _homes(self, groups: Sequence[Group]) -> list[set[int]]:
        """Of each group the teams with a worker that has its prompt."""
        teams: dict[int, set[int]] = {}
        for rank, held in enumerate(self._held):
            for prompt in held.values():
                teams.setdefault(id(prompt()), set()).add(rank // self.team_size)
        return [teams.get(id(group.prompt), set()) for group in groups]

    def _has(self, rank: int, prompt: Prompt) -> bool:
        held = self._held[rank].get(prompt.uid)
        return held is not None and held() is prompt

    def _delivery(
        self,
        rank: int,
        prompts: Sequence[Prompt],
        groups: PackedGroups | None = None,
        columns: dict[str, PackedColumn] | None = None,
    ) -> Delivery:
        """With those of the prompts that the worker lacks; it forgets those that are gone here."""
        held = self._held[rank]
        gone = [uid for uid, prompt in held.items() if prompt() is None]
        for uid in gone:
            del held[uid]
        lacking = {prompt.uid: prompt for prompt in prompts if not self._has(rank, prompt)}
        held.update((uid, weakref.ref(prompt)) for uid, prompt in lacking.items())
        packed = pack_prompts(list(lacking.values())) if lacking else None
        return Delivery(gone, packed, groups, columns or {})
