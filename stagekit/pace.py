"""A limit on bytes per second, for links that are shared with people."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pace:
    """Lets ``bytes_per_s`` through on average, from the first byte on, over all threads that share it.

    Unused time is not saved up: a pause is followed by no burst.
    """

    def __init__(
        self, bytes_per_s: float, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_at_s = clock()
        self._lock = threading.Lock()

    def wait(self, size: int) -> None:
        """Return when ``size`` bytes more may go."""
        with self._lock:
            now_s = self._clock()
            begin_s = max(self._free_at_s, now_s)
            self._free_at_s = begin_s + size / self._bytes_per_s
        if begin_s > now_s:
            self._sleep(begin_s - now_s)
