"""Files and directories that a process holds by a lock of the kernel's.

The lock is gone with the last process that has the descriptor: its holder's, and those that were forked from it. So others can tell that a
holder is dead, and take its place, however it was killed. It needs no writing: a directory can be held as it is.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def hold(path: Path, flags: int = os.O_RDONLY, *, shared: bool = False, wait: bool = False) -> int:
    """``path`` open and locked, until the descriptor that is returned is closed, here and in every process that inherited it.

    It is what lies at ``path`` once the lock is taken: what somebody removed or replaced meanwhile is opened anew, or made anew with
    ``os.O_CREAT`` among the ``flags``. Else ``FileNotFoundError``. ``BlockingIOError`` when another holds it, unless ``wait``; ``shared``
    locks only stand in the way of others. After an error nothing is open.
    """
    while True:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
            if is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


@contextmanager
def held(path: Path, flags: int = os.O_RDONLY, *, shared: bool = False, wait: bool = False) -> Iterator[int]:
    """``hold``, within the block."""
    descriptor = hold(path, flags, shared=shared, wait=wait)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether another holds ``path`` for itself. ``FileNotFoundError`` when it is not there. Any number may ask at the same time."""
    try:
        with held(path, shared=True):
            return False
    except BlockingIOError:
        return True


def is_at(descriptor: int, path: Path) -> bool:
    """Whether ``path`` is still the file that is open."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
