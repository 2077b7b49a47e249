"""The same call on many things at once, results in order.

Threads are daemons: an executor of the standard library is joined when the interpreter ends, and one stalled request would hold the
process for its time-out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def each(function: Callable[[T], R], items: Iterable[T], *, threads: int = 8) -> Iterator[R]:
    """``function(item)`` for every item, in ``threads`` threads, yielded in the order of ``items``.

    An error is raised in its item's place, and nothing new is started after it. ``items`` is drawn lazily, at most ``4 * threads`` ahead
    of what was taken. Leaving the iteration early stops the threads after their current call and does not wait for them.
    Where no thread can be started, as while the interpreter ends (Python 3.12 and later), the calls are made here, one after the other.
    """
    drawn = iter(items)
    work = _Work(function, drawn, ahead=4 * threads)
    for number in range(threads):
        try:
            threading.Thread(target=work.run, name=f"stagekit-each-{number}", daemon=True).start()
        except RuntimeError:
            if not number:
                yield from map(function, drawn)
                return
            break
    try:
        while True:
            taken, result = work.take()
            if not taken:
                return
            yield result.get()
    finally:
        work.stop()


class Beside(Generic[R]):
    """``function()`` in a thread of its own, a daemon, that starts at once. Where none can be started the call is made here."""

    def __init__(self, function: Callable[[], R]) -> None:
        self._function = function
        self._thread = threading.Thread(target=self._work, name="stagekit-beside", daemon=True)
        self._result = _Result[R]()
        try:
            self._thread.start()
        except RuntimeError:
            self._work()

    def _work(self) -> None:
        try:
            self._result.value.append(self._function())
        except BaseException as error:
            self._result.error = error

    def get(self) -> R:
        """Wait for it, and return what it gave or raise what it raised."""
        if self._thread.ident is not None:
            self._thread.join()
        return self._result.get()


class _Result(Generic[R]):
    """What one call gave."""

    def __init__(self) -> None:
        self.value: list[R] = []
        self.error: BaseException | None = None

    def get(self) -> R:
        if self.error is not None:
            raise self.error
        return self.value[0]


class _Work(Generic[T, R]):
    def __init__(self, function: Callable[[T], R], items: Iterator[T], ahead: int) -> None:
        self._function, self._items, self._ahead = function, items, ahead
        self._changed = threading.Condition()
        self._finished: dict[int, _Result[R]] = {}
        self._drawn = self._taken = 0
        self._exhausted = False

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._exhausted or self._drawn - self._taken < self._ahead)
                if self._exhausted:
                    return
                number, result = self._drawn, _Result[R]()
                try:
                    item = next(self._items)
                except StopIteration:
                    self._exhausted = True
                    self._changed.notify_all()
                    return
                except BaseException as error:
                    result.error = error
                    self._exhausted = True
                self._drawn += 1
                if result.error is not None:
                    self._finished[number] = result
                    self._changed.notify_all()
                    return
            try:
                result.value.append(self._function(item))
            except BaseException as error:
                result.error = error
            with self._changed:
                if result.error is not None:
                    self._exhausted = True
                self._finished[number] = result
                self._changed.notify_all()

    def take(self) -> tuple[bool, _Result[R]]:
        with self._changed:
            self._changed.wait_for(lambda: self._taken in self._finished or (self._exhausted and self._taken == self._drawn))
            if self._taken not in self._finished:
                return False, _Result()
            result = self._finished.pop(self._taken)
            self._taken += 1
            self._changed.notify_all()
            return True, result

    def stop(self) -> None:
        with self._changed:
            self._exhausted = True
            self._changed.notify_all()
