"""The exit codes of every command, in one table; docs/command-line.md prints it."""

from __future__ import annotations

import enum

from ..errors import StagekitError, UsageError


class Exit(enum.IntEnum):
    """What a command's exit code means. ``stagekit run`` returns the wrapped command's own code when that is not 0."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    VERDICT_NO = 3
    CANNOT_TELL = 4
    STALLED = 5
    OVERTIME = 6
    INTERRUPTED = 130
    TERMINATED = 143


MEANINGS: dict[Exit, str] = {
    Exit.DONE: "done; for teardown: YES, for fit: it fits",
    Exit.FAILED: "failed; verify found something, or doctor something that will fail",
    Exit.USAGE: "an argument or option that cannot be meant",
    Exit.VERDICT_NO: "teardown: NO; fit: it does not fit",
    Exit.CANNOT_TELL: "teardown: CANNOT TELL; fit: no GPU to compare with",
    Exit.STALLED: "run: ended by --stall",
    Exit.OVERTIME: "run: ended by --max-hours",
    Exit.INTERRUPTED: "ended by Ctrl-C",
    Exit.TERMINATED: "ended by SIGTERM",
}


class Terminated(BaseException):
    """SIGTERM, raised in the main thread so that every with-block is left properly."""


def exit_of(error: StagekitError | OSError) -> Exit:
    """The exit code for an error that a command ended with."""
    return Exit.USAGE if isinstance(error, UsageError) else Exit.FAILED
