"""Work in a thread of its own, one piece at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable


class Background:
    """Does one piece of work at a time beside the caller's; what it raises comes up in `check` or `wait`, once."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, work: Callable[[], object], name: str) -> None:
        """Waits for the work before, and raises what that raised; then starts `work`."""
        self.wait()

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._failure = error

        # A daemon, so that a second Ctrl-C ends the process at once.
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits for the work under way, and raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Forgets the work under way, which dies with the process."""
        self._thread = None

    def check(self) -> None:
        """Raises what the work raised if it has ended; doesn't wait."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()


def wait_for_all(works: Iterable[Background]) -> None:
    """Waits until all work has ended, also where some failed; then raises what the first of these raised."""
    failures = []
    for work in works:
        try:
            work.wait()
        except Exception as failure:
            failures.append(failure)
    if failures:
        raise failures[0]
