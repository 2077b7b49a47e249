"""A limit on bytes per second, for links that are shared with people."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Lets ``bytes_per_s`` through on average, from the first byte on. Unused time is not saved up: a pause is followed by no burst."""

    def __init__(
        self, bytes_per_s: float, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_at_s = clock()

    def wait(self, size: int) -> None:
        """Return when ``size`` bytes more may go."""
        now_s = self._clock()
        if self._free_at_s > now_s:
            self._sleep(self._free_at_s - now_s)
        self._free_at_s = max(self._free_at_s, now_s) + size / self._bytes_per_s
