"""A window of blocks, laid out in reading order, from which samples are made as they are taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ..shards.grid import BlockSamples, Sample, Table

Numbers = NDArray[np.int64]


class Window:
    """The samples ``numbers`` of the blocks ``slots`` of ``blocks``, in that order. A block that is ``None`` was skipped, and so are its
    samples: each of them is ``None``."""

    def __init__(self, blocks: Sequence[BlockSamples | None], slots: Numbers, numbers: Numbers) -> None:
        self.skipped = sum(int(np.count_nonzero(slots == slot)) for slot, block in enumerate(blocks) if block is None)
        tables = [block.table for block in blocks if block is not None and block.table is not None]
        if tables and len(tables) == len(blocks) and len({table.fields for table in tables}) == 1:
            self._samples = _from_tables(tables, slots, numbers)
        else:
            makes = [_skipped if block is None else block.make for block in blocks]
            self._samples = (makes[slot](number) for slot, number in zip(slots.tolist(), numbers.tolist(), strict=True))
        self.left = len(slots)

    def take(self, count: int) -> list[Sample | None]:
        """The next ``count`` samples, fewer at the end."""
        taken: list[Sample | None] = list(islice(self._samples, count))
        self.left -= len(taken)
        return taken


def _skipped(_: int) -> None:
    """What stands for a sample of a block that was skipped."""


def _from_tables(tables: list[Table], slots: Numbers, numbers: Numbers) -> Iterator[Sample]:
    """The samples, after keys and places were put in order: going through those of all blocks at random would miss every cache."""
    begins = np.cumsum([0, *(len(table.keys) for table in tables)])
    order = begins[slots] + numbers
    keys = np.array([key for table in tables for key in table.keys], object)[order].tolist()
    starts = np.concatenate([table.starts for table in tables])[order].T.tolist()
    stops = np.concatenate([table.stops for table in tables])[order].T.tolist()
    views = [table.data for table in tables]
    fields = tables[0].fields
    if len(fields) == 1:
        [field], [firsts], [lasts] = fields, starts, stops
        return (
            {"__key__": key, field: views[slot][first:last].tobytes()}
            for slot, key, first, last in zip(slots.tolist(), keys, firsts, lasts, strict=True)
        )
    return (
        {"__key__": key} | {field: views[slot][first:last].tobytes() for field, first, last in zip(fields, one, other, strict=True)}
        for slot, key, one, other in zip(slots.tolist(), keys, zip(*starts, strict=True), zip(*stops, strict=True), strict=True)
    )


NOTHING = Window((), np.zeros(0, np.int64), np.zeros(0, np.int64))
"""A window with nothing in it."""
