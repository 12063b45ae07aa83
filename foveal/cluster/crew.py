"""The workers' processes: calling all of them at once, watching them, and saying what went wrong in which."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from foveal.cluster.failures import Whereabouts, describe, explain, lead_to
from foveal.errors import WorkerError
from foveal.track import console

_PAUSE = 1.0
"""Seconds between looks at workers that are at work."""
_GRACE = 5.0
"""Seconds in which a first failure's cause may still show: a worker whose partner died often fails before the death is
known."""
_PATIENCE = 10.0
"""Seconds for what should take none."""
_STOPPING = 60.0
"""Seconds in which sampling must stop when it is asked to."""

Arguments = Callable[[int], tuple[Any, ...]]
"""Gives the arguments of each rank's call."""

Line = tuple[str, str]
"""Kind ("note" or "warning") and text of a line for the user's terminal."""


class Crew:
    """Some actors that work together.

    Args:
        actors: of `Member`, in the order of their ranks.
        places: where each of them is.
        timeout: seconds that a stage may take, or a stream go without an item.
        stoppable: whether a stream may be broken off.
    """

    def __init__(
        self, actors: Sequence[Any], places: Sequence[Whereabouts], timeout: float, *, stoppable: bool = True
    ) -> None:
        self.actors = actors
        self.places = places
        self.timeout = timeout
        self.stoppable = stoppable
        self._failed = False
        self._streams: dict[Any, int] = {}  # that have not ended, with their ranks
        self._stream_number = 0

    def call(
        self, stage: str, method: str, arguments: Arguments = lambda rank: (), *, beside: bool = False
    ) -> list[Any]:
        """Calls a method of all and returns what each returned.

        Args:
            stage: for messages, as "the policy's update".
            beside: while other calls go on, from another thread; otherwise a stream that was left is broken off before.

        Raises:
            FovealError, OSError: what one of them raised.
            WorkerError: one died, raised something else, or took too long.
        """
        self._check()
        if not beside:
            self._end_streams()
        refs = [getattr(actor, method).remote(*arguments(rank)) for rank, actor in enumerate(self.actors)]
        ranks = {ref: rank for rank, ref in enumerate(refs)}
        found: list[Any] = [None] * len(refs)
        pending, started = refs, time.monotonic()
        while pending:
            self._check()
            ready = _wait(pending, len(pending))
            pending = [ref for ref in pending if ref not in ready]
            for ref in ready:
                try:
                    found[ranks[ref]] = ray.get(ref)
                except RayError as error:
                    self._failed = True  # the others may wait for this one for ever
                    others = {ranks[other]: other for other in pending}
                    raise self._explained(stage, error, ranks[ref], others) from None
            if pending and not ready:
                self.print_lines()
                self._check_time(started, stage, [ranks[ref] for ref in pending])
        self.print_lines()
        return found

    def stream(self, stage: str, method: str, arguments: Arguments) -> Iterator[tuple[int, Any]]:
        """Calls a generator method of all, with the stream's number first; yields (rank, item) as they come.

        A consumer may leave early, also by an exception: the next `call` breaks off what is still going on.

        Raises:
            as `call`; after a FovealError the workers can still be called.
        """
        self._check()
        self._end_streams()
        self._stream_number += 1
        for rank, actor in enumerate(self.actors):
            generator = getattr(actor, method).options(num_returns="streaming")
            self._streams[generator.remote(self._stream_number, *arguments(rank))] = rank
        last = time.monotonic()
        while self._streams:
            self._check()
            ready = _wait(list(self._streams))
            if not ready:
                self.print_lines()
                self._check_time(last, stage, list(self._streams.values()))
                continue
            [stream] = ready
            rank = self._streams[stream]
            try:
                item = ray.get(next(stream))
            except StopIteration:
                del self._streams[stream]
                continue
            except RayError as error:
                del self._streams[stream]
                failure = self._explained(stage, error, rank, {r: s for s, r in self._streams.items()})
                self._failed = isinstance(failure, WorkerError) or not self.stoppable
                raise failure from None
            yield rank, item
            last = time.monotonic()
        self.print_lines()

    def print_lines(self) -> None:
        """Shows what the workers had to say."""
        said: set[Line] = set()
        with suppress(RayError, GetTimeoutError):
            for rank, lines in enumerate(ray.get([a.lines.remote() for a in self.actors], timeout=_PATIENCE)):
                for kind, text in lines:
                    if (kind, text) not in said:  # all of them may say the same
                        show = console.note if kind == "note" else console.warn
                        show(text if rank == 0 else f"worker {rank} on {self.places[rank].host}: {text}")
                    said.add((kind, text))

    def close(self, timeout: float) -> None:
        """Lets the workers end what they hold, where nothing failed, and ends all processes.

        Args:
            timeout: seconds that they have for it.
        """
        if not self._failed and not self._streams:
            with suppress(RayError, GetTimeoutError):
                ray.get([actor.close.remote() for actor in self.actors], timeout=timeout)
        self._failed = True
        for actor in self.actors:
            with suppress(RayError, ValueError):
                ray.kill(actor, no_restart=True)

    # -- failures -----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._failed:
            raise WorkerError("the workers have ended")

    def _end_streams(self) -> None:
        """Breaks off what a consumer has left; where that can't be, waits for its end."""
        streams, self._streams = self._streams, {}
        if not streams:
            return
        if self.stoppable:
            for actor in self.actors:
                actor.stop.remote(self._stream_number)
        end = time.monotonic() + (_STOPPING if self.stoppable else self.timeout)
        pending = list(streams)
        while pending:
            ready = _wait(pending)
            if time.monotonic() > end:
                self._failed = True
                raise WorkerError(f"{describe(self.places[streams[pending[0]]])} did not stop sampling")
            for stream in ready:
                try:
                    ray.get(next(stream))
                except RayActorError as error:
                    self._failed = True
                    rank = streams[stream]
                    raise explain("sampling", {rank: error}, self.places) from None
                except (StopIteration, RayError):
                    pending.remove(stream)

    def _explained(self, stage: str, error: RayError, rank: int, others: Mapping[int, Any]) -> Exception:
        """What to raise for a failure, after a look at what else fails now."""
        failures = {rank: error}
        waiting = dict(others)
        end = time.monotonic() + _GRACE
        while waiting and lead_to(failures) is None and time.monotonic() < end:
            ready = _wait(list(waiting.values()))
            for other in [other for other, ref in waiting.items() if ref in ready]:
                ref = waiting.pop(other)
                try:
                    ray.get(next(ref) if isinstance(ref, ray.ObjectRefGenerator) else ref)
                except RayError as failure:
                    failures[other] = failure
                except StopIteration:
                    pass
        return explain(stage, failures, self.places)

    def _check_time(self, since: float, stage: str, ranks: Sequence[int]) -> None:
        silence = time.monotonic() - since
        if silence <= self.timeout:
            return
        self._failed = True
        named = ", ".join(describe(self.places[rank]) for rank in ranks[:4]) + (", …" if len(ranks) > 4 else "")
        raise WorkerError(
            f"no progress for {silence:.0f} s in {stage}, which {named} did not finish. If it only takes long, raise "
            f"trainer.stage_timeout ({self.timeout:g} s).\n{self.places[ranks[0]].end_of_log()}"
        )


def _wait(refs: list[Any], count: int = 1) -> list[Any]:
    """Those that have something: up to `count`, after a pause fewer or none."""
    try:
        return list(ray.wait(refs, num_returns=count, timeout=_PAUSE)[0])
    except SystemError as error:  # a handler of signals raised something while Ray's compiled code was at work
        raise error.__cause__ or error from None
