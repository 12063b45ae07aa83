"""Requests to an OpenAI-compatible chat server: further tries with growing pauses, and a limit on their rate."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

import httpx

LONGEST_PAUSE = 60.0
"""Seconds between two tries at most; a longer Retry-After is obeyed."""
AROUND = 9.0
"""Seconds for what comes before, between and after all tries and pauses, where the machine is busy."""


class JudgeError(Exception):
    """The server refused the request, or gave no answer in all tries."""


@dataclass(frozen=True)
class Reply:
    """What the model wrote, and the tokens that it took."""

    text: str
    input_tokens: int
    output_tokens: int


class ChatClient:
    """Asks one server.

    Args:
        url: up to and including `/v1`.
        key: sent as a bearer token; it appears in no message.
        timeout: seconds of one try.
        retries: further tries after a time-out, a lost connection, 408, 429 or 5xx.
        requests_per_minute: at which requests are spaced out, retries included.
    """

    def __init__(
        self, url: str, key: str | None, timeout: float, retries: int, requests_per_minute: float | None
    ) -> None:
        self.address = f"{url.rstrip('/')}/chat/completions"
        self._key = key
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout = timeout
        self._retries = retries
        self._interval = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._next_start = 0.0
        self._http: httpx.AsyncClient | None = None

    @property
    def longest(self) -> float:
        """Seconds that all tries take at most, with the pauses between them, where the server names none longer."""
        turn = 60.0 if self._interval else 0.0
        pauses = sum(min(LONGEST_PAUSE, 2.0**tried) for tried in range(self._retries))
        return (self._retries + 1) * (self._timeout + turn) + pauses + AROUND

    async def ask(self, request: dict[str, Any]) -> Reply:
        """The server's reply to a chat request.

        Raises:
            JudgeError: it refused, or all tries failed.
        """
        for tried in range(self._retries + 1):
            cause: Exception | None = None
            pause = min(LONGEST_PAUSE, 2.0**tried) * random.uniform(0.5, 1.0)
            try:
                await self._wait_for_turn()
                async with asyncio.timeout(self._timeout):
                    answer = await self._client().post(self.address, json=request)
            except TimeoutError as error:
                cause, problem = error, f"no answer within {self._timeout:g} s"
            except httpx.TransportError as error:
                cause, problem = error, f"{type(error).__name__} {error}".strip()
            else:
                if answer.is_success:
                    return self._read(answer)
                problem = f"status {answer.status_code}: {self._shown(answer)}"
                if answer.status_code not in (408, 429) and answer.status_code < 500:
                    raise JudgeError(f"{self.address} refused the request with {problem}")
                pause = max(pause, _retry_after(answer))
            if tried < self._retries:
                await asyncio.sleep(pause)
        raise JudgeError(f"{self.address} gave no answer in {self._retries + 1} tries; the last: {problem}") from cause

    def _read(self, answer: httpx.Response) -> Reply:
        try:
            content = answer.json()
            usage = content.get("usage") or {}
            text = content["choices"][0]["message"]["content"] or ""
            if not isinstance(text, str):
                raise TypeError("the content is no text")
            return Reply(text, int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))
        except (ValueError, LookupError, TypeError, AttributeError):
            shown = self._shown(answer)
            raise JudgeError(f"{self.address} sent something that is no chat completion: {shown!r}") from None

    def _shown(self, answer: httpx.Response) -> str:
        """The beginning of what the server sent, without the key: some repeat the one that they refuse."""
        text = answer.text.replace(self._key, "…") if self._key else answer.text
        return text[:300]

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:  # within the event loop that it belongs to
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
            self._http = httpx.AsyncClient(headers=self._headers, timeout=None, limits=limits)
        return self._http

    async def _wait_for_turn(self) -> None:
        if self._interval:
            now = time.monotonic()
            start = max(now, self._next_start)
            self._next_start = start + self._interval
            await asyncio.sleep(start - now)


def _retry_after(answer: httpx.Response) -> float:
    try:
        return float(answer.headers.get("Retry-After", 0))
    except ValueError:  # a date
        return 0.0
