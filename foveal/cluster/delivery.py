"""What a worker is sent before it samples or trains, and what it has kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foveal.cluster.transport import (
    PackedColumn,
    PackedGroups,
    PackedPrompts,
    pack_columns,
    unpack_columns,
    unpack_groups,
    unpack_prompts,
)
from foveal.data.ahead import start_ahead
from foveal.data.loader import AHEAD_THREADS
from foveal.data.processing import Processing
from foveal.types import Group, Prompt, Response


@dataclass(frozen=True)
class Delivery:
    """What a worker doesn't have yet.

    Attributes:
        forgotten: uids of prompts that nobody needs any more.
        prompts: to be answered or trained on.
        groups: that it trains on from now on, whose prompts it has; None for those that it was given last.
        columns: of those groups' responses.
    """

    forgotten: list[str] = field(default_factory=list)
    prompts: PackedPrompts | None = None
    groups: PackedGroups | None = None
    columns: dict[str, PackedColumn] = field(default_factory=dict)


class Inbox:
    """What a worker has got.

    Attributes:
        prompts: by uid.
        groups: that it trains on.
    """

    def __init__(self) -> None:
        self.prompts: dict[str, Prompt] = {}
        self.groups: list[Group] = []
        self._responses: list[Response] = []
        self._known: list[set[str]] = []  # of each response, columns that the sender has

    def take(self, delivery: Delivery) -> None:
        for uid in delivery.forgotten:
            self.prompts.pop(uid, None)
        if delivery.prompts is not None:
            self.prompts |= {prompt.uid: prompt for prompt in unpack_prompts(delivery.prompts)}
        if delivery.groups is not None:
            self.groups = unpack_groups(delivery.groups, self.prompts)
            self._responses = [response for group in self.groups for response in group.responses]
            self._known = [set() for _ in self._responses]
        unpack_columns(delivery.columns, self._responses, self._known)

    def new_columns(self) -> dict[str, PackedColumn]:
        """The columns that the worker has filled since the last time."""
        filled = {name for response in self._responses for name in response.columns}
        return pack_columns(self._responses, self._known, filled)


def begin_features(processing: Processing, prompts: Sequence[Prompt]) -> None:
    """Begins to make the prompts' features, which don't travel, in background threads: in the trainer's own process its
    loader has made them while the step before went on."""

    def make(index: int) -> None:
        processing.features(prompts[index])
        processing.hold(prompts[index])

    start_ahead(make, range(len(prompts)), AHEAD_THREADS)
