"""How a process ends while saves are pending: it drains first, for a stated time, and never ends with 0 when something stayed behind.

Normal return, an exception, ``sys.exit`` and ctrl-C all come by here. A killed process does not; the next start on that disk finishes its
work. Forked children (``DataLoader`` workers) never do anything here.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Protocol

INTERRUPTED = 130
TERMINATED = 143
_WAY_OUT_S, _WAY_OUT_SHARE = 3.0, 0.4  # of the grace, kept for what comes behind sending: so long, and at most so much of it


class Draining(Protocol):
    """What wants to be drained before the process ends."""

    def finish_at_exit(self) -> str | None:
        """Drain. Returns what stayed behind, in words, or ``None``."""


_runs: weakref.WeakSet[Draining] = weakref.WeakSet()
_pid: int | None = None
_exit_code = 0


def watch(run: Draining) -> None:
    """Drain ``run`` before this process ends, unless it is gone or closed by then."""
    global _pid
    if _pid != os.getpid():
        _pid = os.getpid()
        _runs.clear()
        atexit.register(_at_exit)
        _chain_excepthook()
    _runs.add(run)


def open_runs() -> list[Draining]:
    """Those that this process has begun to write to and not closed."""
    return list(_runs) if _pid == os.getpid() else []


def forget(run: Draining) -> None:
    """``run`` was closed."""
    _runs.discard(run)


def note_exit_code(code: int) -> None:
    """The code this process means to end with, kept also when something stays behind."""
    global _exit_code
    _exit_code = code


def _chain_excepthook() -> None:
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        global _exit_code
        _exit_code = INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
        previous(kind, error, traceback)

    sys.excepthook = hook


def _at_exit() -> None:
    if os.getpid() != _pid:
        return
    left: list[str] = []
    interrupted = False
    for run in list(_runs):
        try:
            if (words := run.finish_at_exit()) is not None:
                left.append(words)
        except KeyboardInterrupt:
            interrupted = True
            left.append("interrupted while checkpoints were being sent")
    if left:
        end(INTERRUPTED if interrupted else _exit_code or 1, left)  # SIGTERM meanwhile has changed the code


def end(code: int, left: list[str]) -> None:
    """End this process with ``code``, after the other exit handlers, saying what stayed behind. A handler can change the code only so."""
    for words in left:
        sys.stderr.write(f"stagekit: {words}\n")
    atexit.unregister(_at_exit)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # a closed pipe; there is nobody left to tell
    os._exit(code)


class Termination:
    """SIGTERM as a request: the handler sets a flag, the training stops at its next step boundary, and the process ends with 143 in time.

    When no step boundary comes within ``grace_s``, a watchdog ends the process; what was pinned by then is sent by the next start. The
    handler that was there before is called, too, and is back after ``close``. Only the main thread can set one up; elsewhere, or when the
    signal is ignored, nothing is changed.
    """

    def __init__(self, grace_s: float, hurry: Callable[[], None], *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._grace_s = grace_s
        self._way_out_s = min(_WAY_OUT_S, _WAY_OUT_SHARE * grace_s)
        self._hurry = hurry
        self._monotonic = monotonic
        self._deadline: float | None = None
        self._pid = os.getpid()
        self._over = threading.Event()
        self._previous: Callable[[int, FrameType | None], object] | int | None = None
        self._installed = False
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, None):
            self._previous = signal.signal(signal.SIGTERM, self._handle)
            self._installed = True

    @property
    def requested(self) -> bool:
        """Whether this process was asked to end."""
        return self._deadline is not None

    @property
    def left_s(self) -> float:
        """Seconds that sending may take: no end before it was asked to end, then what is left of the grace without the way out."""
        return math.inf if self._deadline is None else max(0.0, self._deadline - self._way_out_s - self._monotonic())

    def close(self) -> None:
        """Put the previous handler back and call the watchdog off."""
        self._over.set()
        if self._installed and os.getpid() == self._pid and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)
        self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A worker that was forked with this handler in place: end it as it would have ended without.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if self._deadline is None:
            self._deadline = self._monotonic() + self._grace_s
            self._hurry()
            with suppress(RuntimeError):  # while the interpreter ends there are no new threads (Python 3.12 and later)
                threading.Thread(target=self._watch, name="stagekit-sigterm", daemon=True).start()
        if callable(self._previous):
            self._previous(number, frame)

    def _watch(self) -> None:
        if not self._over.wait(self._grace_s):
            sys.stderr.write(
                f"stagekit: SIGTERM, and the training had not ended in {self._grace_s:.0f} s; what is pending is sent by the next start\n"
            )
            os._exit(TERMINATED)
