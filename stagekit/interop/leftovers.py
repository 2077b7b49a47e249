"""What killed runs leave behind, in shared memory and beside their files: removed when it is certain that nobody has it any more.

MosaicML's package keeps the state that the processes of a run share in objects called ``000007_locals``, ``000007_next_epoch`` and so on:
one number a dataset. A run that is killed with all its helpers leaves them, and the next one is told that its local directory is in use.

Two things make it certain. A run that ``mosaicml()`` started has a *mark*, a file under a lock that the kernel takes back with the last of
its processes. For others, the kernel is asked whether anybody has an object open. That is less: a later run looks at all objects there are,
and keeps them open, so they are left while it lives.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import re
import signal
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from pathlib import Path

from ..locks import hold, is_at

SHARED_MEMORY = Path("/dev/shm")
LOCALS = "locals"
MARK = "stagekit"

_NAME = re.compile(r"([0-9]{6,})_([a-z_]+)")
_SETTLE_S = 1.0
_marks: list[tuple[int, int, Path]] = []  # whose it is, and a descriptor that is open as long as this process and those forked from it


def mark(number: int, folder: Path = SHARED_MEMORY) -> None:
    """Let everybody know that this process has the dataset ``number``: until it ends, and all that are forked from it. An orderly end
    removes the mark.

    Where that is not possible (another user's mark is there), the dataset is as one of MosaicML's own.
    """
    path = folder / f"{number:06}_{MARK}"
    with suppress(OSError):
        identity = _identity(folder / f"{number:06}_{LOCALS}")
        # Somebody may be about to remove the mark of an earlier dataset with this number.
        descriptor = hold(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, shared=True, wait=True)
        os.pwrite(descriptor, identity, 0)
        _marks.append((os.getpid(), descriptor, path))


@atexit.register
def _unmark() -> None:
    for process, descriptor, path in _marks:
        with suppress(OSError):  # another rank has it still
            if process == os.getpid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # instead of the shared one that it has
                if is_at(descriptor, path):
                    path.unlink()


def remove_leftovers(names: Collection[str], folder: Path = SHARED_MEMORY, *, sleep: Callable[[float], None] = time.sleep) -> list[str]:
    """Remove the objects of datasets that no process has any more, and return their names. ``names`` are the kinds of objects there are.

    A dataset's objects are removed together. Where it is not certain that nobody has them (objects of other users, kernels without
    leases), they are left. Objects are given a second first: Python has a helper that removes what its dead parent made, and it must not
    find the next run's under the same name.
    """
    if not all(_is_mark(name) for name in _dead(names, folder, remove=False)):
        sleep(_SETTLE_S)
    return _dead(names, folder, remove=True)


def directories_in_use(folder: Path = SHARED_MEMORY) -> set[str]:
    """The local directories of the datasets with a mark that some process has."""
    found: set[str] = set()
    for number, [path] in _objects([LOCALS], folder).items():
        with ExitStack() as held, suppress(OSError, ValueError, struct.error):
            if _lock_mark(folder, number, held) is False:
                found.update(_directories(path.read_bytes()))
    return found


def remove_unfinished(directory: Path) -> list[str]:
    """Remove what interrupted downloads left below ``directory``, and return its names. What somebody is writing is left."""
    removed = []
    for path in directory.rglob(".*.part"):
        with ExitStack() as held, suppress(OSError):
            if _lease(path, held):
                path.unlink()
                removed.append(path.name)
    return removed


def _dead(names: Collection[str], folder: Path, *, remove: bool) -> list[str]:
    """The objects that nobody has, with marks that are of no use any more."""
    found: list[str] = []
    for number, paths in _objects([*names, MARK], folder).items():
        with ExitStack() as held:
            marked = _lock_mark(folder, number, held)
            if marked is False:
                continue
            if marked is None and not all(_lease(path, held) for path in paths if not _is_mark(path.name)):
                continue
            # While the dead dataset's ``locals`` is there, no run takes its number. So it goes behind all others.
            for path in sorted(paths, key=lambda one: (_is_mark(one.name), one.name.endswith(f"_{LOCALS}"))):
                with suppress(OSError):  # another user's
                    if remove:
                        path.unlink(missing_ok=True)
                    found.append(path.name)
    return found


def _lock_mark(folder: Path, number: str, held: ExitStack) -> bool | None:
    """Whether the processes that marked the dataset are dead, which holds until ``held`` ends. ``None`` when it has no mark of its own."""
    path = folder / f"{number}_{MARK}"
    try:
        descriptor = hold(path, os.O_RDWR | os.O_NOFOLLOW)
    except BlockingIOError:
        return False
    except OSError:
        return None
    held.callback(os.close, descriptor)
    try:
        identity = _identity(folder / f"{number}_{LOCALS}")
    except OSError:
        return None
    return True if os.pread(descriptor, len(identity) + 1, 0) == identity else None


def _lease(path: Path, held: ExitStack) -> bool:
    """Whether nobody has the file open or mapped, in whatever container. Then who opens it waits until ``held`` ends.

    That is what the kernel grants a write lease for. Where it cannot be asked, the answer is no.
    """
    try:
        # Without O_NONBLOCK it would wait for another process that holds a lease.
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        return error.errno == errno.ENOENT
    held.callback(os.close, descriptor)
    try:
        # Who opens it meanwhile causes a signal here. That would be SIGIO, which ends the process.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    return True


def _objects(names: Collection[str], folder: Path) -> dict[str, list[Path]]:
    """The objects of each dataset, by its number."""
    found: dict[str, list[Path]] = defaultdict(list)
    with suppress(FileNotFoundError):  # no shared memory on this machine
        for name in sorted(os.listdir(folder)):
            match = _NAME.fullmatch(name)
            if match is not None and match[2] in names:
                found[match[1]].append(folder / name)
    return dict(found)


def _is_mark(name: str) -> bool:
    return name.endswith(f"_{MARK}")


def _directories(data: bytes) -> list[str]:
    """What a ``locals`` object lists: its length, then texts with NUL between them, the last of which is the dataset's number."""
    [length] = struct.unpack_from("=i", data)
    return data[4:length].decode().split("\0")[:-1]


def _identity(path: Path) -> bytes:
    """What tells an object from a later one of the same name."""
    return f"{path.stat().st_ino:020}".encode()
