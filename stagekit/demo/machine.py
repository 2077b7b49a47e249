"""A rented server, as far as a training can tell: a directory, a home and an environment of its own, and nothing else to remember by."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..testing.daemon import Daemon

_PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "SSL_CERT_FILE", "OMP_NUM_THREADS")


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
        self.environ |= {"HOME": str(self.home), "TMPDIR": str(self.work), "PYTHONUNBUFFERED": "1", **credentials}
        self._console = self.directory / "console.log"
        self._read = 0
        self._process: Daemon | None = None

    def start(self, script: Path, *arguments: str) -> None:
        """Copy ``script`` to this machine and start it there, with its output in ``console.log``."""
        here = Path(shutil.copy(script, self.home))
        self._process = Daemon([sys.executable, str(here), *arguments], self._console, env=self.environ, cwd=self.work)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

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
        argv = [sys.executable, "-m", "stagekit", *command]
        done = subprocess.run(argv, env=self.environ, cwd=self.work, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

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
