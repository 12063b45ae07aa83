"""Calls of the loaded function: one dict or many, plain or async, each result or error turned into an outcome."""

from __future__ import annotations

import asyncio
from typing import Any

from foveal.reward.contract import Failure, FunctionSpec, Outcome, to_outcome, to_outcomes
from foveal.reward.explain import cure_for, short_text, user_traceback
from foveal.reward.loading import Loaded


class Caller:
    """Scores lists of inputs with one loaded function. All async calls share one event loop, so clients live on."""

    def __init__(self, loaded: Loaded, spec: FunctionSpec) -> None:
        self._loaded = loaded
        self._spec = spec
        self._loop = asyncio.Runner() if loaded.info.is_async else None

    def score(self, inputs: list[dict[str, Any]]) -> list[Outcome]:
        """One outcome for each input; what the function raises is an outcome too."""
        sequential = self._loaded.info.kind == "sequential"
        try:
            if self._loop is None:
                if sequential:
                    return [to_outcome(self._loaded.function(one)) for one in inputs]
                return to_outcomes(self._loaded.function(inputs), len(inputs))
            if sequential:
                return self._loop.run(self._score_together(inputs))
            return to_outcomes(self._loop.run(self._await(inputs)), len(inputs))
        except BaseException as error:  # a sys.exit() in a reward must not end the process without a word
            return [self._raised(error, len(inputs))] * len(inputs)

    async def _await(self, given: Any) -> Any:
        return await self._loaded.function(given)

    async def _score_together(self, inputs: list[dict[str, Any]]) -> list[Outcome]:
        room = asyncio.Semaphore(self._spec.concurrency)
        return list(await asyncio.gather(*(self._score_one(one, room) for one in inputs)))

    async def _score_one(self, one: dict[str, Any], room: asyncio.Semaphore) -> Outcome:
        limit = self._spec.time_limit
        async with room:
            try:
                async with asyncio.timeout(limit) as clock:
                    result = await self._loaded.function(one)
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                if clock.expired() and isinstance(error, TimeoutError):
                    return Failure("timeout", f"ran longer than {limit:g} s")
                return self._raised(error, 1)
            return to_outcome(result)

    def _raised(self, error: BaseException, covers: int) -> Failure:
        trace = user_traceback(error, self._loaded.file)
        return Failure("raised", f"raised {short_text(error)}", trace, covers, cure_for(error))
