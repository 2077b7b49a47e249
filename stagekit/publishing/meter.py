"""How far a publication has come: the sum over its shards, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ..progress import Event, Message, Progress, Subscriber
from ..units import format_count, format_duration, format_rate, format_size

if TYPE_CHECKING:
    from ..shards.plan import PlannedShard

_MEASURED_S = 5.0
_LONG_S = 60.0  # whoever waits less need not be told


class Meter:
    """Adds up what shards report and tells it to ``on_event``.

    After the first seconds it says, once and without being asked, how long everything will take at the speed measured until then, when
    that is more than a minute.
    """

    def __init__(self, on_event: Subscriber, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._on_event = on_event
        self._clock = clock
        self._estimated = False
        self.begin(())

    def begin(self, shards: Iterable[PlannedShard]) -> None:
        """Start at nothing; ``shards`` are what there is to do."""
        self._by_name: dict[str, int] = {}
        self._bytes: dict[int, int] = {}
        for shard in shards:
            self._by_name[shard.name] = shard.number
            self._bytes[shard.number] = shard.bytes
        self._done: dict[int, int] = dict.fromkeys(self._bytes, 0)
        self._files: dict[int, int] = dict.fromkeys(self._bytes, 0)
        self._finished: set[int] = set()
        self._retries = 0
        self._first: tuple[float, int] | None = None

    def takes(self, event: Event) -> bool:
        """Whether ``event`` is a part of the sum, which then is told instead of it."""
        if isinstance(event, Message) and event.repeating:
            self._retries += 1
            return False
        if not isinstance(event, Progress) or event.task not in self._by_name:
            return False
        number = self._by_name[event.task]
        if event.unit == "files":
            self._files[number] = event.done
        else:
            self._done[number] = event.done
            self._report()
        return True

    def shard_done(self, number: int, files: int) -> None:
        """The shard ``number`` is complete, with ``files`` fields in it."""
        self._done[number], self._files[number] = self._bytes[number], files
        self._finished.add(number)
        self._report()

    def _report(self) -> None:
        done, total = sum(self._done.values()), sum(self._bytes.values())
        parts = [
            f"{format_count(sum(self._files.values()))} files",
            f"{format_count(len(self._finished))} of {format_count(len(self._bytes))} shards",
        ]
        if self._retries:
            parts.append(f"{format_count(self._retries)} retries")
        finished = len(self._finished) == len(self._bytes)
        self._on_event(Progress("shard", done, total, "bytes", ", ".join(parts), finished))
        self._estimate(done, total)

    def _estimate(self, done: int, total: int) -> None:
        if self._estimated or not done:
            return
        now_s = self._clock()
        if self._first is None:  # what came before the first byte, such as loading a package, is not paid for every byte
            self._first = now_s, done
        passed_s, passed = now_s - self._first[0], done - self._first[1]
        if passed_s < _MEASURED_S or not passed:
            return
        self._estimated = True
        rate = passed / passed_s
        if total / rate > _LONG_S:
            self._on_event(
                Message(
                    f"{format_size(total)} take {format_duration(total / rate)} at the {format_rate(rate)} of the first "
                    f"{format_duration(passed_s)}; interrupt it at any time, the same command goes on"
                )
            )
