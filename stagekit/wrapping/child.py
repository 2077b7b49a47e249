"""The command as ``stagekit run`` sees it: started, told signals, ended, and its exit code. The process between is ``guardian.py``."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import UsageError, WorkerDied
from . import guardian


class Child:
    """One command, running. ``logs``: files for its standard output and standard error; ``None`` lets both through as they are.

    Raises ``UsageError`` when the command cannot be started. ``grace_s`` is what it has between SIGTERM and SIGKILL when this process ends
    without a word. ``stdout`` is where its standard output goes on to. The files ``keep`` stay open as long as the command lives.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        grace_s: float,
        logs: tuple[Path, Path] | None,
        stdout: int = 1,
        keep: tuple[int, ...] = (),
    ) -> None:
        control, self._control = os.pipe()
        self._status, status = os.pipe()
        options = {"grace_s": grace_s, "logs": [str(path) for path in logs] if logs else None, "stdout": stdout, "command": list(command)}
        try:
            # Source and options by open files: `pkill -9 -f stagekit` kills all whose command line has that word, and must not kill this.
            with open(guardian.__file__, "rb") as source, tempfile.TemporaryFile() as told:  # noqa: PTH123
                told.write(json.dumps(options).encode())
                told.seek(0)
                files = (control, status, told.fileno())
                argv = [sys.executable, "-I", "-S", f"/dev/fd/{source.fileno()}", *map(str, files), "guardian"]
                passed = (*files, source.fileno(), stdout, *keep)
                self._guardian = subprocess.Popen(argv, env=dict(environ), pass_fds=passed, start_new_session=True)
        finally:
            os.close(control)
            os.close(status)
        self._heard = b""
        self._code: int | None = None
        self.pid = 0
        self.cut_ns: int | None = None
        """Once it has ended: when it was cut off, in nanoseconds since 1970; ``None`` for one that ended by itself. What was written
        later, by what it had left behind, is whole."""
        verb, *values = self._hear(None) or [""]
        if verb == "failed":
            self.close()
            raise UsageError(f"starting {command[0]}: {os.strerror(int(values[0]))}; check the name, or give its path")
        if verb != "started":
            self.close()
            raise WorkerDied(f"starting {command[0]}: the process that was to start it has ended")
        self.pid = int(values[0])

    @property
    def guardian_pid(self) -> int:
        """The outer of the two processes between; it lives as long as anything of the command does."""
        return self._guardian.pid

    def send(self, number: int) -> None:
        """Send a signal to the command's process group, once. Safe in a signal handler; nothing when it has ended."""
        self._tell(f"signal {number}")

    def end(self, grace_s: float) -> None:
        """SIGTERM now, and SIGKILL to everything that it started ``grace_s`` later. Called again, the earlier end holds."""
        self._tell(f"end {grace_s}")

    def kill(self, grace_s: float) -> None:
        """SIGKILL to everything that it started, ``grace_s`` from now, unless it has ended by then. The earliest one holds."""
        self._tell(f"kill {grace_s}")

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code once it has ended (negative for a signal), ``None`` after ``timeout_s``.

        Raises ``WorkerDied`` when the inner process between was killed; the outer has ended the command then.
        """
        if self._code is None and (heard := self._hear(timeout_s)) is not None:
            self._code, cut_ns = map(int, heard[1:])
            self.cut_ns = cut_ns or None
            self.close()
        return self._code

    def close(self) -> None:
        """Let go. A command that still runs is ended by its guardian."""
        for number in (self._control, self._status):
            with contextlib.suppress(OSError):
                os.close(number)
        self._control = self._status = -1
        self._guardian.wait()

    def _tell(self, words: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._control, f"{words}\n".encode())

    def _hear(self, timeout_s: float | None) -> list[str] | None:
        while b"\n" not in self._heard:
            if not select.select([self._status], [], [], timeout_s)[0]:
                return None
            data = os.read(self._status, 4096)
            if not data:
                raise WorkerDied("the process between stagekit run and its command was killed, so the command was ended with SIGTERM")
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode().split()


def exit_code_of(code: int) -> int:
    """What a shell would tell: 128 and the signal's number for a command that was killed."""
    return 128 - code if code < 0 else code
