"""Bytes that come in pieces of any size, and leave in pieces of one size."""

from __future__ import annotations

from collections.abc import Iterator

Data = bytes | bytearray | memoryview


def keep_freed_memory() -> None:
    """Let this process use the memory of pieces again instead of giving it back and asking for fresh pages.

    glibc takes blocks from the system one by one above a size, and gives the end of its heap back above another; freeing one large block,
    which was never touched, raises both to what pieces need. Measured: a tenth of the time of packing small files. Elsewhere it does
    nothing.
    """
    bytearray(31 * 2**20)


class Pieces:
    """Collects data and cuts it into pieces of exactly ``size`` bytes; ``rest()`` is what is left over.

    Each byte is copied once, all of a piece together, and what is ``bytes`` already and has the size of a piece is not copied at all.
    A buffer that is added may be used again once ``add`` has returned.
    """

    __slots__ = ("_filled", "_held", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._held: list[bytes | memoryview] = []
        self._filled = 0

    def __len__(self) -> int:
        """Bytes that wait for their piece to be full."""
        return self._filled

    def add(self, data: Data) -> bool:
        """Take ``data`` and tell whether ``full()`` has something to give."""
        # Joining many small bytes objects later is faster than growing a buffer by each.
        held = data if isinstance(data, bytes) else bytes(data)
        self._held.append(held)
        self._filled += len(held)
        return self._filled >= self.size

    def add_all(self, parts: list[bytes], size: int) -> bool:
        """``add`` for many at once, ``size`` bytes together."""
        self._held += parts
        self._filled += size
        return self._filled >= self.size

    def full(self) -> Iterator[bytes]:
        """The pieces that are full, each of them removed."""
        while self._filled >= self.size:
            left: list[bytes | memoryview] = []
            over = self._filled - self.size
            while over:
                last = self._held.pop()
                kept = max(0, len(last) - over)
                over -= len(last) - kept
                view = memoryview(last)
                left.append(view[kept:])
                if kept:
                    self._held.append(view[:kept])
            filled = self._filled - self.size
            piece = self.rest()
            self._held, self._filled = left[::-1], filled
            yield piece

    def rest(self) -> bytes:
        """Everything that is held, which then is empty."""
        held, self._held, self._filled = self._held, [], 0
        return held[0] if len(held) == 1 and isinstance(held[0], bytes) else b"".join(held)
