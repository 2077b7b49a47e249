"""Room on this machine's disk for the files of one job, gone with it; what a killed process left is removed by the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "stagekit-mds-"
_YOUNG_S = 60.0  # a folder of this age may be about to be locked by whoever has just made it


@contextmanager
def scratch_folder(*, parent: Path | None = None, clock: Callable[[], float] = time.time) -> Iterator[Path]:
    """A new, empty folder below ``parent`` (the system's place for temporary files unless given), removed at the end of the block.

    It is locked meanwhile, and the lock ends with the process: folders without one were left by a process that was killed.
    """
    where = parent or Path(tempfile.gettempdir())
    _remove_abandoned(where, clock())
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_abandoned(where: Path, now_s: float) -> None:
    for folder in where.glob(_PREFIX + "*"):
        with suppress(OSError):  # somebody else's, or gone by now
            info = folder.lstat()
            if info.st_uid != os.getuid() or now_s - info.st_mtime < _YOUNG_S:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
