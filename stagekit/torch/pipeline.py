"""Work on groups of things in several threads, results in order, a bounded number ahead of whoever takes them."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")
Part = TypeVar("Part")
Result = TypeVar("Result")

_JOIN_S = 2.0
running: weakref.WeakSet[Any] = weakref.WeakSet()
"""Work that is to be closed before the interpreter ends: objects with ``process`` (whose they are) and ``close()``."""


@atexit.register
def _close_running() -> None:
    """Stop what a script left in the middle when it ended: torch aborts the process when its threads are stopped by the interpreter."""
    for pipeline in list(running):
        if pipeline.process == os.getpid():  # a forked child has a copy whose threads, and perhaps locks, belong to the parent
            pipeline.close()


class Ahead(Generic[Result]):
    """Iterate over ``results``, made in one other thread, at most ``ahead`` before the one that was taken last.

    For work that does not gain from more threads: what is handed over is made where it is read. The thread that makes and the one that
    takes wake each other as seldom as they can, since every time costs a change of Python's lock. An error is raised in its place, then
    the iteration is over. ``close()`` is ``Pipeline``'s, and calls ``stop`` to wake a thread that waits inside ``results``.
    """

    def __init__(
        self, results: Iterable[Result], *, ahead: int, stop: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.waited_s = 0.0
        self.process = os.getpid()
        self._results = results
        self._ahead = ahead
        self._stop = stop
        self._clock = clock
        self._made: deque[Result] = deque()
        self._error: BaseException | None = None
        self._stopped = self._over = self._hungry = self._full = False
        lock = threading.Lock()
        self._filled, self._drained = threading.Condition(lock), threading.Condition(lock)
        self._thread = threading.Thread(target=self._make, name="stagekit-read", daemon=True)
        running.add(self)
        self._thread.start()

    def __iter__(self) -> Iterator[Result]:
        while True:
            with self._filled:
                if not self._made and not self._over:
                    began = self._clock()
                    self._hungry = True
                    self._filled.wait_for(lambda: self._made or self._over)
                    self.waited_s += self._clock() - began
                if not self._made:
                    break
                result = self._made.popleft()
                if self._full and 2 * len(self._made) <= self._ahead:
                    self._full = False
                    self._drained.notify()
            yield result
            del result
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop, and drop what was not taken. May be called twice."""
        running.discard(self)
        with self._drained:
            self._stopped = self._over = True
            self._made.clear()
            self._drained.notify()
        self._stop()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _make(self) -> None:
        results = iter(self._results)
        try:
            for result in results:
                with self._drained:
                    if len(self._made) >= self._ahead:
                        self._full = True
                        self._drained.wait_for(lambda: not self._full or self._stopped)
                    if self._stopped:
                        return
                    self._made.append(result)
                    if self._hungry:
                        self._hungry = False
                        self._filled.notify()
                del result
        except BaseException as error:
            self._error = error
        finally:
            close = getattr(results, "close", None)
            if close is not None:
                close()
            with self._filled:
                self._over = True
                self._filled.notify()


class _Job(Generic[Part, Result]):
    """One group on its way: its parts are worked on apart, whoever finishes the last one puts them together."""

    def __init__(self, parts: int) -> None:
        self.parts: list[Part | None] = [None] * parts
        self.errors: dict[int, BaseException] = {}
        self.open = parts
        self.lock = threading.Lock()
        self.done = threading.Event()
        self.result: Result | None = None


class Pipeline(Generic[T, Part, Result]):
    """Iterate over ``finish([work(part), …])`` for every group of ``groups``, in order.

    A group is cut into as many parts as there are threads, so that one group alone keeps all of them busy. ``groups`` is iterated in a
    thread of its own, at most ``ahead`` groups before the one that was taken last. An error, wherever it happened, is raised in its
    group's place, then the iteration is over.

    ``close()`` stops all threads, which are daemons, and waits for them up to two seconds; ``stop_groups`` is called to wake one that
    waits inside ``groups``.
    """

    def __init__(
        self,
        groups: Iterable[list[T]],
        work: Callable[[list[T]], Part],
        finish: Callable[[list[Part]], Result],
        *,
        threads: int,
        ahead: int = 2,
        cut: bool = True,
        stop_groups: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waited_s = 0.0
        self.process = os.getpid()
        self._groups, self._work, self._finish = groups, work, finish
        self._parts = threads if cut else 1
        self._stop_groups = stop_groups
        self._clock = clock
        self._room = threading.Semaphore(ahead)
        self._jobs: queue.SimpleQueue[_Job[Part, Result] | None] = queue.SimpleQueue()
        self._tasks: queue.SimpleQueue[tuple[_Job[Part, Result], int, list[T]] | None] = queue.SimpleQueue()
        self._stopped = False
        self._threads = [threading.Thread(target=self._feed, name="stagekit-read", daemon=True)]
        self._threads += [threading.Thread(target=self._serve, name=f"stagekit-decode-{i}", daemon=True) for i in range(threads)]
        running.add(self)
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Result]:
        while True:
            began = self._clock()
            job = self._jobs.get()
            if job is None:
                return
            job.done.wait()
            self.waited_s += self._clock() - began
            self._room.release()
            if job.errors:
                raise job.errors[min(job.errors)]
            yield job.result  # type: ignore[misc]  # set by _complete, whose type may itself be None

    def close(self) -> None:
        """Stop, and drop what was not taken. May be called twice."""
        running.discard(self)
        self._stopped = True
        self._stop_groups()
        self._room.release()
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _feed(self) -> None:
        groups = iter(self._groups)
        try:
            while not self._stopped:
                self._room.acquire()
                if self._stopped:
                    return
                group = next(groups, None)
                if group is None:
                    return
                each = max(1, -(-len(group) // self._parts))
                chunks = [group[first : first + each] for first in range(0, len(group), each)] or [group]
                job: _Job[Part, Result] = _Job(len(chunks))
                self._jobs.put(job)
                for number, chunk in enumerate(chunks):
                    self._tasks.put((job, number, chunk))
        except BaseException as error:
            failed: _Job[Part, Result] = _Job(0)
            failed.errors[0] = error
            failed.done.set()
            self._jobs.put(failed)
        finally:
            close = getattr(groups, "close", None)
            if close is not None:
                close()
            self._jobs.put(None)

    def _serve(self) -> None:
        while not self._stopped and (task := self._tasks.get()) is not None:
            job, number, chunk = task
            try:
                job.parts[number] = self._work(chunk)
            except BaseException as error:
                job.errors[number] = error
            with job.lock:
                job.open -= 1
                last = not job.open
            if last:
                self._complete(job)
            del task, job, chunk

    def _complete(self, job: _Job[Part, Result]) -> None:
        try:
            if not job.errors:
                job.result = self._finish(job.parts)  # type: ignore[arg-type]  # every part is set by now
        except BaseException as error:
            job.errors[len(job.parts)] = error
        job.parts = []
        job.done.set()
