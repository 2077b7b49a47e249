"""Limits on requests and bytes a second, kept by all threads and processes of this machine together.

::

    HOME/limits/<endpoint and boot>     two moments on the machine's monotonic clock, at which requests and bytes are free again

A request takes its turn by moving those moments on, under a POSIX record lock that is held for microseconds, and then sleeps without it.
The kernel drops the lock with a killed process, so such a one delays others by its own turn at most. Where the file cannot be used, or a
stopped process sits on the lock, this process keeps to the limits alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..processes import Process
from .abandon import sleep as sleep_until_abandoned

_RECORD = struct.Struct("<dd")
_LONGEST_S = 86400.0
"""A moment further away than this was written by another clock and means nothing."""
_LOCK_TRIES = 100
_LOCK_PAUSE_S = 0.01


class Limits:
    """``requests_per_s`` and ``bytes_per_s``, where given, through the file ``path``, over everybody who uses the same one.

    It is the average that is kept: unused time is not saved up, so a pause is followed by no burst. ``holders`` is how many processes
    there are, where somebody knows: when the file cannot be used, each of them keeps to its part.
    """

    def __init__(
        self,
        path: Path,
        *,
        requests_per_s: float | None = None,
        bytes_per_s: float | None = None,
        holders: int = 1,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = sleep_until_abandoned,
    ) -> None:
        self._turns = _turns_at(path)
        self._request_s = 1 / requests_per_s if requests_per_s else 0.0
        self._byte_s = 1 / bytes_per_s if bytes_per_s else 0.0
        self._holders = holders
        self._clock = clock
        self._sleep = sleep

    def wait(self, size: int = 0) -> None:
        """Return when one more request may go that carries ``size`` bytes in either direction."""
        now_s = self._clock()
        begin_s, _ = self._turns.take(now_s, self._request_s, size * self._byte_s, self._holders)
        self._pause(begin_s - now_s)

    def pay(self, size: int) -> None:
        """Return when ``size`` bytes that went may have gone."""
        now_s = self._clock()
        _, end_s = self._turns.take(now_s, 0.0, size * self._byte_s, self._holders)
        self._pause(end_s - now_s)

    def _pause(self, wait_s: float) -> None:
        if wait_s > 0:
            _here.waited_s = waited_s() + wait_s
            self._sleep(wait_s)

    def charge(self, size: int) -> None:
        """``size`` bytes came whose number was not known before. Those who come next wait for them."""
        if size and self._byte_s:
            self._turns.take(self._clock(), 0.0, size * self._byte_s, self._holders)


_here = threading.local()


def waited_s() -> float:
    """How long this thread has waited for its turns in all: time that no server is to blame for."""
    waited: float = getattr(_here, "waited_s", 0.0)
    return waited


def limits_path(endpoint: str, home: Path) -> Path:
    """The file below ``home`` for everybody here who talks to ``endpoint``. A new one after each boot, with a new clock."""
    here = Process.current()
    name = hashlib.sha256(f"{endpoint}\n{here.host}\n{here.boot_id}".encode()).hexdigest()[:32]
    return home / "limits" / name


class _Turns:
    """The two moments, in the file where that can be used, and here where not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._own = (0.0, 0.0)

    def take(self, now_s: float, request_s: float, bytes_s: float, holders: int) -> tuple[float, float]:
        """Take a turn that lasts ``request_s`` and ``bytes_s``, and return when it begins and when its bytes end. Where one of
        ``holders`` is alone with it, because the file cannot be used, it lasts so many times as long."""
        with self._lock:
            shared = self._lock_file()
            if not shared:
                request_s, bytes_s = request_s * holders, bytes_s * holders
            try:
                moments = self._read() if shared else self._own
                requests_s, free_s = (max(moment, now_s) if moment <= now_s + _LONGEST_S else now_s for moment in moments)
                begin_s = max(requests_s if request_s else now_s, free_s if bytes_s else now_s)
                self._own = (requests_s + request_s, free_s + bytes_s)
                if shared:
                    self._write()
            finally:
                if shared:
                    self._unlock_file()
            return begin_s, begin_s + bytes_s

    def _lock_file(self) -> bool:
        try:
            if self._descriptor is None:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            for _ in range(_LOCK_TRIES):
                with suppress(BlockingIOError, PermissionError):  # what systems say when somebody else has it
                    fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
                time.sleep(_LOCK_PAUSE_S)
        except OSError:
            return False
        return False

    def _unlock_file(self) -> None:
        assert self._descriptor is not None
        with suppress(OSError):
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _read(self) -> tuple[float, float]:
        assert self._descriptor is not None
        data = os.pread(self._descriptor, _RECORD.size, 0)
        if len(data) < _RECORD.size:
            return 0.0, 0.0
        first, second = _RECORD.unpack(data)
        return first, second

    def _write(self) -> None:
        assert self._descriptor is not None
        with suppress(OSError):  # a full disk: those who come next see the moment before
            os.pwrite(self._descriptor, _RECORD.pack(*self._own), 0)


_known: dict[Path, _Turns] = {}
_known_lock = threading.Lock()


def _turns_at(path: Path) -> _Turns:
    """One per file and process: record locks are the process's, and closing any descriptor of the file would drop them."""
    with _known_lock:
        return _known.setdefault(path, _Turns(path))


def _forget() -> None:
    """In a forked child: a thread of the parent may have held a lock. Its descriptors stay open, and nobody uses them."""
    global _known, _known_lock
    _known = {}
    _known_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)
