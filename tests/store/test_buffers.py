"""Memory that is used again, and never while somebody has a part of what was read into it."""

from __future__ import annotations

import numpy as np

from stagekit.store.buffers import Buffers, buffer

MIB = 2**20


def place(view: memoryview) -> int:
    """Where in memory ``view`` begins."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_what_nobody_refers_to_is_used_again() -> None:
    buffers = Buffers()
    first = buffers.take(8 * MIB)
    part, where = first[100:200], place(first)
    part[:] = bytes(range(100))
    del first
    second = buffers.take(8 * MIB)
    assert place(second) != where
    second[:] = b"x" * len(second)
    assert bytes(part) == bytes(range(100))
    array = np.frombuffer(part, np.uint8)
    del part
    third = buffers.take(8 * MIB)
    assert place(third) != where
    del array
    assert place(buffers.take(8 * MIB - 5)) == where


def test_bodies_of_another_size_take_no_memory_on_top() -> None:
    buffers = Buffers()
    held = [buffers.take(4 * MIB) for _ in range(4)]
    del held
    small = [buffers.take(2 * MIB) for _ in range(8)]
    assert buffers._held == 16 * MIB == sum(map(len, small))


def test_only_what_was_lent_is_used() -> None:
    buffers = Buffers()
    with buffers.lent():
        assert len(buffer(3 * MIB)) == 3 * MIB
        assert len(buffer(10)) == 10  # so small that nothing is gained
        assert buffers._held == 3 * MIB
    assert len(buffer(3 * MIB)) == 3 * MIB
    assert buffers._held == 3 * MIB
