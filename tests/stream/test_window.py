"""A window in reading order: blocks of every kind, and blocks that were skipped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stagekit.shards.grid import BlockSamples, grid_samples
from stagekit.stream.window import NOTHING, Rows, Window

from ..shards import handmade


def block(first: int, fields: tuple[str, ...], count: int = 5) -> BlockSamples:
    members = ((f"{number:03d}.{field}", f"{field} {number}".encode()) for number in range(first, first + count) for field in fields)
    found = grid_samples(b"".join(handmade.member(name.encode(), data) for name, data in members))
    assert found is not None
    return found


def listed(first: int) -> BlockSamples:
    """As blocks come that are not plain."""
    samples: list[dict[str, Any]] = [{"__key__": f"{number:03d}", "txt": b"txt %d" % number} for number in range(first, first + 5)]
    return BlockSamples(5, samples.__getitem__)


@pytest.mark.parametrize(
    "blocks",
    [
        [block(0, ("txt",)), block(5, ("txt",)), block(10, ("txt",))],
        [block(0, ("cls", "txt")), block(5, ("cls", "txt"))],
        [block(0, ("cls", "txt")), block(5, ("txt",)), listed(10)],
        [block(0, ("txt",)), None, block(5, ("txt",))],
        [listed(0)],
        [None],
    ],
)
@pytest.mark.parametrize("count", [1, 4, 100])
def test_samples_come_in_the_order_asked_for(blocks: list[BlockSamples | None], count: int) -> None:
    random = np.random.default_rng(0)
    total = 5 * len(blocks)
    order = random.permutation(total)
    window = Window(blocks, order // 5, order % 5)
    got = []
    while window.left:
        before = window.left
        taken = window.take(count)
        assert len(taken) == min(count, before) == before - window.left
        got += taken
    wanted = []
    for place in order.tolist():
        one = blocks[place // 5]
        wanted.append(None if one is None else one[place % 5])
    assert got == wanted
    assert window.skipped == got.count(None) == 5 * blocks.count(None)
    assert not len(window.take(count))


def test_nothing() -> None:
    assert NOTHING.left == 0
    assert not len(NOTHING.take(3))


@pytest.mark.parametrize("fields", [("txt",), ("cls", "txt")])
def test_rows_are_a_sequence_of_samples_and_give_the_same_by_field(fields: tuple[str, ...]) -> None:
    order = np.random.default_rng(0).permutation(10)
    rows = Window([block(0, fields), block(5, fields)], order // 5, order % 5).take(8)
    assert isinstance(rows, Rows)
    samples = [{"__key__": f"{number:03d}", **{field: f"{field} {number}".encode() for field in fields}} for number in order[:8].tolist()]
    assert list(rows) == samples
    assert list(rows[2:5]) == samples[2:5]
    assert (rows[0], rows[-1]) == (samples[0], samples[-1])
    with pytest.raises(IndexError):
        rows[8]
    for part, wanted in ((rows, samples), (rows[3:6], samples[3:6])):
        assert part.columns() == {name: [sample[name] for sample in wanted] for name in ("__key__", *fields)}
