"""A rented server, as far as a training can tell: a directory, a home and an environment of its own, and nothing else to remember by."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from ..testing.daemon import Daemon

_PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "SSL_CERT_FILE")


class Machine:
    """One machine below ``directory``, which must not exist. Its processes see ``credentials`` and no other setting of the user.

    A process that is still running is killed when the ``with`` block ends, and when the process that made it ends in any way.
    """

    def __init__(self, directory: Path, credentials: Mapping[str, str]) -> None:
        self.directory = directory.absolute()
        self.home = self.directory / "home"
        self.work = self.directory / "work"
        self.home.mkdir(parents=True)
        self.work.mkdir()
        # An SSO login or an assumed role is found in the home's .aws; it is part of "credentials".
        aws = Path("~/.aws").expanduser()
        if aws.is_dir():
            (self.home / ".aws").symlink_to(aws.absolute())
        self.environ = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        # One thread: for pictures of 64 pixels, more of them only wait for each other, and on a busy machine for long.
        self.environ |= {"HOME": str(self.home), "TMPDIR": str(self.work), "OMP_NUM_THREADS": "1", **credentials}
        # Where the demo is shown there may be a checkout, which is no part of this machine.
        self.environ["GIT_CEILING_DIRECTORIES"] = str(self.directory.parent)
        self._console = self.directory / "console.log"
        self._read = 0
        self._calls = 0
        self._process: Daemon | None = None

    def start(self, script: Path, *arguments: str) -> None:
        """Copy ``script`` to this machine and start it there, with its output in ``console.log``."""
        copied = str(shutil.copy(script, self.home))
        self._process = self._daemon([copied, *arguments], self._console)

    @property
    def exit_code(self) -> int | None:
        """What the script ended with, ``None`` while it runs."""
        return None if self._process is None else self._process.exit_code

    def new_lines(self) -> list[str]:
        """Whole lines that the script printed since the last call."""
        if not self._console.exists():
            return []
        with self._console.open("rb") as console:
            console.seek(self._read)
            whole = console.read().rpartition(b"\n")[0]
        if not whole:
            return []
        self._read += len(whole) + 1
        return whole.decode(errors="replace").split("\n")

    def call(self, *command: str) -> tuple[int, str]:
        """Run one ``stagekit`` command to its end on this machine. Returns its exit code and what it printed."""
        log = self.directory / f"command-{self._calls}.log"
        self._calls += 1
        with self._daemon(["-m", "stagekit", *command], log) as process:
            code = process.wait()
        return code, log.read_text(errors="replace").rstrip("\n")

    def _daemon(self, arguments: list[str], log: Path) -> Daemon:
        return Daemon([sys.executable, *arguments], log, env=self.environ, cwd=self.work)

    def freeze(self) -> None:
        """Let nothing on this machine happen for a while."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Go on after ``freeze()``."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.running:
            os.kill(self._process.pid, number)

    def throw_away(self) -> None:
        """What a provider does: the power goes, and the disk with it."""
        self.stop()
        shutil.rmtree(self.directory)

    def stop(self) -> None:
        """Kill what runs here. Stopping twice is no error."""
        if self._process is not None:
            self._process.kill()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
