"""A child process that never outlives the process that started it, whichever way that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from ..processes import ending_with_us


class Daemon:
    """A server in the background, with its output in a file.

    It is in a session of its own, so that ctrl-C reaches only the process that started it, which then stops it in order. When that
    process ends without doing so (``kill -9`` included), the kernel kills the daemon. Start it from a thread that lives as long as the
    daemon should: on Linux the end of the starting *thread* counts.
    """

    def __init__(self, argv: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
        self.argv = list(argv)
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                ending_with_us(argv), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, cwd=cwd, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """What it ended with (negative for a signal), ``None`` while it runs."""
        return self._process.poll()

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of what the daemon printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait(self) -> int:
        """Wait until it ends by itself. Returns its exit code (negative for a signal)."""
        return self._process.wait()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ask it to end, then kill it. When this returns the process is gone. Stopping twice is no error."""
        if not self.running:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it at once, as a power cut would, together with what it started."""
        if self.running:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def wait_until(ready: Callable[[], bool], daemon: Daemon, what: str, timeout_s: float, *, pause_s: float = 0.05) -> None:
    """Return once ``ready()`` holds. Raises ``RuntimeError`` with the end of the log when the daemon died or ``timeout_s`` passed."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if not daemon.running or time.monotonic() > deadline:
            state = f"did not answer within {timeout_s:.0f} s" if daemon.running else "ended while it was starting"
            raise RuntimeError(f"{what} {state}. The end of {daemon.log}:\n{daemon.log_tail()}")
        time.sleep(pause_s)
