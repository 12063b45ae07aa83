"""Files at web addresses, where `data.allow_urls` allows them: downloaded once, then read from the disk."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
import urllib.request
from http.client import HTTPException, InvalidURL
from pathlib import Path
from typing import TypeGuard
from urllib.parse import quote

from foveal import __version__
from foveal.data.cache import cache_folder
from foveal.errors import DataError

TIMEOUT = 30.0
"""Seconds without an answer, or without another byte, after which a server is given up."""
ATTEMPTS = 3
CHUNK = 1 << 20
ALLOWED = "%/:=&?~#+!$,;'@()*[]"
"""Characters of an address, beside letters and digits, that are sent as they are; others are percent-encoded."""


def is_url(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and re.match(r"https?://", value, re.IGNORECASE) is not None


def fetch(url: str, most_bytes: int | None = None) -> Path:
    """The file at an http(s) address, from the cache on disk if it was ever downloaded there.

    A run that is resumed so finds the same bytes, whatever the server has by then.

    Args:
        most_bytes: a larger file is an error; None takes any.

    Raises:
        DataError: the server refuses or doesn't answer, or the file is too large.
    """
    address = quote(url, safe=ALLOWED)
    place = _cached(address)
    if place.is_file():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot keep downloaded files in {place.parent}: {error.strerror or error}. Set HF_HOME to a folder that "
            f"can be written."
        ) from error
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _download(address, place, most_bytes)
        except (OSError, ValueError, HTTPException) as error:  # refusals (HTTPError) and timeouts are OSErrors
            malformed = isinstance(error, ValueError | InvalidURL)
            passing = not malformed and getattr(error, "code", 500) in (408, 429, *range(500, 600))
            if attempt == ATTEMPTS or not passing:
                raise DataError(f"cannot download {url[:200]}: {error}") from error
            time.sleep(attempt)
    raise AssertionError("not reached")


def _download(url: str, place: Path, most_bytes: int | None) -> Path:
    request = urllib.request.Request(url, headers={"User-Agent": f"foveal/{__version__}"})
    handle, partial = tempfile.mkstemp(dir=place.parent)
    try:
        with os.fdopen(handle, "wb") as file, urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            length = answer.headers.get("Content-Length")
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                if most_bytes is not None and file.tell() > most_bytes:
                    raise DataError(f"{url[:200]} has more than {most_bytes:,} bytes, the most that is downloaded")
            if length is not None and file.tell() != int(length):
                raise OSError(f"the connection ended after {file.tell():,} of {int(length):,} bytes")
        os.replace(partial, place)
        return place
    finally:
        Path(partial).unlink(missing_ok=True)


def _cached(url: str) -> Path:
    name = re.sub(r"[?#].*", "", url).rpartition("/")[2][-80:]  # its ending says what kind of file it is
    return cache_folder() / "downloads" / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}-{name}"
