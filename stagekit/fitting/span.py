"""A number that is known to lie between two."""

from __future__ import annotations

from dataclasses import dataclass

from ..units import format_size


@dataclass(frozen=True, slots=True)
class Span:
    """At least ``low`` and at most ``high``, in bytes or seconds."""

    low: float
    high: float

    def __add__(self, other: Span) -> Span:
        return Span(self.low + other.low, self.high + other.high)

    def __mul__(self, factor: float) -> Span:
        return Span(self.low * factor, self.high * factor)

    @property
    def size(self) -> str:
        """``14.0 GB``, or ``14.0 to 18.2 GB`` where the two differ for people."""
        low, high = format_size(self.low), format_size(self.high)
        if low == high:
            return low
        number, unit = low.split()
        return f"{number} to {high}" if high.endswith(f" {unit}") else f"{low} to {high}"

    @property
    def record(self) -> dict[str, int]:
        """Whole bytes."""
        return {"low_bytes": round(self.low), "high_bytes": round(self.high)}


@dataclass(frozen=True, slots=True)
class Item:
    """One line of a sum: ``arithmetic`` is how ``bytes`` came about and ``source`` where the formula is from.

    ``divided`` when several GPUs that share one model hold a part of it each.
    """

    name: str
    bytes: Span
    arithmetic: str
    source: str
    divided: bool = False

    @property
    def record(self) -> dict[str, object]:
        """The same as plain values."""
        return {"name": self.name, **self.bytes.record, "arithmetic": self.arithmetic, "source": self.source, "divided": self.divided}


def total(items: tuple[Item, ...]) -> Span:
    """The sum of ``items``."""
    return sum((one.bytes for one in items), Span(0, 0))
