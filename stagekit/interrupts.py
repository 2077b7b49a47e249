"""Ctrl-C while this process forks.

Python runs callbacks around a fork (its own ``logging`` has some), and an exception in one of them is printed and forgotten. A fork takes
long where much memory is in use, and an interrupt that arrives meanwhile is raised in the first callback after it: it is lost, and a
training whose ``DataLoader`` workers wait for a store that hangs waits with them.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from typing import Any

_AFTERWARDS_S = 0.02


@functools.cache
def keep_over_forks() -> None:
    """From now on an interrupt that arrives while the main thread forks is raised right after that. Once for a process; what handles
    SIGINT stays what it is. What was registered with ``os.register_at_fork`` before this is covered."""
    watch = _Watch()
    os.register_at_fork(before=watch.begin, after_in_parent=watch.end_in_parent, after_in_child=watch.end)


class _Watch:
    def __init__(self) -> None:
        self._handler: Any = None
        self._came = False

    def begin(self) -> None:
        # Another thread's fork holds nobody up who could be interrupted. A handler that Python did not install cannot be put back.
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._came = False
            self._handler = signal.signal(signal.SIGINT, self._note)

    def _note(self, _number: int, _frame: object) -> None:
        self._came = True

    def end(self) -> None:
        """In the child this is all: what came before it was born is its parent's."""
        if self._handler is not None:
            handler, self._handler = self._handler, None
            signal.signal(signal.SIGINT, handler)

    def end_in_parent(self) -> None:
        self.end()
        if self._came:
            self._came = False
            threading.Thread(target=_interrupt, args=(threading.get_ident(),), name="stagekit-interrupt", daemon=True).start()


def _interrupt(thread: int) -> None:
    """Once more, outside of the callbacks."""
    time.sleep(_AFTERWARDS_S)
    signal.pthread_kill(thread, signal.SIGINT)
