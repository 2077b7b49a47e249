"""The rate that all workers of a command keep together, whichever of them has something to send."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import home_directory
from ..location import Location
from ..store.limits import Limits, limits_path

_STEP_S = 0.05  # a wait that is much shorter takes much longer than was asked for


@dataclass(frozen=True, slots=True)
class Rate:
    """``bytes_per_s`` for ``workers`` processes of this machine together. Nobody has a part of his own: who sends alone has all of it."""

    bytes_per_s: float
    workers: int = 1

    def toll(self, destination: Location) -> Toll:
        """What a job pays that sends to ``destination``."""
        path = limits_path(f"shards to {destination}", home_directory())
        return Toll(Limits(path, bytes_per_s=self.bytes_per_s, holders=self.workers), self.bytes_per_s * _STEP_S)


class Toll:
    """Bytes are paid for when they went: whoever sends goes on when as much time has passed for him as they take at the rate. Not for use
    by several threads at once."""

    def __init__(self, limits: Limits, step: float) -> None:
        self._limits = limits
        self._step = step
        self._owed = 0

    def went(self, size: int) -> None:
        """``size`` bytes are on their way. They are paid for here, or together with those that follow."""
        self._owed += size
        if self._owed >= self._step:
            self.settle()

    def settle(self) -> None:
        """Pay for what is left, before others are told that it went."""
        self._limits.pay(self._owed)
        self._owed = 0
