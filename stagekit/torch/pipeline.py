"""Work on groups of things in several threads, results in order, a bounded number ahead of whoever takes them."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """Iterate over ``results``, of which up to ``ahead`` are made in another thread while whoever takes them is busy.

    For work that does not gain from more threads. What is wanted and not there yet is made by the one who wants it: two threads that wait
    for each other after every result change Python's lock all the time, which costs as much as the results do. Only behind the first one,
    and whenever taking them was left for ``brief_s`` or longer, does the other thread make more. An error is raised in its place, then
    the iteration is over. ``close()`` is ``Pipeline``'s, and calls ``stop`` to wake whoever waits inside ``results``.
    """

    def __init__(
        self,
        results: Iterable[Result],
        *,
        ahead: int,
        stop: Callable[[], None],
        brief_s: float = 0.001,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waited_s = 0.0
        self.process = os.getpid()
        self._results = iter(results)
        self._ahead = ahead
        self._stop = stop
        self._brief_s = brief_s
        self._clock = clock
        self._made: deque[Result] = deque()
        self._error: BaseException | None = None
        self._stopped = self._over = self._called = False
        self._making = threading.Lock()  # whoever has it makes the next result
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        running.add(self)

    def __iter__(self) -> Iterator[Result]:
        left = None
        while True:
            began = self._clock()
            with self._change:
                self._called = False  # what is wanted now is made here
                have = bool(self._made)
            if not have:
                with self._making:  # which the other thread has, if it is at one
                    if not self._made:
                        self._make()
                self.waited_s += self._clock() - began
            with self._change:
                if not self._made:
                    break
                result = self._made.popleft()
                if (left is None or began - left >= self._brief_s) and 2 * len(self._made) <= self._ahead:
                    self._call()
            left = self._clock()
            yield result
            del result
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop, and drop what was not taken. May be called twice."""
        running.discard(self)
        with self._change:
            self._stopped = self._over = True
            self._made.clear()
            self._change.notify()
        self._stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        if self._making.acquire(blocking=False):  # else the other thread is still at one, and ends by itself
            self._making.release()
            self._end()

    def _call(self) -> None:
        """Let the other thread make some, until there are enough or one is wanted that is not there."""
        self._called = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stagekit-read", daemon=True)
            self._thread.start()
        self._change.notify()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._called or self._over)
                if self._over:
                    break
            with self._making:
                if self._called:
                    self._make()
                    with self._change:
                        self._called = self._called and len(self._made) < self._ahead
        if self._stopped:
            self._end()

    def _make(self) -> None:
        if self._over:
            return
        error = None
        try:
            result = next(self._results)
        except StopIteration:
            over = True
        except BaseException as caught:
            over, error = True, caught
        else:
            over = False
        with self._change:
            if not over and not self._stopped:
                self._made.append(result)
            self._over, self._error = self._over or over, error

    def _end(self) -> None:
        close = getattr(self._results, "close", None)
        if close is not None:
            close()


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
        groups: Iterable[Sequence[T]],
        work: Callable[[Sequence[T]], Part],
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
        self._tasks: queue.SimpleQueue[tuple[_Job[Part, Result], int, Sequence[T]] | None] = queue.SimpleQueue()
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
