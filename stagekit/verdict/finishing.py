"""Sending what waits here before anything is judged: what dead processes left behind, and what this process has not sent yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ..errors import StagekitError, UploadFailed
from ..progress import Event, Message, Subscriber
from ..runs import Run, ending, spool
from ..runs.spool import Entry
from ..wrapping.finish import NOT_SENT, finish_left
from ..wrapping.note import Note
from .scope import Target

STALL_S = 60.0
BEGINS = "; sending that now"
"""How a message ends that tells of a beginning and not of what failed."""


class Once:
    """A subscriber that hands each sentence on once: what a store refuses is tried by all who have something to send."""

    def __init__(self, on_event: Subscriber) -> None:
        self._on_event = on_event
        self._told: set[str] = set()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Message) and event.level != "info":
            if event.text in self._told:
                return
            self._told.add(event.text)
        self._on_event(event)


def own_runs() -> list[Run]:
    """The runs of this very process that have something to send: it is asked from inside of a training."""
    return [run for run in ending.open_runs() if isinstance(run, Run) and run.status().pending]


def finish_own(run: Run, on_event: Subscriber, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Wait for what this process has handed over to ``run``, which stays open. Never raises for a store that refuses."""
    try:
        _drain(run, clock)
    except StagekitError as error:
        on_event(Message(str(error), "warning"))
    except OSError as error:
        on_event(_stays(error))


def finish_wrapped(note: Note, target: Target, on_event: Subscriber) -> str:
    """Look once more where a ``stagekit run`` that is gone was watching, and send what it left. Never raises for a store that refuses.

    Returns the last of what kept something here, as it was told; nothing where nothing did.
    """
    told: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, Message) and event.level != "info" and not event.text.endswith(BEGINS):
            told.append(event.text)
        on_event(event)

    with suppress(OSError):
        if note.spool is not None and not spool.is_there(note.spool):
            return ""  # a row tells; a new one in its place would hide that
    run = Run(target.where, store=target.store, spool_dir=note.spool, rank=0, world_size=1, drain_s=STALL_S, on_event=hear)
    try:
        finish_left(note, run, on_event=hear)
    except OSError as error:
        hear(_stays(error))
    with suppress(StagekitError, OSError):
        run.close()
    return told[-1].rpartition(NOT_SENT)[2] if told else ""


def finish(target: Target, entries: Sequence[Entry], on_event: Subscriber, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Send the entries of dead processes for one run, for as long as something moves. What stays behind keeps its reason in the spool.

    Never raises for a store that refuses or does not answer: the rows about pending saves tell.
    """
    for directory in sorted({entry.directory.parent.parent for entry in entries if not spool.is_alive(entry)}):
        run = Run(target.where, store=target.store, spool_dir=directory, rank=0, world_size=1, drain_s=0, on_event=on_event)
        try:
            _drain(run, clock)
        except StagekitError as error:
            on_event(Message(str(error), "warning"))
        except OSError as error:
            on_event(_stays(error))
        finally:
            with suppress(UploadFailed, OSError):
                run.close()


def _drain(run: Run, clock: Callable[[], float]) -> None:
    """Drain for as long as something gets through. Raises ``UploadFailed`` when nothing did for ``STALL_S``, or it was refused at once."""
    while True:
        begun_s, before = clock(), _sent(run)
        try:
            run.drain(STALL_S)
            return
        except UploadFailed:
            if _sent(run) == before or clock() - begun_s < STALL_S:
                raise


def _stays(error: OSError) -> Message:
    """What this machine's own disk said: the rows about what is left tell the rest."""
    return Message(f"what waits here is not sent to its end, since {error.filename or 'the disk'} refuses: {error.strerror}", "warning")


def _sent(run: Run) -> tuple[int, int]:
    status = run.status()
    return len(status.pending), status.sent_bytes
