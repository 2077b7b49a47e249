"""A store's outage in a few lines, however many requests it breaks.

While a store is away, every file of every checkpoint is tried again every few seconds, and each try is told. For a program that is right.
Between the lines of a training it buries what matters, so what is written for people goes through here.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from .progress import ANSWERED, Event, Message, Stage
from .units import counted, format_duration

EVERY_S = 180.0
_APART_S = 60.0


@dataclass
class _Outage:
    began_s: float
    failed_s: float
    shown_s: float
    back_s: float = -math.inf
    over: bool = False
    unshown: int = 0


class Outages:
    """Tells what to show of events. Usable from any thread.

    Of tries that failed and are repeated, the first is told as it is, then one every ``every_s`` seconds with the number of those between,
    then that the store answers again. A store that fails again within a minute has not come back: that goes on with the same outage.
    """

    def __init__(self, *, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = every_s, clock
        self._lock = threading.Lock()
        self._outages: dict[str, _Outage] = {}

    def told(self, event: Event) -> Event | None:
        """What to show for ``event``: itself, another sentence, or nothing."""
        if isinstance(event, Message) and event.repeating:
            with self._lock:
                return self._failed(event, event.repeating, self._clock())
        if isinstance(event, Stage) and event.name == ANSWERED:
            with self._lock:
                return self._answered(event.subject, self._clock())
        return event

    def rest(self) -> list[Message]:
        """What is still to be told when nothing more comes: how many tries were not shown, of stores that are away yet."""
        with self._lock:
            away = {store: outage for store, outage in self._outages.items() if outage.unshown and not outage.over}
            told = [Message(f"{store} did not answer to the end: {_more(outage)} failed", "warning") for store, outage in away.items()]
            for outage in away.values():
                outage.unshown = 0
            return told

    def _failed(self, message: Message, store: str, now_s: float) -> Message | None:
        outage = self._outages.get(store)
        quiet_s = _APART_S if outage is not None and outage.over else self._every_s
        if outage is None or now_s - outage.failed_s > quiet_s:
            self._outages[store] = _Outage(now_s, now_s, now_s)
            return message
        outage.failed_s, outage.over = now_s, False
        outage.unshown += 1
        if now_s - outage.shown_s < self._every_s:
            return None
        text = f"{store} keeps failing, {_more(outage)} in {format_duration(now_s - outage.shown_s)}; the last: {message.text}"
        outage.shown_s, outage.unshown = now_s, 0
        return Message(text, message.level)

    def _answered(self, store: str, now_s: float) -> Message | None:
        outage = self._outages.get(store)
        if outage is None or outage.over:
            return None
        outage.over = True
        if not outage.unshown or now_s - outage.back_s < _APART_S:
            return None
        text = f"{store} answers again after {format_duration(now_s - outage.began_s)}; {_more(outage)} failed meanwhile"
        outage.shown_s, outage.back_s, outage.unshown = now_s, now_s, 0
        return Message(text)


def _more(outage: _Outage) -> str:
    return counted(outage.unshown, "more try", "more tries")
