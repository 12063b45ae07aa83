"""Calls of an async function in one process: as one ends the next begins, and a crash costs only the one to blame."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from typing import TypeAlias

from foveal.reward.contract import Answer, Failure, Outcome
from foveal.reward.process import Call, RewardProcess

Queued: TypeAlias = tuple[Call, "Future[list[Outcome]]"]


def none_more(most: int) -> list[Queued]:
    """For calls that are tried again among themselves."""
    return []


class Flow:
    """Keeps up to `room` calls, each of one answer, going in a process at a time.

    Args:
        process: the living process, a new one where the last has ended.
        is_closed: whether processes end because the pool does.
    """

    def __init__(self, process: Callable[[], RewardProcess], room: int, is_closed: Callable[[], bool]) -> None:
        self._process = process
        self._room = room
        self._is_closed = is_closed
        self._numbers = count()

    def run(self, waiting: list[Queued], more: Callable[[int], list[Queued]] = none_more) -> None:
        """Scores the calls in `waiting` and those that come in meanwhile.

        Args:
            more: takes up to so many of the calls that nobody has begun, without waiting for any.
        """
        going: dict[int, Queued] = {}
        begun: dict[int, float] = {}
        try:
            while True:
                waiting = waiting + more(self._room - len(going) - len(waiting))
                if not waiting and not going:
                    return
                if not going:  # another one would know nothing of what this one works on
                    process = self._process()
                new = dict(zip(self._numbers, waiting[: self._room - len(going)], strict=False))
                waiting = waiting[len(new) :]
                going |= new
                begun |= dict.fromkeys(new, time.monotonic())
                # The event loop keeps each answer's limit; twice that ends a loop that no longer turns.
                end = min(begun[number] + 2 * call.limit for number, (call, _) in going.items())
                reply = process.trade(
                    {number: Answer(call.inputs[0], call.limit) for number, (call, _) in new.items()},
                    {number: call.pictures[0] for number, (call, _) in going.items()},
                    end - time.monotonic(),
                )
                if isinstance(reply, Failure):
                    lost, going = list(going.values()), {}
                    self._settle(lost, reply, process.outgrown)
                    continue
                for number, outcome in reply.items():
                    going.pop(number)[1].set_result([outcome])
                if process.outgrown:
                    lost, going = list(going.values()), {}
                    self.run(lost)
        except BaseException as error:
            for _, future in [*going.values(), *waiting]:
                future.set_exception(error)

    def _settle(self, lost: list[Queued], failure: Failure, outgrown: bool) -> None:
        """Tries again what a process took with it when it ended, by halves, until those stand alone that end it."""
        if outgrown and not self._is_closed():
            self.run(lost)
        elif failure.kind == "timeout":  # each half would wait for the limit again
            for call, future in lost:
                future.set_result([replace(failure, text=f"ran longer than {call.limit:g} s")])
        elif len(lost) > 1 and not self._is_closed():
            middle = len(lost) // 2
            self.run(lost[:middle])
            self.run(lost[middle:])
        else:
            for _, future in lost:
                future.set_result([failure])
