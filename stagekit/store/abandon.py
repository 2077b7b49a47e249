"""Calls whose result nobody waits for any more.

Whoever makes calls in threads of its own has them run under a ``Caller``. ``Caller.abandon()`` then ends what they are in: a read from a
socket is broken off, a pause before another try is over, and nothing is tried again. Each such call ends with an error that nobody reads.
What cannot be broken off (a request that has no answer yet, a read by another library) ends by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_here = threading.local()


class Caller:
    """Who makes calls, from any number of threads."""

    def __init__(self) -> None:
        self.abandoned = threading.Event()
        self._lock = threading.Lock()
        self._breaks: list[Callable[[], object]] = []

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Calls that this thread makes inside are this caller's."""
        before = getattr(_here, "caller", None)
        _here.caller = self
        try:
            yield
        finally:
            _here.caller = before

    def abandon(self) -> None:
        """End all calls, also those that are made from now on. From any thread; may be called twice."""
        with self._lock:
            self.abandoned.set()
            for break_off in self._breaks:
                with suppress(OSError):
                    break_off()

    @contextmanager
    def _breaking_off(self, break_off: Callable[[], object]) -> Iterator[None]:
        with self._lock:
            self._breaks.append(break_off)
        try:
            if self.abandoned.is_set():
                with suppress(OSError):
                    break_off()
            yield
        finally:
            with self._lock:
                self._breaks.remove(break_off)


def abandoned() -> bool:
    """Whether nobody waits for the call that this thread is in."""
    caller: Caller | None = getattr(_here, "caller", None)
    return caller is not None and caller.abandoned.is_set()


@contextmanager
def breaking_off(break_off: Callable[[], object]) -> Iterator[None]:
    """Call ``break_off``, in another thread, when this call is abandoned inside. Its ``OSError`` is none of anybody's."""
    caller: Caller | None = getattr(_here, "caller", None)
    if caller is None:
        yield
    else:
        with caller._breaking_off(break_off):
            yield


def sleep(seconds: float) -> None:
    """``time.sleep``, until this call is abandoned."""
    caller: Caller | None = getattr(_here, "caller", None)
    if caller is None:
        time.sleep(seconds)
    else:
        caller.abandoned.wait(seconds)


def carried(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` for other threads to call in the name of this one's caller."""
    caller: Caller | None = getattr(_here, "caller", None)
    if caller is None:
        return function

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with caller.calling():
            return function(*args, **kwargs)

    return call
