"""Space on this machine that is promised to somebody: while a copy with a budget is under way, whatever is cached keeps out of its way.

::

    HOME/disk/<id>      one promise: the budget it belongs to and the bytes it takes; locked while its process lives

A promise is written before its bytes are, and the cache looks at all of them each time it adds a block, so the sum holds at every moment.
The kernel drops the lock with the process; a promise that nobody holds any more is removed by the next one who looks.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .config import home_directory


@contextmanager
def promised(limit: int, size: int) -> Iterator[None]:
    """Of a budget of ``limit`` bytes for this machine, ``size`` are taken within the block."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / uuid.uuid4().hex
    fresh = path.with_name(f".{path.name}")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.write(handle, json.dumps({"limit": limit, "bytes": size}).encode())
        fresh.rename(path)  # only now does anybody look at it
        yield
    finally:
        for name in (fresh, path):
            name.unlink(missing_ok=True)
        os.close(handle)


def promised_bytes() -> int:
    """The sum of all promises of processes that live."""
    return sum(size for _, size in _promises())


def left_to_cache() -> int | None:
    """How many bytes all that is cached may take now; ``None`` while there is no promise."""
    promises = list(_promises())
    if not promises:
        return None
    return max(0, min(limit for limit, _ in promises) - sum(size for _, size in promises) - pinned_bytes())


def pinned_bytes() -> int:
    """What checkpoints that wait for the bucket take of this machine's disk; a file that is pinned twice counts once."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(home_directory() / "spool"):
        for name in names:
            with suppress(FileNotFoundError):
                found = Path(folder, name).lstat()
                seen[found.st_dev, found.st_ino] = found.st_size
    return sum(seen.values())


def _promises() -> Iterator[tuple[int, int]]:
    try:
        entries = list(os.scandir(_folder()))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        with suppress(FileNotFoundError):
            handle = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                Path(entry.path).unlink(missing_ok=True)  # whoever made it is dead
            except BlockingIOError:
                found = json.loads(os.read(handle, 1000))
                yield found["limit"], found["bytes"]
            finally:
                os.close(handle)


def _folder() -> Path:
    return home_directory() / "disk"
