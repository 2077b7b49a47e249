"""Memory that bodies are read into, used again once nobody has anything of what was read.

Fresh memory costs more than the reading: the system clears each page first. A thread that reads one body after another lends the same
``Buffers`` to all of them.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

_here = threading.local()
_LEAST = 2 * 2**20  # bytes; what is smaller is had again without being cleared
_STEP = 2**18  # bytes; bodies of about one size fit into one another's memory
_SLACK = 1.125  # more than that would be held beyond what was asked for


class Buffers:
    """Memory for bodies, from any number of threads. It holds no more than was in use at one time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: deque[NDArray[np.uint8]] = deque()
        self._held = self._most = 0

    def take(self, size: int) -> memoryview:
        """``size`` bytes of whatever was there. They are free again when nobody refers to them, or to a part of them, any more."""
        with self._lock:
            array = self._found(size)
            if array is None:
                array = np.empty(-(-size // _STEP) * _STEP, np.uint8)
                self._make_room(len(array))
                self._held += len(array)
        lent = array[:size]  # what all that is made of it refers to, so that its end tells of theirs
        # Without the lock: it may happen anywhere, also in the middle of a call here. The interpreter's end needs none of it.
        weakref.finalize(lent, self._free.append, array).atexit = False
        return lent.data

    def _found(self, size: int) -> NDArray[np.uint8] | None:
        for _ in range(len(self._free)):
            array = self._free.pop()
            if size <= len(array) <= size * _SLACK:
                return array
            self._free.appendleft(array)
        return None

    def _make_room(self, size: int) -> None:
        """Give back memory that is not in use, as far as holding it would make ``size`` more bytes a new maximum."""
        self._most = max(self._most, self._held - sum(map(len, tuple(self._free))) + size)
        while self._free and self._held + size > self._most:
            self._held -= len(self._free.popleft())

    @contextmanager
    def lent(self) -> Iterator[None]:
        """What this thread reads inside goes into this memory."""
        _here.buffers = self
        try:
            yield
        finally:
            del _here.buffers


def buffer(size: int) -> memoryview:
    """``size`` bytes to read a body into: of what was lent to this thread, else fresh ones. Neither is cleared."""
    buffers: Buffers | None = getattr(_here, "buffers", None)
    if buffers is None or size < _LEAST:
        return np.empty(size, np.uint8).data
    return buffers.take(size)
