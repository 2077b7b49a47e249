"""A window of blocks, laid out in reading order, from which samples are made as they are taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ..shards.grid import BlockSamples, Sample, Table

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows(Sequence[Sample]):
    """Samples that all have the same ``fields``. Each is made, and its bytes are copied, when it is asked for, and anew each time.

    ``columns`` gives the same by field, without making a dict of each. Of ``views``, ``slots`` tells in which one a row lies, and
    ``starts`` and ``stops`` where, a list for each field.
    """

    views: list[memoryview]
    fields: tuple[str, ...]
    keys: list[str]
    slots: list[int]
    starts: list[list[int]]
    stops: list[list[int]]

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, number: int) -> Sample: ...
    @overload
    def __getitem__(self, number: slice) -> Rows: ...
    def __getitem__(self, number: int | slice) -> Sample | Rows:
        if isinstance(number, slice):
            starts, stops = [one[number] for one in self.starts], [one[number] for one in self.stops]
            return Rows(self.views, self.fields, self.keys[number], self.slots[number], starts, stops)
        number = range(len(self))[number]
        [sample] = self[number : number + 1]
        return sample

    def __iter__(self) -> Iterator[Sample]:
        views, fields = self.views, self.fields
        if len(fields) == 1:
            [field], [firsts], [lasts] = fields, self.starts, self.stops
            return (
                {"__key__": key, field: views[slot][first:last].tobytes()}
                for slot, key, first, last in zip(self.slots, self.keys, firsts, lasts, strict=True)
            )
        return (
            {"__key__": key} | {field: views[slot][first:last].tobytes() for field, first, last in zip(fields, one, other, strict=True)}
            for slot, key, one, other in zip(
                self.slots, self.keys, zip(*self.starts, strict=True), zip(*self.stops, strict=True), strict=True
            )
        )

    def columns(self) -> dict[str, list[Any]]:
        """The keys, and the bytes of each field."""
        views, slots = self.views, self.slots
        found: dict[str, list[Any]] = {"__key__": self.keys}
        for field, firsts, lasts in zip(self.fields, self.starts, self.stops, strict=True):
            found[field] = [views[slot][first:last].tobytes() for slot, first, last in zip(slots, firsts, lasts, strict=True)]
        return found


class Window:
    """The samples ``numbers`` of the blocks ``slots`` of ``blocks``, in that order. A block that is ``None`` was skipped, and so are its
    samples: each of them is ``None``."""

    def __init__(self, blocks: Sequence[BlockSamples | None], slots: Numbers, numbers: Numbers) -> None:
        self.skipped = sum(int(np.count_nonzero(slots == slot)) for slot, block in enumerate(blocks) if block is None)
        self.left = len(slots)
        self._rows: Rows | None = None
        tables = [block.table for block in blocks if block is not None and block.table is not None]
        if tables and len(tables) == len(blocks) and len({table.fields for table in tables}) == 1:
            self._rows = _from_tables(tables, slots, numbers)
        else:
            makes = [_skipped if block is None else block.make for block in blocks]
            self._samples = (makes[slot](number) for slot, number in zip(slots.tolist(), numbers.tolist(), strict=True))

    def take(self, count: int) -> Sequence[Sample | None]:
        """The next ``count`` samples, fewer at the end."""
        taken: Sequence[Sample | None]
        if self._rows is None:
            taken = list(islice(self._samples, count))
        else:
            begin = len(self._rows) - self.left
            taken = self._rows[begin : begin + count]
        self.left -= len(taken)
        return taken


def _skipped(_: int) -> None:
    """What stands for a sample of a block that was skipped."""


def _from_tables(tables: list[Table], slots: Numbers, numbers: Numbers) -> Rows:
    """The samples, after keys and places were put in order: going through those of all blocks at random would miss every cache."""
    begins = np.cumsum([0, *(len(table.keys) for table in tables)])
    order = begins[slots] + numbers
    keys = np.array([key for table in tables for key in table.keys], object)[order].tolist()
    starts = np.concatenate([table.starts for table in tables])[order].T.tolist()
    stops = np.concatenate([table.stops for table in tables])[order].T.tolist()
    return Rows([table.data for table in tables], tables[0].fields, keys, slots.tolist(), starts, stops)


NOTHING = Window((), np.zeros(0, np.int64), np.zeros(0, np.int64))
"""A window with nothing in it."""
