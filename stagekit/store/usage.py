"""What was asked of object storage by this process: requests, and bytes in both directions, counted where they are sent.

Counts are kept by place: a store counts for its location, and whoever wants to know asks for all that lies at or below one. What s5cmd and
rclone moved for us is counted by what is known of it, one request and the object's size: it was at least that. s3fs is not counted.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..location import Location
from ..units import counted, format_size


@dataclass(frozen=True, slots=True)
class Usage:
    """Requests that were sent, bytes of their bodies, and bytes of the answers' bodies. Headers are not counted."""

    requests: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.requests + other.requests, self.sent_bytes + other.sent_bytes, self.received_bytes + other.received_bytes)

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.requests - other.requests, self.sent_bytes - other.sent_bytes, self.received_bytes - other.received_bytes)

    def __bool__(self) -> bool:
        return self.requests > 0

    def __str__(self) -> str:
        return f"{counted(self.requests, 'request')}, {format_size(self.sent_bytes)} sent, {format_size(self.received_bytes)} received"

    def cost(self, price_per_gb: float) -> float:
        """What the bytes that left the store cost at ``price_per_gb``, in its currency, a GB being 10⁹ bytes. Requests are not priced."""
        return self.received_bytes / 1e9 * price_per_gb


def price_text(usage: Usage, price_per_gb: float | None) -> str:
    """``, costs 1.80`` behind a count; empty without a price."""
    return "" if price_per_gb is None else f", costs {usage.cost(price_per_gb):,.2f}"


class Meter:
    """Counts for one place. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._usage = Usage()

    def add(self, more: Usage) -> None:
        with self._lock:
            self._usage += more

    @property
    def usage(self) -> Usage:
        """The counts so far."""
        with self._lock:
            return self._usage


_meters: dict[Location, Meter] = {}
_followers: list[weakref.WeakMethod[Callable[[], None]]] = []
_lock = threading.Lock()
_here = threading.local()


def _forget() -> None:
    """In a forked child: what the parent has counted is the parent's, and a thread of it may have held the lock."""
    global _meters, _lock
    _meters = {}
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)


def follow(told: Callable[[], None]) -> None:
    """Call the method ``told`` after each count of this process, as long as its object lives, and of those that it forks."""
    _followers[:] = [*(one for one in _followers if one() is not None), weakref.WeakMethod(told)]


def follow_no_more() -> None:
    """Forget all that follow: in a forked child they are the parent's."""
    _followers.clear()


def meter_of(location: Location) -> Meter:
    """The meter of this process for ``location``."""
    with _lock:
        return _meters.setdefault(location, Meter())


def usages() -> dict[Location, Usage]:
    """What this process has asked of each place, as far as it has asked anything."""
    with _lock:
        meters = dict(_meters)
    return {place: usage for place, meter in meters.items() if (usage := meter.usage)}


def usage_below(location: str | Location) -> Usage:
    """What this process has asked of ``location`` and of places below it."""
    place = Location.parse(location)
    return sum((usage for one, usage in usages().items() if _is_below(one, place)), Usage())


def _is_below(one: Location, place: Location) -> bool:
    if (one.scheme, one.profile, one.bucket) != (place.scheme, place.profile, place.bucket):
        return False
    return not place.path or one.path == place.path or one.path.startswith(place.path + "/")


@contextmanager
def counting(meter: Meter) -> Iterator[None]:
    """What this thread sends inside is counted by ``meter``."""
    before: Meter | None = getattr(_here, "meter", None)
    _here.meter = meter
    try:
        yield
    finally:
        _here.meter = before


def count(more: Usage) -> None:
    """Add to the meter that this thread counts with, if any."""
    meter: Meter | None = getattr(_here, "meter", None)
    if meter is not None:
        count_at(meter, more)


def count_at(meter: Meter, more: Usage) -> None:
    """Add to ``meter``, and tell those that follow."""
    meter.add(more)
    for follower in _followers:
        if (told := follower()) is not None:
            told()
