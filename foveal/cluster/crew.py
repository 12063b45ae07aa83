"""The workers' processes: calling all of them at once, watching them, and saying what went wrong in which."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
"""Seconds for what should take none, as an answer to a call that no work keeps waiting."""
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
        in_step: whether some of them take every step of a stream together, so that what one fails with leaves others
            waiting for it.
    """

    def __init__(
        self, actors: Sequence[Any], places: Sequence[Whereabouts], timeout: float, *, in_step: bool = False
    ) -> None:
        self.actors = actors
        self.places = places
        self.timeout = timeout
        self.in_step = in_step
        self._failed = False
        self._failure: WorkerError | None = None  # what the workers ended with
        self._explaining = threading.Lock()  # calls may fail in two threads, for one reason
        self._asked: dict[int, tuple[Any, float]] = {}  # of each rank, the request for its lines, and since when
        self._asking = threading.Lock()
        self._reading = threading.Lock()  # held while a stream is read, in whatever thread
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
        pending, started = list(refs), time.monotonic()
        while pending:
            self._check()
            ready = _wait(pending, len(pending))
            for ref in ready:
                pending.remove(ref)
                try:
                    found[ranks[ref]] = _result(ref)
                except RayError as error:
                    others = {ranks[other]: other for other in pending}  # they may wait for this one for ever
                    raise self._explained(stage, error, ranks[ref], others, fatal=True) from None
            if pending and not ready:
                self.print_lines(_PAUSE)
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
            with self._reading:
                found = self._next_item(stage, last)
            if found is not None:
                yield found
                last = time.monotonic()
        self.print_lines()

    def _next_item(self, stage: str, last: float) -> tuple[int, Any] | None:
        """The rank and the item that one of the streams has; None if none has one now.

        Args:
            last: when there was one before.
        """
        self._check()
        ready = _wait(list(self._streams))
        if not ready:
            self.print_lines(_PAUSE)
            self._check_time(last, stage, list(self._streams.values()))
            return None
        [stream] = ready
        rank = self._streams[stream]
        try:
            return rank, _result(stream)
        except StopIteration:
            del self._streams[stream]
            return None
        except RayError as error:
            del self._streams[stream]
            others = {r: s for s, r in self._streams.items()}
            raise self._explained(stage, error, rank, others, fatal=self.in_step) from None

    def print_lines(self, patience: float = _PATIENCE) -> None:
        """Shows what the workers had to say; whoever doesn't answer now is heard the next time.

        Args:
            patience: seconds in which they should answer.
        """
        if not self._asking.acquire(blocking=False):
            return  # another thread is at it
        try:
            for rank, actor in enumerate(self.actors):
                if rank not in self._asked:
                    self._asked[rank] = (actor.lines.remote(), time.monotonic())
            requests = {ref: rank for rank, (ref, _) in self._asked.items()}
            said: set[Line] = set()
            for ref in _wait(list(requests), len(requests), patience):
                rank = requests[ref]
                del self._asked[rank]
                with suppress(RayError):
                    self._show(rank, _result(ref), said)
        finally:
            self._asking.release()

    def _show(self, rank: int, lines: Sequence[Line], said: set[Line]) -> None:
        for kind, text in lines:
            if (kind, text) not in said:  # all of them may say the same
                show = console.note if kind == "note" else console.warn
                show(text if rank == 0 else f"worker {rank} on {self.places[rank].host}: {text}")
            said.add((kind, text))

    def close(self, timeout: float) -> None:
        """Lets the workers end what they hold, where nothing failed, and ends all processes.

        Another thread that reads a stream gets a WorkerError first, so that it doesn't wait for what is gone.

        Args:
            timeout: seconds that they have for it.
        """
        at_rest = not self._failed and not self._streams
        self._failed = True
        if self._reading.acquire(timeout=_PATIENCE):
            self._reading.release()
        if at_rest:
            with suppress(RayError, GetTimeoutError):
                ray.get([actor.close.remote() for actor in self.actors], timeout=timeout)
        for actor in self.actors:
            with suppress(RayError, ValueError):
                ray.kill(actor, no_restart=True)

    @property
    def failed(self) -> bool:
        """Whether the workers can't be called any more."""
        return self._failed

    # -- failures -----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._failed:
            raise WorkerError(str(self._failure or "the workers have ended"))

    def _end_streams(self) -> None:
        """Breaks off what a consumer has left."""
        streams, self._streams = self._streams, {}
        if not streams:
            return
        for actor in self.actors:
            actor.stop.remote(self._stream_number)
        end = time.monotonic() + _STOPPING
        pending = list(streams)
        while pending:
            ready = _wait(pending)
            if time.monotonic() > end:
                place = self.places[streams[pending[0]]]
                raise self._ended(f"{describe(place)} did not stop sampling\n{place.end_of_log()}")
            for stream in ready:
                try:
                    _result(stream)
                except RayActorError as error:
                    raise self._explained("sampling", error, streams[stream], {}, fatal=True) from None
                except (StopIteration, RayError):
                    pending.remove(stream)

    def _explained(
        self, stage: str, error: RayError, rank: int, others: Mapping[int, Any], *, fatal: bool
    ) -> Exception:
        """What to raise for a failure, after a look at what else fails now.

        Args:
            others: what is awaited of other ranks.
            fatal: whether the workers can't be called any more, whatever it is.
        """
        with self._explaining:
            if self._failure is not None:  # as another thread has found
                return WorkerError(str(self._failure))
            failures = {rank: error}
            waiting = dict(others)
            end = time.monotonic() + _GRACE
            while waiting and lead_to(failures) is None and time.monotonic() < end:
                ready = _wait(list(waiting.values()))
                for other in [other for other, ref in waiting.items() if ref in ready]:
                    ref = waiting.pop(other)
                    try:
                        _result(ref)
                    except RayError as failure:
                        failures[other] = failure
                    except StopIteration:
                        pass
            found = explain(stage, failures, self.places)
            if isinstance(found, WorkerError):
                self._failure = found
            self._failed = fatal or self._failure is not None
            return found

    def _check_time(self, since: float, stage: str, ranks: Sequence[int]) -> None:
        now = time.monotonic()
        if now - since <= self.timeout:
            return
        asleep = [rank for rank in ranks if rank in self._asked and now - self._asked[rank][1] > _GRACE]
        late = asleep or ranks  # others may only be waiting for one that does nothing any more
        named = ", ".join(describe(self.places[rank]) for rank in late[:4]) + (", …" if len(late) > 4 else "")
        raise self._ended(
            f"no progress for {now - since:.0f} s in {stage}, which {named} did not finish"
            + (" and where no call is answered" if asleep else "")
            + f". If it only takes long, raise trainer.stage_timeout ({self.timeout:g} s).\n"
            + self.places[late[0]].end_of_log()
        )

    def _ended(self, text: str) -> WorkerError:
        """Ends the calls of all threads with one message."""
        with self._explaining:
            if self._failure is None:
                self._failure = WorkerError(text)
            self._failed = True
            return WorkerError(str(self._failure))


def _wait(refs: list[Any], count: int = 1, patience: float = _PAUSE) -> list[Any]:
    """Those that have something: up to `count`, after so many seconds fewer or none."""
    with _as_raised():
        return list(ray.wait(refs, num_returns=count, timeout=patience)[0])


def _result(of: Any) -> Any:
    """What a call returned, or the next item of a stream; one that has something."""
    with _as_raised():
        return ray.get(next(of) if isinstance(of, ray.ObjectRefGenerator) else of)


@contextmanager
def _as_raised() -> Iterator[None]:
    """What a handler of signals raises while Ray's compiled code is at work comes out of it as a SystemError."""
    try:
        yield
    except SystemError as error:
        raise error.__cause__ or error from None
