"""Memory that bodies are read into, used again once nobody has anything of what was read.

Fresh memory costs more than the reading: the system clears each page first. A thread that reads one body after another lends the same
``Buffers`` to all of them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

_here = threading.local()
_LEAST = 2 * 2**20  # bytes; what is smaller is had again without being cleared
_STEP = 2**18  # bytes; bodies of about one size fit into one another's memory
_SLACK = 1.125  # more than that would be held beyond what was asked for
_OURS = 3  # references to an array of the pool that nobody else has: the pool's, a variable, and the argument that counts them


class Buffers:
    """Memory for bodies, from any number of threads. It holds no more than was in use at one time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrays: list[NDArray[np.uint8]] = []
        self._most = 0

    def take(self, size: int) -> memoryview:
        """``size`` bytes of whatever was there. They are free again when nobody refers to them, or to a part of them, any more."""
        with self._lock:
            for number in range(len(self._arrays) - 1, -1, -1):
                array = self._arrays[number]
                if size <= len(array) <= size * _SLACK and sys.getrefcount(array) == _OURS:
                    return array.data[:size]
            array = np.empty(-(-size // _STEP) * _STEP, np.uint8)
            self._make_room(len(array))
            self._arrays.append(array)
            return array.data[:size]

    def _make_room(self, size: int) -> None:
        """Give back memory that is not in use, as far as holding it would make ``size`` more bytes a new maximum."""
        free, used = list[NDArray[np.uint8]](), list[NDArray[np.uint8]]()
        while self._arrays:
            array = self._arrays.pop()
            (free if sys.getrefcount(array) == _OURS - 1 else used).append(array)
        held = size + sum(map(len, used))
        self._most = max(self._most, held)
        for array in free:
            if held + len(array) <= self._most:
                held += len(array)
                used.append(array)
        self._arrays = used

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
