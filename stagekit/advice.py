"""Stream the data, or copy it here first? Arithmetic on what was measured, and a sentence with its numbers. Nothing is measured here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .errors import UsageError
from .units import format_duration, format_rate, format_size

Choice = Literal["stream", "pull", "cache"]

_SPARE = 1.05
"""Of the data set's size: a disk that is full to the last byte serves nobody."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, and what it costs in seconds: an epoch that is streamed, one whose data is on this machine, one with a cache as large as
    the disk allows (``None`` where that was not asked), and the copying. ``pays_from`` is the number of epochs from which a copy is faster
    than streaming, ``None`` when it never is."""

    choice: Choice
    stream_s: float
    local_s: float
    copy_s: float
    cached_s: float | None
    pays_from: int | None
    text: str


def stream_or_copy(
    *, size_bytes: int, link_bytes_per_s: float, local_s: float = 0.0, epochs: int | None = None, free_bytes: int | None = None
) -> Advice:
    """The advice for a data set of ``size_bytes`` behind a link of ``link_bytes_per_s``.

    ``local_s`` is what an epoch takes when its data is here: steps × step time, or decoding if that is slower; 0 when nobody knows.
    ``epochs`` are those still to come and ``free_bytes`` is the space on the local disk; without them the sentence says from how many
    epochs a copy pays, and what space it takes. Raises ``UsageError`` for a size or rate that is not above 0.
    """
    for name, value in (("size_bytes", size_bytes), ("link_bytes_per_s", link_bytes_per_s)):
        if not value > 0:
            raise UsageError(f"{name}: {value} is not above 0")
    copy_s = size_bytes / link_bytes_per_s
    stream_s = max(copy_s, local_s)
    saved_s = stream_s - local_s
    cached_s = None if free_bytes is None else max(local_s, max(0, size_bytes - free_bytes / _SPARE) / link_bytes_per_s)
    size, rate = format_size(size_bytes), format_rate(link_bytes_per_s)

    def advice(choice: Choice, text: str, pays_from: int | None) -> Advice:
        return Advice(choice, stream_s, local_s, copy_s, cached_s, pays_from, text)

    if saved_s <= 0:
        return advice(
            "stream",
            f"stream: {size} at {rate} come in {format_duration(copy_s)}, and an epoch takes {format_duration(local_s)} anyway",
            None,
        )
    pays_from = math.floor(copy_s / saved_s) + 1
    streamed = f"streaming, an epoch takes {format_duration(stream_s)} ({size} at {rate})"
    here = f"; with the data here it would take {format_duration(local_s)}" if local_s else ""
    if epochs is not None and epochs < pays_from:
        return advice("stream", f"stream: a copy pays from {pays_from} epochs on, and {epochs} are to come; {streamed}", pays_from)
    if free_bytes is not None and free_bytes < size_bytes * _SPARE:
        text = (
            f"{streamed}{here}, and {format_size(free_bytes)} of disk are free: cache_dir= and cache_limit= keep what fits, so that later "
            f"epochs take {format_duration(cached_s or 0)}; a larger disk would take all of it (`stagekit pull`)"
        )
        return advice("cache", text, pays_from)
    when = f"From {pays_from} epochs on, copy" if epochs is None else f"{_total(epochs, stream_s, copy_s + epochs * local_s)}. Copy"
    text = f"{streamed}{here}. {when} it first (`stagekit pull`, {size} of disk), or let cache_dir= and cache_limit= keep what was read"
    return advice("pull", text, pays_from)


def _total(epochs: int, stream_s: float, with_copy_s: float) -> str:
    return f"{epochs} epochs take {format_duration(epochs * stream_s)} streamed and {format_duration(with_copy_s)} with a copy"
