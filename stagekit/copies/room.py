"""The room that one pull has in the budget of this machine: taken before each write, and kept while checkpoints come beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..budget import Promise, answer, is_removing, pinned_bytes, pins, promised, promises
from ..config import cache_directory
from ..errors import OutOfSpace
from ..progress import Message, Subscriber
from ..stream.cache import give_way
from ..units import format_duration, format_size

PATIENCE_S = 600.0
"""So long a pull waits for checkpoints to reach the bucket, when only they are in its way."""
_LOOK_S = 0.05
_DOUBTS = 200  # looks; what a killed process was removing stays
_LAST_WRITE_S = 1.0


@contextmanager
def room_within(
    limit: int,
    size: int,
    held: int,
    clear: Callable[[], None],
    *,
    name: str,
    target: Path,
    on_event: Subscriber,
    patience_s: float = PATIENCE_S,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Room]:
    """Room for ``size`` bytes within the block, ``held`` of which are on the disk already, after cached blocks went where that is needed.

    ``clear`` removes all that has arrived, from any thread. Raises ``OutOfSpace`` with the numbers when there is none.
    """
    with promised(limit, size) as promise:  # first, so that nothing is cached any more in what is about to be counted
        made = Room(promise, held, clear, f"pulling {name} to {target}", name, on_event, patience_s, clock)
        made.begin()
        try:
            yield made
        finally:
            made.end()


class Room:
    """See ``room_within``. ``taking`` and ``give_back`` may be called from any thread."""

    def __init__(
        self,
        promise: Promise,
        held: int,
        clear: Callable[[], None],
        doing: str,
        name: str,
        on_event: Subscriber,
        patience_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._promise, self._clear, self._doing, self._name = promise, clear, doing, name
        self._on_event, self._patience_s, self._clock = on_event, patience_s, clock
        self._arrived, self._writing = held, 0
        self._pinned = self._pulls = self._cached = self._held = 0
        self._doubts = 0
        self._target: int | None = None
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stagekit-room", daemon=True)
        self._told = False
        self.overrun = False
        """Whether a checkpoint came that leaves no room for what had arrived, which is removed then."""

    def begin(self) -> None:
        """Make room, then keep an eye on it. Raises ``OutOfSpace`` when it cannot be had."""
        removed = self._look()
        if removed:
            self._on_event(Message(f"{format_size(removed)} of cached blocks gave way to {self._name}; they are fetched again when needed"))
        if self._beside + self._promise.size > self._promise.limit:
            raise OutOfSpace(f"{self._doing} needs {format_size(self._promise.size)}, and {self._numbers}; raise it, or wait for them")
        self._thread.start()

    def end(self) -> None:
        """Look no more."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    @contextmanager
    def taking(self, size: int) -> Iterator[None]:
        """``size`` bytes more are written within the block. Raises ``OutOfSpace`` when checkpoints are in the way and stay there."""
        self._wait_for(size)
        try:
            yield
        finally:
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()

    def _wait_for(self, size: int) -> None:
        began = self._clock()
        while True:
            with self._changed:
                if not self.overrun and self._arrived + size + self._beside <= self._promise.limit:
                    self._arrived += size
                    self._writing += 1
                    return
                waiting, self._told = not self._told, True
                if self.overrun or self._clock() - began > self._patience_s:
                    raise self.refusal()
            if waiting:
                self._on_event(Message(f"{self._doing} waits until checkpoints are in the bucket: {self._numbers}", "warning"))
            with self._changed:
                self._changed.wait(_LOOK_S)

    def give_back(self, size: int) -> None:
        """``size`` bytes that were taken are on the disk no more."""
        with self._changed:
            self._arrived -= size
            self._changed.notify_all()

    @property
    def _beside(self) -> int:
        return self._pinned + self._pulls + self._cached

    @property
    def _numbers(self) -> str:
        left = max(0, self._promise.limit - self._beside)
        return (
            f"of the {format_size(self._promise.limit)} that --disk allows {format_size(left)} are left: pinned checkpoints hold "
            f"{format_size(self._pinned)}, cached blocks in use {format_size(self._cached)}, other pulls {format_size(self._pulls)}"
        )

    def refusal(self) -> OutOfSpace:
        """Why this pull ends."""
        if self.overrun:
            what = f"{format_size(self._arrived)} had come and was removed again, since a checkpoint was saved meanwhile"
        else:
            what = f"checkpoints that were saved meanwhile were in its way for {format_duration(self._patience_s)}"
        return OutOfSpace(f"{self._doing}: {what}; {self._numbers}. Raise it, or repeat the command when they are in the bucket")

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            if removed := self._look():
                gone = f"{format_size(removed)} of cached blocks gave way to a checkpoint or another pull"
                self._on_event(Message(f"{gone}; they are fetched again when needed"))

    def _believed(self, pinned: int) -> int:
        """What checkpoints take. That it is less than before is believed once none is being removed: space comes back last."""
        if pinned < self._pinned and self._doubts < _DOUBTS and (is_removing() or not self._doubts):
            self._doubts += 1
            return self._pinned
        self._doubts = 0
        return pinned

    def _look(self) -> int:
        """See what the others hold, have cached blocks go where that is needed, and answer whoever pins. Returns the bytes that went."""
        coming = pins()
        pinned = self._believed(pinned_bytes(coming))
        pulls = sum(one.size for one in promises() if one.id != self._promise.id)
        target = max(0, self._promise.limit - self._promise.size - pulls - pinned)
        removed = 0
        if self._target is None or target < self._target or self._held > target:
            removed, self._held = give_way(cache_directory(), target)
        self._target = target
        with self._changed:
            self._pinned, self._pulls = pinned, pulls
            self._cached = max(self._held, target)  # as many may be added by now
            self._changed.notify_all()
            if not self.overrun and self._arrived + self._beside > self._promise.limit:
                self.overrun = True
                self._changed.wait_for(lambda: not self._writing, _LAST_WRITE_S)
                self._clear()
        for pin in coming:
            answer(self._promise, pin)
        return removed
