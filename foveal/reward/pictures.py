"""The pictures of a prompt as a reward function gets them: fetched from the run when they are first looked at."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from foveal.reward.contract import PictureRequest

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
    """The reward process's side: puts pictures into the inputs of a call, and asks the run for their bytes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._call = 0
        self._pid = os.getpid()

    def attach(self, inputs: list[dict[str, Any]]) -> None:
        """Replaces the names under "images" of each input by pictures, for the call that begins."""
        for sample, one in enumerate(inputs):
            names: list[str] = one["images"]
            one["images"] = [
                RewardPicture(name, self._fetcher(self._call, PictureRequest(sample, number)))
                for number, name in enumerate(names)
            ]

    def answer(self, outcomes: Any) -> None:
        """Ends the call with its outcomes; threads that the function left behind get no more pictures."""
        with self._lock:
            self._call += 1
            self._connection.send(outcomes)

    def _fetcher(self, call: int, request: PictureRequest) -> Callable[[], bytes]:
        def fetch() -> bytes:
            if os.getpid() != self._pid:
                raise RuntimeError("pictures can't be fetched in a forked process; read `data` before forking")
            with self._lock:
                if call != self._call:
                    raise RuntimeError("this picture belongs to a call that is over; read its `data` during the call")
                self._connection.send(request)
                data: bytes = self._connection.recv()
                return data

        return fetch
