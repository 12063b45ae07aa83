"""A bound on the memory that processed pictures take."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Any

from foveal.types import Prompt

LIMIT_BYTES = 4 << 30
"""Of features kept per process. A 1-megapixel picture takes 24 MB (float32, each pixel twice), so a batch of 512 such
prompts would take 12 GB if nothing were dropped."""


class FeatureCache:
    """Takes features off the prompts that were used longest ago, when all together exceed `limit` bytes.

    Prompts are held weakly: what nobody uses any more counts no longer.
    """

    def __init__(self, limit: int = LIMIT_BYTES) -> None:
        self.limit = limit
        self.used = 0
        self._prompts: OrderedDict[int, tuple[weakref.ref[Prompt], int]] = OrderedDict()
        # Re-entrant: the garbage collector may forget a prompt while this thread holds the lock.
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return FeatureCache, (self.limit,)

    def keep(self, prompt: Prompt, *, used: bool = True) -> None:
        """Counts the prompt's features as just used, and drops others where the limit asks for it.

        Args:
            used: False for a prompt that waits for its turn: it counts as used longest ago, so that it never displaces
                one in use, but is itself dropped where there is no room.
        """
        key = id(prompt)
        size = sum(value.numel() * value.element_size() for value in (prompt.features or {}).values())
        with self._lock:
            self._forget(key)
            self._prompts[key] = weakref.ref(prompt, lambda _: self._forget(key)), size
            self.used += size
            if not used:
                self._prompts.move_to_end(key, last=False)
            while self.used > self.limit:
                oldest = next(iter(self._prompts))
                if used and oldest == key:
                    break
                self._drop(oldest)

    def _drop(self, key: int) -> None:
        entry = self._prompts.get(key)
        prompt = entry and entry[0]()
        if prompt is not None:
            prompt.features = None
        self._forget(key)

    def _forget(self, key: int) -> None:
        with self._lock:
            _, size = self._prompts.pop(key, (None, 0))
            self.used -= size
