"""What a source of samples promises, whatever the raw data is: a plan that can be counted, and fields that are opened late.

A source is listed once, completely, before a byte is sent: only then is it known which sample goes to which shard, whether two
samples share a key, and how large the result is. The payload is read later, in another process perhaps, one sample at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from ..errors import SourceError
from ..location import Location
from ..shards.index import Batch
from ..shards.plan import PlannedSample
from ..store.base import Data

OnBad = Literal["raise", "skip"]

Payload = list[tuple[str, int, Iterable[Data]]]
"""A sample's fields as a shard wants them: name, announced size in bytes, and the pieces that must add up to that size."""

Read = tuple[str, Payload | SourceError] | Batch
"""A sample's key, with its fields or with the error that takes their place; or many small samples at once."""


@dataclass(frozen=True, slots=True)
class Bad:
    """Something that should have become part of a sample and could not: its path and the sentence that says why."""

    path: str
    reason: str


@dataclass(slots=True)
class Listing:
    """What a source holds.

    ``samples`` are in their final order, with unique keys unless the source is at fault. ``skipped`` counts what was left out by
    rule (reason → number of files). ``bad`` is what ``on_bad="skip"`` left out. ``classes`` are the names behind the class indices,
    if the source made any.
    """

    samples: Sequence[PlannedSample]
    skipped: Counter[str] = field(default_factory=Counter)
    bad: list[Bad] = field(default_factory=list)
    classes: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)


@runtime_checkable
class Source(Protocol):
    """Raw data that becomes samples. It holds settings only and can be pickled, so that worker processes read for themselves."""

    @property
    def name(self) -> str:
        """What a person calls it, for messages."""

    @property
    def location(self) -> Location | None:
        """Where it lies, so that a destination inside it (or around it) is refused; ``None`` when it lies nowhere."""

    @property
    def readers(self) -> int:
        """How many samples are worth reading at the same time: 1 from a disk, more where each one costs a round trip."""

    def listing(self) -> Listing:
        """Everything there is, sizes included, without reading payload. The same data gives the same listing.

        Raises ``SourceError`` naming the thing when something cannot be listed, unless the source was told to skip and count.
        """

    def read(self, sample: PlannedSample) -> Payload:
        """The fields of one listed sample, in the order they were listed.

        Raises ``SourceError`` naming the file when a field is gone, cannot be read, or has another size than listed. A small sample
        is complete in memory when this returns, so nothing can go wrong behind it; the pieces of a large one are read while they
        are iterated, and the same error may then come in the middle. Called from several threads when ``readers`` is above 1.
        """


@runtime_checkable
class InOrder(Source, Protocol):
    """A source that reads many samples in a row faster than each by itself."""

    def read_in_order(self, samples: Sequence[PlannedSample]) -> Iterator[Read]:
        """What ``read`` gives for each of ``samples``, in order. An error of one sample comes in its place; what is wrong with the
        source as a whole is raised."""
