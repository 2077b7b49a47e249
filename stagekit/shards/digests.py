"""A digest of each sample beside a shard, by which a full verification names the very sample that is damaged.

No reader needs it, and a data set without it is whole. ``docs/format.md`` 4.3 is the specification.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from itertools import pairwise

import xxhash

from .archive import Data

_MAGIC = b"SKSAMPLE"
_VERSION = 1
_HEAD = struct.Struct("<8sIQ")
_DIGEST_BYTES = 16


class SampleDigests:
    """xxh3-64 of each sample of a shard, taken while its bytes pass by."""

    def __init__(self) -> None:
        self._digests = array("Q")
        self._open: xxhash.xxh3_64 | None = None

    def update(self, view: memoryview, bounds: Sequence[int]) -> None:
        """The next bytes. ``bounds`` are the positions in them where a sample begins and the one before ends, or where the last one ends;
        a bound at their end may as well be told as 0 with the next bytes."""
        if not bounds:
            if self._open is not None:
                self._open.update(view)
            return
        if self._open is not None:
            self._open.update(view[: bounds[0]])
            self._digests.append(self._open.intdigest())
        digest = xxhash.xxh3_64_intdigest
        self._digests.extend([digest(view[begin:end]) for begin, end in pairwise(bounds)])
        self._open = xxhash.xxh3_64(view[bounds[-1] :])

    def to_bytes(self) -> bytes:
        """The content of a ``.samples`` file, once the end of the last sample was told."""
        numbers = array("Q", self._digests)
        if sys.byteorder == "big":
            numbers.byteswap()
        body = _HEAD.pack(_MAGIC, _VERSION, len(numbers)) + numbers.tobytes()
        return body + xxhash.xxh3_128_digest(body)


def digests_bytes(samples: int) -> int:
    """The size of the ``.samples`` file of a shard with that many samples."""
    return _HEAD.size + 8 * samples + _DIGEST_BYTES


def digests_from_bytes(data: Data, samples: int) -> list[int] | None:
    """The digests in a ``.samples`` file of a shard with that many samples; ``None`` when it is damaged, of another version or shard."""
    raw = bytes(data)
    if len(raw) != digests_bytes(samples) or xxhash.xxh3_128_digest(raw[:-_DIGEST_BYTES]) != raw[-_DIGEST_BYTES:]:
        return None
    if _HEAD.unpack_from(raw) != (_MAGIC, _VERSION, samples):
        return None
    numbers = array("Q", raw[_HEAD.size : -_DIGEST_BYTES])
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def sample_digest(data: Data) -> int:
    """What the file holds for a sample of these bytes: from its first header to where the next sample begins."""
    return xxhash.xxh3_64_intdigest(data)
