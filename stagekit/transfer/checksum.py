"""What a store says of an object's bytes, compared with the bytes that arrived.

A block table or a sha-256, from a manifest or a hub, settles it. An etag does where it is the MD5 of the bytes, or of the parts' MD5s
with a part size that can be guessed; an etag may also be something else (encrypted objects, unusual part sizes), so a difference alone
proves nothing.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

import xxhash

from ..shards.index import BlockTable
from ..store.base import Data, ObjectInfo
from .put import PART_SIZE, part_size_for

Finding = Literal["proven", "differs", "unknown"]

_MIB = 2**20
_MD5 = re.compile(r"([0-9a-f]{32})(?:-([0-9]+))?")
# What clients cut objects into by default: ours, aws and boto3, s5cmd, rclone and s3fs, and common settings.
_PART_SIZES = tuple(size * _MIB for size in (8, 16, 50, 5, 64, 100, 32, 10, 128, 256, 512, 1024))
_MOST_GUESSES = 2


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of an object: its size, and a sha-256 or an etag. ``blocks`` is a shard's table, which is as good as its sha-256, and
    compared at a tenth of the cost; it counts only when it covers the shard but for zeros at its end."""

    size: int
    sha256: str | None = None
    etag: str | None = None
    blocks: BlockTable | None = None

    @property
    def has_md5(self) -> bool:
        """Whether the etag looks like one that is made of MD5s, with parts whose size can be guessed."""
        return bool(part_sizes(self.size, self.etag))


def part_sizes(size: int, etag: str | None) -> list[int]:
    """The part sizes with which ``etag`` may have been made, the likeliest first: the object's own size for one without parts."""
    match = _MD5.fullmatch((etag or "").lower())
    if match is None:
        return []
    if match.group(2) is None:
        return [max(size, 1)]
    parts = int(match.group(2))
    guesses = dict.fromkeys((part_size_for(size), PART_SIZE, *_PART_SIZES))
    return [guess for guess in guesses if max(1, -(-size // guess)) == parts][:_MOST_GUESSES]


class Checksum:
    """Digests of an object whose bytes pass by in order.

    ``digest`` names the content itself: equal for equal bytes, whatever was expected. ``finding`` compares with ``expected``: ``unknown``
    where it holds nothing to compare but a size. ``trust_etag`` is false where the store's etags were seen to be no MD5s.
    """

    def __init__(self, expected: Expected, *, trust_etag: bool = True) -> None:
        self._expected = expected
        self._size = 0
        table = expected.blocks
        self._blocks = _Blocks(table, expected.size) if table is not None and table.blocks[0].offset == 0 else None
        self._sha256 = hashlib.sha256() if expected.sha256 is not None and self._blocks is None else None
        self._xxh3 = xxhash.xxh3_128() if self._sha256 is None else None
        guesses = part_sizes(expected.size, expected.etag) if expected.sha256 is None and trust_etag else []
        self._etags = [EtagOfParts(guess, with_count="-" in (expected.etag or "")) for guess in guesses]

    def update(self, data: Data) -> None:
        self._size += len(data)
        for digest in (self._blocks, self._sha256, self._xxh3, *self._etags):
            if digest is not None:
                digest.update(data)

    @property
    def digest(self) -> str:
        if self._sha256 is not None:
            return f"sha256:{self._sha256.hexdigest()}"
        assert self._xxh3 is not None
        return f"xxh3:{self._xxh3.hexdigest()}"

    @property
    def finding(self) -> Finding:
        if self._size != self._expected.size:
            return "differs"
        if self._blocks is not None:
            return "proven" if self._blocks.hold else "differs"
        if self._sha256 is not None:
            return "proven" if self._sha256.hexdigest() == self._expected.sha256 else "differs"
        if not self._etags:
            return "unknown"
        return "proven" if (self._expected.etag or "").lower() in [one.value for one in self._etags] else "differs"


class _Blocks:
    """Whether bytes that pass by are those of a block table, with nothing but zeros behind its last block."""

    def __init__(self, table: BlockTable, size: int) -> None:
        self._left = list(reversed(table.blocks))
        self._hash = xxhash.xxh3_128()
        self._filled = 0
        self.hold = table.end <= size

    def update(self, data: Data) -> None:
        view = memoryview(data)
        while len(view) and self._left:
            block = self._left[-1]
            taken = view[: block.size - self._filled]
            self._hash.update(taken)
            self._filled += len(taken)
            view = view[len(taken) :]
            if self._filled == block.size:
                self.hold = self.hold and self._hash.digest() == block.digest
                self._left.pop()
                self._hash = xxhash.xxh3_128()
                self._filled = 0
        if len(view) and view.tobytes().count(0) != len(view):
            self.hold = False


class EtagOfParts:
    """The etag that a store with MD5 etags gives to bytes that came in parts of ``part_size``.

    ``with_count`` is how multipart uploads look, of one part too; else it is that of an object put whole.
    """

    def __init__(self, part_size: int, *, with_count: bool) -> None:
        self._part_size = part_size
        self._with_count = with_count
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._filled = 0
        self._parts: list[bytes] = []

    @classmethod
    def like(cls, info: ObjectInfo, part_size: int) -> EtagOfParts | None:
        """Ready to make an etag like that of ``info``, in parts of ``part_size`` if it has any; ``None`` when that is no MD5."""
        match = _MD5.fullmatch((info.etag or "").lower())
        return None if match is None else cls(part_size, with_count=match.group(2) is not None)

    def update(self, data: Data) -> None:
        if not self._with_count:
            self._md5.update(data)
            return
        view = memoryview(data)
        while len(view):
            taken = view[: self._part_size - self._filled]
            self._md5.update(taken)
            self._filled += len(taken)
            view = view[len(taken) :]
            if self._filled == self._part_size:
                self._next_part()

    def _next_part(self) -> None:
        self._parts.append(self._md5.digest())
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._filled = 0

    @property
    def value(self) -> str:
        """The etag of what was passed so far."""
        if not self._with_count:
            return self._md5.hexdigest()
        parts = [*self._parts, self._md5.digest()] if self._filled or not self._parts else self._parts
        return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"

    def gives(self, info: ObjectInfo) -> bool:
        """Whether what was passed has the etag of ``info``."""
        return self.value == (info.etag or "").lower()
