"""Sending what a dead process left behind, before anything is judged."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import StagekitError, UploadFailed
from ..progress import Event, Message, Progress, Stage, Subscriber
from ..runs import Run, spool
from ..runs.spool import Entry
from .scope import Target

STALL_S = 60.0


def finish(target: Target, entries: Sequence[Entry], on_event: Subscriber, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Send the entries of dead processes for one run, for as long as something moves. What stays behind keeps its reason in the spool.

    Never raises for a store that refuses or does not answer: the rows about pending saves tell.
    """
    for directory in sorted({entry.directory.parent.parent for entry in entries if not spool.is_alive(entry)}):
        try:
            _finish_spool(target, directory, on_event, clock)
        except StagekitError as error:
            on_event(Message(str(error), "warning"))


def _finish_spool(target: Target, directory: Path, on_event: Subscriber, clock: Callable[[], float]) -> None:
    moves = _Moves(on_event)
    run = Run(target.where, store=target.store, spool_dir=directory, rank=0, world_size=1, drain_s=0, on_event=moves.hear)
    try:
        while True:
            begun_s, moves.moved = clock(), False
            try:
                run.drain(STALL_S)
                return
            except UploadFailed:
                # Refused at once, or nothing came out for a whole minute: waiting longer would not help.
                if not moves.moved or clock() - begun_s < STALL_S:
                    raise
    finally:
        with suppress(UploadFailed):
            run.close()


class _Moves:
    """Whether bytes or saves got through since somebody looked."""

    def __init__(self, on_event: Subscriber) -> None:
        self._on_event = on_event
        self._seen: dict[str, int] = {}
        self.moved = False

    def hear(self, event: Event) -> None:
        """Pass an event on, and note progress."""
        if isinstance(event, Stage):
            self.moved = True
        elif isinstance(event, Progress):
            self.moved = self.moved or event.done > self._seen.get(event.task, 0)
            self._seen[event.task] = event.done
        self._on_event(event)
