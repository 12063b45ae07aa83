"""Work done before it is asked for, in threads that end with it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def start_ahead(work: Callable[[Item], Result], items: Sequence[Item], threads: int) -> dict[Item, Future[Result]]:
    """Calls `work` on each of the (distinct) items in background threads, in their order, and returns at once.

    What `work` raises is raised by `Future.result` alone. An item not yet begun can be taken back with `Future.cancel`.
    The threads end with the last item, or with the main thread, whichever comes first: then each finishes the item
    it has in hand, and the futures of the others stay pending (they can still be cancelled).
    """
    futures: dict[Item, Future[Result]] = {item: Future() for item in items}
    waiting = deque(futures.items())

    def run() -> None:
        # A ThreadPoolExecutor would hold up the end of the program until all its items are done.
        while waiting and threading.main_thread().is_alive():
            try:
                item, future = waiting.popleft()
            except IndexError:  # another thread took the last one
                return
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(item))
                except BaseException as error:  # whatever it is, it belongs to whoever asks for the result
                    future.set_exception(error)

    for _ in range(min(threads, len(futures))):
        threading.Thread(target=run, name="foveal-ahead").start()
    return futures
