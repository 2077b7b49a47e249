from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stagekit.pieces import Pieces


@given(st.lists(st.binary(max_size=50), max_size=30), st.integers(1, 40))
@settings(deadline=None)
def test_the_same_bytes_in_pieces_of_one_size(added: list[bytes], size: int) -> None:
    pieces = Pieces(size)
    out = []
    for data in added:
        filled = pieces.add(memoryview(bytearray(data)))
        if filled and len(data) % 2:  # nobody has to take what is full at once
            out += list(pieces.full())
            assert len(pieces) < size
    out += list(pieces.full())
    assert all(len(piece) == size for piece in out)
    assert b"".join([*out, pieces.rest()]) == b"".join(added)
    assert pieces.rest() == b""


def test_a_buffer_may_be_used_again() -> None:
    pieces = Pieces(10)
    buffer = bytearray(b"abc")
    pieces.add(buffer)
    buffer[:] = b"xyz"
    assert pieces.rest() == b"abc"


def test_what_has_the_right_size_is_not_copied() -> None:
    pieces = Pieces(4)
    data = b"abcd"
    assert pieces.add(data)
    assert next(pieces.full()) is data
