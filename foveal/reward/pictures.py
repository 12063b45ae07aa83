"""The pictures of a prompt as a reward function gets them: fetched from the run when they are first looked at."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from foveal.reward.contract import Answer, Outcome, PictureRequest

if TYPE_CHECKING:
    from PIL.Image import Image


class RewardPicture:
    """One picture of the prompt. Nothing is sent or decoded before `data` or `open` is asked for.

    Attributes:
        name: where it came from, as "row 3, image 0 (a.png)".
    """

    def __init__(self, name: str, fetch: Callable[[], bytes]) -> None:
        self.name = name
        self._fetch = fetch
        self._data: bytes | None = None

    @property
    def data(self) -> bytes:
        """The encoded bytes, as the file has them.

        Raises:
            RuntimeError: first asked for after the call that it was given to, or in a forked process.
        """
        if self._data is None:
            self._data = self._fetch()
        return self._data

    def open(self) -> Image:
        """The whole picture as upright RGB, decoded as for the model but not resized."""
        from foveal.data.images import decode_image

        return decode_image(self.data, self.name)

    def __repr__(self) -> str:
        return f"<picture {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """With its bytes, so that it can be handed to processes of the user's own."""
        return _with_data, (self.name, self.data)


def _with_data(name: str, data: bytes) -> RewardPicture:
    return RewardPicture(name, lambda: data)


class PictureLink:
    """The reward process's side: puts pictures into inputs, asks the run for their bytes, and hands outcomes back."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._calls: dict[int, object] = {}
        self._pid = os.getpid()

    def attach(self, sample: int, one: dict[str, Any]) -> None:
        """Replaces the names under "images" of input `sample` by pictures, for the call that begins."""
        self._calls[sample] = call = object()
        names: list[str] = one["images"]
        one["images"] = [
            RewardPicture(name, self._fetcher(call, PictureRequest(sample, number)))
            for number, name in enumerate(names)
        ]

    def answer(self, outcomes: list[Outcome]) -> None:
        """Ends the call with its outcomes; threads that the function left behind get no more pictures."""
        with self._lock:
            self._calls.clear()
            self._connection.send(outcomes)

    def trade(self, outcomes: dict[int, Outcome]) -> dict[int, Answer]:
        """Ends some of the calls with their outcomes, and gets what is to be begun in their place."""
        with self._lock:
            for sample in outcomes:
                del self._calls[sample]
            self._connection.send(outcomes)
            return self.receive()

    def receive(self) -> dict[int, Answer]:
        """Waits for answers to begin with, by number, and gives them their pictures."""
        new: dict[int, Answer] = self._connection.recv()
        for sample, answer in new.items():
            self.attach(sample, answer.input)
        return new

    def _fetcher(self, call: object, request: PictureRequest) -> Callable[[], bytes]:
        def fetch() -> bytes:
            if os.getpid() != self._pid:
                raise RuntimeError("pictures can't be fetched in a forked process; read `data` before forking")
            with self._lock:
                if self._calls.get(request.sample) is not call:
                    raise RuntimeError("this picture belongs to a call that is over; read its `data` during the call")
                self._connection.send(request)
                data: bytes = self._connection.recv()
                return data

        return fetch
