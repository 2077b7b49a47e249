"""What a command started and nobody guards any more: found by the environment that it was started with, and ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from ..processes import started_with

VARIABLE = "STAGEKIT_ATTEMPT"
"""In the environment of a command, and so of all that it starts: the name of its attempt."""

_EVERY_S = 0.05
_KILLING_S = 5.0


def survivors(attempt: str) -> list[int]:
    """The processes on this machine that the command of ``attempt`` started, itself and its guardians included.

    None where there is no ``/proc``. One that belongs to another user, or was given another environment, cannot be told.
    """
    return list(started_with([f"{VARIABLE}={attempt}"]))


def end(attempt: str, grace_s: float, *, sleep: Callable[[float], None] = time.sleep) -> list[int]:
    """SIGTERM to all of them, and SIGKILL ``grace_s`` later. Returns those that are alive even then.

    For a command whose guardians are dead: as long as one lives it does this.
    """
    for number, allowed_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILLING_S)):
        end_s = time.monotonic() + allowed_s
        told: set[int] = set()
        while (alive := survivors(attempt)) and time.monotonic() < end_s:
            for pid in set(alive) - told:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            told.update(alive)
            sleep(_EVERY_S)
    return survivors(attempt)
