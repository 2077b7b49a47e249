"""Room on this machine's disk for the files of one job, gone with it; what a killed process left is removed by the next one."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..locks import held

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
    with held(folder, wait=True):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(where: Path, now_s: float) -> None:
    for folder in where.glob(_PREFIX + "*"):
        with suppress(OSError):  # somebody else's, or gone by now
            info = folder.lstat()
            if info.st_uid != os.getuid() or now_s - info.st_mtime < _YOUNG_S:
                continue
            with held(folder, os.O_NOFOLLOW | os.O_DIRECTORY):
                shutil.rmtree(folder, ignore_errors=True)
