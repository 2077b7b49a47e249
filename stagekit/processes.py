"""Which process somebody is: told apart from another one that got the same number later, on another machine, or in another container."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Runs before the program itself, in the child: a ``preexec_fn`` would do the same, but is unsafe in a process with threads. On Linux the
# kernel delivers the signal and the interpreter is replaced by the program; elsewhere the interpreter stays and watches its parent.
_GUARD = """
import os, signal, subprocess, sys, time
parent, argv = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    os.execvp(argv[0], argv)
child = subprocess.Popen(argv)
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
while child.poll() is None:
    if os.getppid() != parent:
        child.kill()
    time.sleep(0.2)
sys.exit(child.returncode)
"""


def ending_with_us(argv: Sequence[str]) -> list[str]:
    """``argv`` as a command line whose program never outlives this process, even when that is killed.

    Start it from a thread that lives as long as the program should: on Linux the end of the starting *thread* counts.
    """
    return [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *argv]


@dataclass(frozen=True, slots=True)
class Process:
    """One process of one machine. Texts are empty where the system does not tell (it has no ``/proc``)."""

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    started: str

    @classmethod
    def current(cls) -> Process:
        """This process."""
        return cls(socket.gethostname(), _boot_id(), _pid_namespace(), os.getpid(), _start_of(os.getpid()) or "")

    def can_be_asked(self, *, seen_from: Process | None = None) -> bool:
        """Whether it can be told from here if this process still lives: same machine, same boot, same container."""
        here = seen_from or Process.current()
        same = (self.host, self.boot_id, self.pid_namespace) == (here.host, here.boot_id, here.pid_namespace)
        return same and bool(self.boot_id and self.pid_namespace and self.started)

    def is_dead(self, *, seen_from: Process | None = None) -> bool:
        """Whether this process has provably ended. False for one that cannot be asked."""
        return self.can_be_asked(seen_from=seen_from) and _start_of(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def started_with(settings: Collection[str], *, proc: Path = Path("/proc")) -> dict[int, str]:
    """The processes that were started with one of ``settings`` (``NAME=value``) in their environment, by number, and which it is.

    None where there is no ``/proc``. One that has ended, or belongs to another user, cannot be told.
    """
    wanted = {os.fsencode(setting): setting for setting in settings}
    found = {}
    for path in proc.glob("[0-9]*/environ"):
        with suppress(OSError):
            setting = next((wanted[one] for one in path.read_bytes().split(b"\0") if one in wanted), None)
            if setting is not None:
                found[int(path.parent.name)] = setting
    return dict(sorted(found.items()))


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return Path("/proc/self/ns/pid").readlink().name
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """When ``pid`` started, in the kernel's ticks; ``None`` when there is no such process, or one that has ended and was not collected."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # behind the program's name, which may hold spaces and brackets
    return None if fields[0] in ("Z", "X") else fields[19]
