"""What killed runs leave behind, in shared memory and beside their files: removed on the kernel's word that nobody has it any more.

MosaicML's package keeps the state that the processes of a run share in objects called ``000007_locals``, ``000007_next_epoch`` and so on:
one number a dataset. A run that is killed with all its helpers leaves them, and the next one is told that its local directory is in use.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import struct
from collections import defaultdict
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LOCALS = "locals"

_NAME = re.compile(r"([0-9]{6,})_([a-z_]+)")


def remove_leftovers(names: Collection[str], folder: Path = SHARED_MEMORY) -> list[str]:
    """Remove the objects of datasets that no process has any more, and return their names. ``names`` are the kinds of objects there are.

    A dataset's objects are removed together, and only when the kernel says of each that no process on this machine, in whatever container,
    has it open or mapped. Where it does not say so (objects of other users, kernels without leases) they are left.
    """
    removed = []
    for number, paths in _datasets(names, folder).items():
        with ExitStack() as held:
            if not all(_held(path, held) for path in paths):
                continue
            if _datasets(names, folder).get(number) != paths:
                continue  # somebody has begun to make one with this number
            for path in paths:
                path.unlink(missing_ok=True)
                removed.append(path.name)
    return removed


def remove_unfinished(directory: Path) -> list[str]:
    """Remove what interrupted downloads left below ``directory``, and return its names. What somebody is writing is left."""
    removed = []
    for path in directory.rglob(".*.part"):
        with ExitStack() as held, suppress(OSError):
            if _held(path, held):
                path.unlink()
                removed.append(path.name)
    return removed


def directories_in_use(folder: Path = SHARED_MEMORY) -> set[str]:
    """The local directories of the datasets that some process has."""
    found: set[str] = set()
    for [path] in _datasets([LOCALS], folder).values():
        with ExitStack() as held, suppress(OSError, ValueError, struct.error):
            if _held(path, held) is False:
                found.update(_directories(path.read_bytes()))
    return found


def _directories(data: bytes) -> list[str]:
    """What a ``locals`` object lists: its length, then texts with NUL between them, the last of which is the dataset's number."""
    [length] = struct.unpack_from("=i", data)
    return data[4:length].decode().split("\0")[:-1]


def _datasets(names: Collection[str], folder: Path) -> dict[str, list[Path]]:
    """The objects of each dataset, by its number."""
    found: dict[str, list[Path]] = defaultdict(list)
    with suppress(FileNotFoundError):  # no shared memory on this machine
        for name in sorted(os.listdir(folder)):
            match = _NAME.fullmatch(name)
            if match is not None and match[2] in names:
                found[match[1]].append(folder / name)
    return dict(found)


def _held(path: Path, held: ExitStack) -> bool | None:
    """Hold the object until ``held`` ends, so that who opens it waits that long. False when somebody has it, ``None`` when nobody can tell.

    A write lease is what the kernel grants to the only one who has a file open, mappings included, whatever container others are in.
    """
    try:
        # Without O_NONBLOCK it would wait for another process that holds a lease.
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    held.callback(os.close, descriptor)
    try:
        # Who opens it meanwhile causes a signal here. That would be SIGIO, which ends the process.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return False if error.errno == errno.EAGAIN else None
    return True
