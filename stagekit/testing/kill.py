"""Kill points: the process ends at a named place, as it would by ``kill -9`` or a power cut there. Nothing is flushed or cleaned up.

Use them in a process of the test's own, and look at what is left from outside.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from fnmatch import fnmatchcase

from ..progress import Event, Stage
from ..store.base import Store
from .faults import FaultStore, Operation

# What a shell reports for a process that was killed by signal 9.
KILLED = 137


class KillAt:
    """A subscriber (``on_event=``) that ends the process when the stage ``stage`` is passed, after the first ``skip`` times.

    ``stage`` and ``subject`` are patterns such as ``"shard*"``. Every event is handed to ``then`` first, if given.
    """

    def __init__(
        self,
        stage: str,
        subject: str = "*",
        *,
        skip: int = 0,
        then: Callable[[Event], None] | None = None,
        exit: Callable[[int], object] = os._exit,
    ) -> None:
        self._stage = stage
        self._subject = subject
        self._skip = skip
        self._then = then
        self._exit = exit

    def __call__(self, event: Event) -> None:
        if self._then is not None:
            self._then(event)
        if isinstance(event, Stage) and fnmatchcase(event.name, self._stage) and fnmatchcase(event.subject, self._subject):
            if self._skip:
                self._skip -= 1
                return
            self._exit(KILLED)


class KillingStore(FaultStore):
    """``inner``, ending the process just before (or ``after``) a call of ``operation`` on a key that matches the pattern ``key``.

    The first ``skip`` such calls pass.
    """

    def __init__(
        self,
        inner: Store,
        operation: Operation,
        key: str = "*",
        *,
        skip: int = 0,
        after: bool = False,
        exit: Callable[[int], object] = os._exit,
    ) -> None:
        super().__init__(inner)
        self._exit = exit
        self.act(operation, self._kill, key, skip=skip, after=after)

    def _kill(self, _call: object) -> None:
        self._exit(KILLED)
