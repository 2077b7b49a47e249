"""Samples of tables as places and numbers: what a plan keeps of a hundred million rows, and what a worker gets of a shard."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple, Protocol, overload

import numpy as np

from ..shards.index import FieldTotals
from ..shards.plan import PlannedField, PlannedSample, SampleRange

_DIGITS = 9  # of a row's number in its key, so that more rows do not change the keys of those before


class Place(NamedTuple):
    """Where reading of a table may begin: position and line as its format knows them, and how many rows and samples lie before."""

    position: int
    line: int
    row: int
    sample: int


START = Place(0, 1, 0, 0)


@dataclass(frozen=True)
class Part:
    """One file of a source as it was when it was listed. ``prefix`` and ``first`` make the keys of rows without one of their own;
    ``dropped`` are the numbers of rows that are no sample."""

    path: str
    size: int
    mark: int | str | None
    prefix: str
    first: int
    dropped: frozenset[int] = frozenset()

    def key(self, row: int) -> str:
        return f"{self.prefix}{self.first + row:0{_DIGITS}d}"


class InFile(NamedTuple):
    """A field that lies in a file of its own."""

    path: str


class Made(NamedTuple):
    """A row as a sample: its key, each field's bytes or file, sorted by name, and where the row was found."""

    key: str
    fields: list[tuple[str, bytes | InFile]]
    place: Place
    number: int
    line: int


@dataclass(frozen=True, slots=True)
class RowSample(PlannedSample):
    """A sample that knows where its row is: it is sample ``number`` of ``part``, found when reading begins at ``place``."""

    part: Part
    place: Place
    number: int


class Maker(Protocol):
    """What makes samples from rows."""

    def made(self, part: Part, place: Place, number: int) -> Iterator[Made]:
        """The samples of ``part`` from ``number`` on, which lies at ``place`` or behind it."""

    def where(self, part: Part, line: int) -> str:
        """What a person calls the row."""


@dataclass(frozen=True)
class Run:
    """``count`` samples in a row of one file, from ``number`` on."""

    part: Part
    place: Place
    number: int
    count: int


@dataclass(frozen=True)
class RowRange(Sequence[PlannedSample]):
    """A shard's samples. ``file_sizes`` has the bytes of every field that lies in a file, in order."""

    maker: Maker
    runs: tuple[Run, ...]
    file_sizes: array[int]

    def __len__(self) -> int:
        return sum(run.count for run in self.runs)

    def __iter__(self) -> Iterator[PlannedSample]:
        sizes = iter(self.file_sizes)
        for run in self.runs:
            for made in islice(self.maker.made(run.part, run.place, run.number), run.count):
                ref = self.maker.where(run.part, made.line)
                fields = tuple(
                    PlannedField(name, next(sizes) if isinstance(value, InFile) else len(value), ref) for name, value in made.fields
                )
                yield RowSample(made.key, fields, run.part, made.place, made.number)

    @overload
    def __getitem__(self, index: int) -> PlannedSample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PlannedSample]: ...
    def __getitem__(self, index: int | slice) -> PlannedSample | Sequence[PlannedSample]:
        """Reads from the range's start on; iterate when more than a few are wanted."""
        if isinstance(index, slice):
            return tuple(self)[index]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(index)
        return next(islice(iter(self), number, None))


@dataclass(frozen=True)
class Listed:
    """A file with the number of its samples and the places from which reading may begin, in order."""

    part: Part
    samples: int
    places: list[Place]


class Rows(SampleRange):
    """All samples of a source of rows."""

    def __init__(
        self,
        maker: Maker,
        files: Sequence[Listed],
        sizes: array[int],
        identity: str,
        fields: Mapping[str, FieldTotals],
        near_duplicates: tuple[tuple[str, ...], ...],
        file_counts: array[int],
        file_sizes: array[int],
    ) -> None:
        self.maker = maker
        self._files = files
        self._starts = [0]
        for listed in files:
            self._starts.append(self._starts[-1] + listed.samples)
        self._sizes = sizes
        self._identity = identity
        self._fields = fields
        self._near_duplicates = near_duplicates
        self._file_counts = file_counts
        self._file_sizes = file_sizes

    @property
    def sizes(self) -> Sequence[int]:
        return self._sizes

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def fields(self) -> Mapping[str, FieldTotals]:
        return self._fields

    @property
    def near_duplicates(self) -> tuple[tuple[str, ...], ...]:
        return self._near_duplicates

    @cached_property
    def _file_ends(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """For each sample, how many files those before it have; one more number for the end."""
        return np.concatenate([[0], np.cumsum(np.frombuffer(self._file_counts, np.uint8), dtype=np.int64)])

    def cut(self, start: int, stop: int) -> RowRange:
        runs = []
        file = bisect_right(self._starts, start) - 1
        while file < len(self._files) and self._starts[file] < stop:
            listed, before = self._files[file], self._starts[file]
            begin, end = max(start, before), min(stop, before + listed.samples)
            if begin < end:
                place = listed.places[bisect_right(listed.places, begin - before, key=lambda place: place.sample) - 1]
                runs.append(Run(listed.part, place, begin - before, end - begin))
            file += 1
        sizes = array("Q")
        if self._file_sizes:
            sizes = self._file_sizes[self._file_ends[start] : self._file_ends[stop]]
        return RowRange(self.maker, tuple(runs), sizes)

    def picked(self, positions: Sequence[int]) -> Picked:
        return Picked(self, array("q", positions))


class Picked(SampleRange):
    """Some samples of a source of rows, in an order of their own."""

    def __init__(self, rows: Rows, positions: array[int]) -> None:
        self._rows = rows
        self._positions = positions

    @cached_property
    def sizes(self) -> Sequence[int]:
        sizes = self._rows.sizes
        return array("Q", (sizes[position] for position in self._positions))

    @cached_property
    def _looked(self) -> tuple[str, dict[str, FieldTotals]]:
        """What is known only of samples that were looked at: a digest of all, and the totals of each field."""
        identity = hashlib.sha256()
        totals: dict[str, list[int]] = {}
        for sample in self:
            identity.update(f"{sample.key}\n".encode())
            for field in sample.fields:
                identity.update(f"{field.size} {field.field}\n".encode())
                sums = totals.get(field.field) or totals.setdefault(field.field, [0, 0])
                sums[0] += 1
                sums[1] += field.size
        return identity.hexdigest(), {name: FieldTotals(*sums) for name, sums in totals.items()}

    @property
    def identity(self) -> str:
        return self._looked[0]

    @property
    def fields(self) -> Mapping[str, FieldTotals]:
        return self._looked[1]

    @property
    def near_duplicates(self) -> tuple[tuple[str, ...], ...]:
        """Those of all rows: whether one is in them depends on the others."""
        return self._rows.near_duplicates

    def cut(self, start: int, stop: int) -> RowRange:
        runs: list[Run] = []
        sizes = array("Q")
        begin = start
        while begin < stop:
            end = begin + 1
            while end < stop and self._positions[end] == self._positions[end - 1] + 1:
                end += 1
            part = self._rows.cut(self._positions[begin], self._positions[begin] + end - begin)
            runs += part.runs
            sizes += part.file_sizes
            begin = end
        return RowRange(self._rows.maker, tuple(runs), sizes)

    def picked(self, positions: Sequence[int]) -> Picked:
        return Picked(self._rows, array("q", (self._positions[position] for position in positions)))
