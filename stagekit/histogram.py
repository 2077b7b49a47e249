"""How sizes are spread, in a few lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .units import format_count, format_size

_BARS = 30


@dataclass(frozen=True, slots=True)
class Bucket:
    """``count`` sizes of at least ``least`` bytes and less than ``below``."""

    least: int
    below: int
    count: int


def buckets(sizes: Iterable[int]) -> tuple[Bucket, ...]:
    """``sizes`` by powers of two, from the smallest to the largest; those between that are empty are there."""
    counts = Counter(size.bit_length() for size in sizes)
    if not counts:
        return ()
    return tuple(Bucket(2**bits // 2, 2**bits, counts[bits]) for bits in range(min(counts), max(counts) + 1))


def drawn(found: Iterable[Bucket]) -> list[str]:
    """One line for each bucket, with a bar."""
    found = tuple(found)
    most = max((bucket.count for bucket in found), default=0)
    left = [f"{format_size(bucket.least)} to {format_size(bucket.below)}" for bucket in found]
    right = [format_count(bucket.count) for bucket in found]
    wide, deep = max(map(len, left), default=0), max(map(len, right), default=0)
    # A bucket that holds anything has a bar that can be seen.
    bars = ["█" * max(round(_BARS * bucket.count / most), min(1, bucket.count)) for bucket in found]
    return [f"{range_:>{wide}}  {count:>{deep}}  {bar}".rstrip() for range_, count, bar in zip(left, right, bars, strict=True)]
