"""Which epoch it is, agreed between a process and the ``DataLoader`` workers that it starts.

A ``DataLoader`` gives its workers copies of a data set and tells them nothing of epochs: copies made anew for every epoch would all read
the first one, and copies that live on would disagree after an iteration that was left early. So the copies share a small anonymous file.
The first worker of an iteration takes the next epoch, the others look up what it took.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing.context
import multiprocessing.reduction
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """One iteration: its epoch, and the state it starts from when it goes on with a loaded one."""

    epoch: int
    start: dict[str, Any] | None


class Turns:
    """The iterations of one data set, over all copies of it in this process and its workers, fork and spawn alike.

    Nothing is left behind, not even by a killed process: the file has no name, and its lock ends with whoever holds it. A copy that is
    pickled for another purpose starts a file of its own.
    """

    def __init__(self) -> None:
        self._fd = anonymous_file("stagekit-epochs")
        self._close = weakref.finalize(self, os.close, self._fd)

    def __getstate__(self) -> dict[str, Any]:
        if multiprocessing.context.get_spawning_popen() is None:
            return {"book": self._read()}
        return {"fd": multiprocessing.reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "fd" in state:
            self._fd = state["fd"].detach()
        else:
            self._fd = anonymous_file("stagekit-epochs")
            self._write({**state["book"], "turns": []})
        self._close = weakref.finalize(self, os.close, self._fd)

    @property
    def next(self) -> Turn:
        """The turn that will be taken next."""
        book = self._read()
        return Turn(book["next"], book["start"])

    @property
    def workers_seen(self) -> bool:
        """Whether a worker has taken a turn."""
        return bool(self._read()["turns"])

    def set_next(self, epoch: int, start: dict[str, Any] | None = None) -> None:
        """Let the next iteration read ``epoch``, from ``start`` if given."""
        with self._locked() as book:
            book["next"], book["start"] = epoch, start

    def take(self) -> Turn:
        """The next turn, for this process alone."""
        with self._locked() as book:
            return _advance(book)

    def take_as_worker(self, iteration: tuple[int, int], epoch: int | None = None) -> Turn:
        """The turn of an iteration, which its first worker takes. ``iteration`` is what the workers of one iteration have in common.

        With ``epoch``, that epoch (a worker that loaded its own state).
        """
        with self._locked() as book:
            for seed, number, taken, start in book["turns"]:
                if (seed, number) == iteration:
                    return Turn(taken, start)
            if epoch is not None:
                book["next"], book["start"] = epoch, None
            turn = _advance(book)
            book["turns"] = [*book["turns"], [*iteration, turn.epoch, turn.start]][-_REMEMBERED:]
            return turn

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(os.pread(self._fd, os.fstat(self._fd).st_size, 0) or b'{"next":0,"start":null,"turns":[]}')
        return found

    def _write(self, book: dict[str, Any]) -> None:
        data = json.dumps(book).encode()
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))

    @contextmanager
    def _locked(self) -> Iterator[dict[str, Any]]:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            book = self._read()
            yield book
            self._write(book)
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)


def _advance(book: dict[str, Any]) -> Turn:
    turn = Turn(book["next"], book["start"])
    book["next"], book["start"] = turn.epoch + 1, None
    return turn


def anonymous_file(name: str) -> int:
    """The descriptor of a file that no directory lists, so that nothing is left of it when the last process that has it ends."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    descriptor, path = tempfile.mkstemp(prefix=f"{name}-")
    os.unlink(path)
    return descriptor
