"""What a ``stagekit run`` that was killed left behind: finished saves that nobody saw, and logs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ..errors import StagekitError
from ..progress import Message, Subscriber
from ..runs.run import Run
from .collect import Collector, sessions_here, waiting_for
from .logs import Logs
from .note import Note

NOT_SENT = " is not sent: "
"""Stands in a message before the reason why something stays here."""
_SHOWN = 3


def finish_left(
    note: Note,
    run: Run,
    *,
    on_event: Subscriber,
    clock: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
) -> bool:
    """Look once more below the directories of ``note``, whose command is gone, hand finished saves over to ``run``, and send the logs.

    True when all of it is in the bucket; then the note is gone, too. Raises nothing for what cannot be sent: it stays where it is.
    """
    logs = Logs(lambda: run._store, note.attempt, on_event, monotonic) if note.logs is not None else None
    printed = [note.logs / "stdout.log", note.logs / "stderr.log"] if note.logs is not None else []
    collector = Collector(
        run,
        note.watched,
        patterns=note.patterns,
        quiet_s=note.quiet_s,
        world_size=note.world_size,
        logs=logs,
        printed=printed,
        on_event=on_event,
        monotonic=monotonic,
        clock=clock,
    )
    try:
        run.drain(run._drain_s)  # what was seen before the kill
        here, _ = collector.before(run.checkpoints(), waiting_for(run), sessions_here(run))
        if here:
            how = "ended before" if note.ended else "was killed before it saw"
            more = f" and {len(here) - _SHOWN} more" if len(here) > _SHOWN else ""
            names = ", ".join(found.name for found in here[:_SHOWN]) + more
            what = f"all was sent, such as {names}" if note.ended else names
            on_event(Message(f"the last stagekit run here {how} {what}; sending that now", "warning"))
        pinned = -1
        while pinned < collector.submitted:  # what is sent makes room for what could not be pinned
            pinned = collector.submitted
            collector.scan(still=True, cut_ns=math.inf if note.killed else None)
            run.drain(run._drain_s)
    except StagekitError as error:
        left = f"what {note.command!r} left below {', '.join(map(str, note.watched.values()))}"
        on_event(Message(f"{left}{NOT_SENT}{error}", "warning"))
        return False
    if collector.unsaved or collector.blind:
        return False
    if logs is not None and (not logs.bring(last=True) or logs.refused):
        return False
    note.remove()
    return True
