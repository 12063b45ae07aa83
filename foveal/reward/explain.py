"""What went wrong in the user's code, as text for people."""

from __future__ import annotations

import errno
import socket
import traceback
from collections.abc import Iterator

LONGEST_ERROR = 500
LONGEST_TRACEBACK = 20_000
MODULE_NAME = "_foveal_user_reward"
"""Name of the module made of the user's file; private, so that a file called math.py replaces no library."""

NO_NETWORK = (
    "The reward process reached no network there: nothing answers at that address, or this machine has no way out. "
    "Download beforehand what the function needs and name it by a local path, start the server that it asks, or set "
    "its address right."
)
_UNREACHABLE = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ECONNREFUSED}


def user_traceback(error: BaseException, file: str) -> str:
    """The traceback of `error` from the user's file on, without our own frames."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != file:
        frame = frame.tb_next
    text = "".join(traceback.format_exception(type(error), error, frame)).rstrip()
    return clipped(text, LONGEST_TRACEBACK)


def short_text(error: BaseException) -> str:
    """Type and message of `error`, also where its own `__str__` fails, cut to what a person reads."""
    text = traceback.format_exception_only(error)[-1].strip().removeprefix(f"{MODULE_NAME}.")
    return clipped(text, LONGEST_ERROR)


def clipped(text: str, most: int) -> str:
    """The first `most` characters of `text`, and … where there were more."""
    return text if len(text) <= most else f"{text[:most]}…"


def cure_for(error: BaseException) -> str:
    """What to do about an error of the user's code that has one known cause, else nothing."""
    return NO_NETWORK if any(_is_unreachable(one) for one in _causes(error, set())) else ""


def _is_unreachable(error: BaseException) -> bool:
    if isinstance(error, socket.gaierror) or type(error).__name__ == "OfflineModeIsEnabled":
        return True
    return isinstance(error, OSError) and error.errno in _UNREACHABLE


def _causes(error: BaseException, seen: set[int]) -> Iterator[BaseException]:
    """`error` and every exception that it was raised from or holds, as libraries for HTTP wrap them."""
    if id(error) in seen:
        return
    seen.add(id(error))
    yield error
    held = (error.__cause__, error.__context__, getattr(error, "reason", None), *error.args)
    for one in held:
        if isinstance(one, BaseException):
            yield from _causes(one, seen)
