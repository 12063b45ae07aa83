"""Calls of the loaded function: one dict or many, plain or async, each result or error turned into an outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias

from foveal.reward.contract import Answer, Failure, NoScore, Outcome, to_outcome, to_outcomes
from foveal.reward.explain import LONGEST_ERROR, clipped, cure_for, short_text, user_traceback
from foveal.reward.loading import Loaded

Trade: TypeAlias = Callable[[dict[int, Outcome]], dict[int, Answer]]
ASK_EVERY = 0.02
"""Seconds after which an event loop that has room for more answers asks for them again."""


class Caller:
    """Scores answers with one loaded function. All async calls share one event loop, so clients live on."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._loop = asyncio.Runner() if loaded.info.is_async else None

    def score(self, inputs: list[dict[str, Any]]) -> list[Outcome]:
        """One outcome for each input; what the function raises is an outcome too."""
        try:
            if self._loop is not None:
                return to_outcomes(self._loop.run(self._await(inputs)), len(inputs))
            if self._loaded.info.kind == "sequential":
                return [to_outcome(self._loaded.function(one)) for one in inputs]
            return to_outcomes(self._loaded.function(inputs), len(inputs))
        except BaseException as error:  # a sys.exit() in a reward must not end the process without a word
            return [self._raised(error, len(inputs))] * len(inputs)

    def flow(self, first: dict[int, Answer], room: int, trade: Trade) -> None:
        """Works on several answers at a time, until `trade` raises.

        Args:
            first: the answers to begin with, by number.
            room: how many there may be at a time.
            trade: gives the outcomes of some answers away and gets others; waits for them when there is none left.
        """
        assert self._loop is not None
        self._loop.run(self._flow(first, room, trade))

    async def _flow(self, new: dict[int, Answer], room: int, trade: Trade) -> None:
        tasks: dict[asyncio.Task[Outcome], int] = {}
        while True:
            tasks |= {asyncio.create_task(self._score_one(answer)): number for number, answer in new.items()}
            wait = ASK_EVERY if len(tasks) < room else None
            done, _ = await asyncio.wait(tasks, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            new = trade({tasks.pop(task): task.result() for task in done})

    async def _score_one(self, answer: Answer) -> Outcome:
        try:
            async with asyncio.timeout(answer.limit) as clock:
                result = await self._loaded.function(answer.input)
            return to_outcome(result)
        except BaseException as error:
            if isinstance(error, TimeoutError) and clock.expired():
                return Failure("timeout", f"ran longer than {answer.limit:g} s")
            return self._raised(error, 1)

    async def _await(self, given: Any) -> Any:
        return await self._loaded.function(given)

    def _raised(self, error: BaseException, covers: int) -> Failure:
        if isinstance(error, NoScore):
            return Failure("unscored", clipped(f"gave no score: {error}", LONGEST_ERROR), covers=covers)
        trace = user_traceback(error, self._loaded.file)
        return Failure("raised", f"raised {short_text(error)}", trace, covers, cure_for(error))
