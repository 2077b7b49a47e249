"""One tar, read once from its first byte to its last: all that its manifest entry and side files need, in constant memory."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..errors import CorruptShard, DuplicateKey, KeyNotAllowed, ShardError
from ..shards.archive import RECORD, ArchiveReader
from ..shards.digests import SampleDigests
from ..shards.index import BLOCK_SIZE, Block, BlockTable, BuiltShard, FieldTotals, index_to_bytes
from ..shards.sample import check_field, is_meta, split_name
from ..store.base import Data

_MAGIC = b"ustar"
_STRANGERS = (
    (b"\x1f\x8b", "compressed with gzip"),
    (b"BZh", "compressed with bzip2"),
    (b"\xfd7zXZ\0", "compressed with xz"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd"),
    (b"\x04\x22\x4d\x18", "compressed with lz4"),
    (b"PK", "a zip archive"),
    (b"PAR1", "a Parquet file"),
    (b"version https://git-lfs", "a pointer to a file in Git LFS"),
    (b"<", "a web page or XML, such as a server's error message"),
    (b"{", "JSON, such as a server's error message"),
)


@dataclass(frozen=True, slots=True)
class Scan:
    """What a tar holds. ``keys`` are the xxh3-64 of its samples' keys, in order.

    ``skipped`` counts members that are no regular files, by kind; ``unnamed`` those whose names have no key or no field. ``examples``
    has the first name of each.
    """

    built: BuiltShard
    keys: NDArray[np.uint64]
    skipped: dict[str, int]
    unnamed: int
    examples: dict[str, str]


def key_hash(key: str) -> int:
    """What ``Scan.keys`` holds for ``key``."""
    return xxhash.xxh3_64_intdigest(key.encode())


def scan(chunks: Iterable[Data], *, source: str, block_size: int = BLOCK_SIZE) -> Scan:
    """Read the tar whose bytes are ``chunks``, cut anywhere, and named ``source`` in messages.

    Memory is that of a block and a few chunks, whatever the tar's size. Raises ``CorruptShard`` for what is no whole, uncompressed tar,
    ``DuplicateKey`` for a field twice in a sample or a key that comes back after another one, ``KeyNotAllowed`` for a name that no sample
    may have, ``ShardError`` for a tar without a sample; each names ``source`` and, where there is one, the offset.
    """
    sha = hashlib.sha256()
    cutter = _Cutter(block_size)

    def passing() -> Iterator[Data]:
        first = True
        for chunk in chunks:
            if first and len(chunk):
                first = False
                _refuse_stranger(chunk, source)
            sha.update(chunk)
            cutter.arrived(chunk, reader)
            yield chunk
        if first:
            raise CorruptShard(f"{source} is empty (0 bytes), so it is no tar; write it again, or leave it out")

    reader = ArchiveReader(passing(), source=source)
    offsets, keys = array("Q"), array("Q")
    fields: dict[str, list[int]] = {}
    here: set[str] = set()
    current: str | None = None
    unnamed = 0
    examples: dict[str, str] = {}
    for member, _ in reader:
        name = member.name
        parts = split_name(name)
        if parts is None or is_meta(name):
            unnamed += 1
            examples.setdefault("unnamed", name)
            continue
        key, field = parts
        if key != current:
            cutter.begin(member.offset)
            offsets.append(member.offset)
            keys.append(key_hash(key))
            current = key
            here.clear()
        elif field in here:
            raise DuplicateKey(
                f"{source} holds the field {field!r} of the sample {key!r} twice, the second time at offset {member.offset} "
                f"({name!r}; readers lower-case fields). Pack the tar again with one of them"
            )
        here.add(field)
        totals = fields.get(field)
        if totals is None:
            _check(name, field, source, member.offset)
            totals = fields[field] = [0, 0]
        elif "\n" in name:
            _check(name, field, source, member.offset)
        totals[0] += 1
        totals[1] += member.size
    if not offsets:
        found = ", ".join(f"{count} × {kind}" for kind, count in sorted(reader.skipped.items()))
        if unnamed:
            found += f"{', ' if found else ''}{unnamed} files without a key and an extension, such as {examples['unnamed']!r}"
        raise ShardError(f"{source} holds no sample: {found or 'it is an empty archive'}. Leave it out")
    hashes = np.frombuffer(keys, dtype=np.uint64)
    _refuse_repeated(hashes, offsets, source)
    return Scan(
        BuiltShard(
            bytes=reader.offset,
            samples=len(offsets),
            sha256=sha.hexdigest(),
            table=BlockTable(cutter.finish(reader.end)),
            index=index_to_bytes([*offsets, reader.end]),
            fields={name: FieldTotals(*fields[name]) for name in sorted(fields)},
            sample_digests=cutter.digests.to_bytes(),
        ),
        hashes,
        {str(kind): count for kind, count in sorted(reader.skipped.items())},
        unnamed,
        examples | {str(kind): name for kind, name in reader.skipped_names.items()},
    )


def _refuse_stranger(chunk: Data, source: str) -> None:
    head = bytes(chunk[:RECORD])
    if head[257:262] == _MAGIC or not head.strip(b"\0"):
        return
    for start, what in _STRANGERS:
        if head.lstrip().startswith(start):
            remedy = "decompress it first: ranges of it cannot be read" if what.startswith("compressed") else "fetch or write it again"
            raise CorruptShard(f"{source} is no tar but {what} (it begins with {head[:24]!r}); {remedy}, or leave it out")


def _check(name: str, field: str, source: str, offset: int) -> None:
    try:
        if "\n" in name:
            raise KeyNotAllowed("it holds a newline, at which WebDataset's pattern for keys stops")
        check_field(field)
    except KeyNotAllowed as error:
        raise KeyNotAllowed(f"{source} holds {name!r} at offset {offset}: {error}. Pack the tar again under another name") from None


def _refuse_repeated(hashes: NDArray[np.uint64], offsets: array[int], source: str) -> None:
    """Raise ``DuplicateKey`` when a key comes back. Two keys of one tar with one hash are as likely as a disk that lies."""
    order = np.argsort(hashes, kind="stable")
    again = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
    if not len(again):
        return
    number = int(order[again + 1].min())
    before = int(np.flatnonzero(hashes == hashes[number])[0])
    raise DuplicateKey(
        f"{source} holds the key of its sample {before} (offset {offsets[before]}) again as sample {number} (offset {offsets[number]}), "
        "not next to it: its members are interleaved, or it was appended to, and readers would make two samples of one. "
        "Unpack it and pack the folder with `stagekit shard`"
    )


class _Cutter:
    """Blocks by the cut rule, hashed while the bytes pass by.

    A sample's size is known only when it has ended, and by then its bytes have passed. So chunks are kept while it is open in which block
    they belong: at most as many bytes as a block has, since a sample that is longer begins a block of its own.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: list[Block] = []
        self._chunks: deque[tuple[int, memoryview]] = deque()
        self._arrived = 0
        self._samples = 0
        self._sample = -1  # where the sample begins that is being read
        self._block = self._hashed = 0  # where the block begins, and up to where its bytes are in the hash
        self._first = 0  # the block's first sample
        self._hash = xxhash.xxh3_128()
        self._bounds: deque[int] = deque()  # where samples begin whose first byte is not hashed yet
        self.digests = SampleDigests()

    def arrived(self, chunk: Data, reader: ArchiveReader) -> None:
        """``chunk`` is about to be read by ``reader``."""
        reach = min(reader.reach, self._arrived)
        if self._sample < 0:
            self._drop(reach)
        else:
            self._decide(reader.reach)
            self._take(reach if self._sample == self._block else self._sample)
        if not reader.ended and len(chunk):
            self._chunks.append((self._arrived, memoryview(chunk).cast("B")))
        self._arrived += len(chunk)

    def begin(self, offset: int) -> None:
        """A sample begins at ``offset``, and the one before it ends."""
        if self._sample < 0:
            self._drop(offset)
            self._block = self._hashed = offset
        else:
            self._decide(offset)
        self._sample = offset
        self._bounds.append(offset)
        self._samples += 1

    def finish(self, end: int) -> tuple[Block, ...]:
        """The last sample ends at ``end``."""
        self._decide(end)
        self._close(end, self._samples)
        self.digests.update(memoryview(b""), [0])  # the last sample ends where the last byte was
        return tuple(self._blocks)

    def _decide(self, reach: int) -> None:
        """The sample that is being read reaches to ``reach`` at least."""
        if self._sample > self._block and reach - self._block > self._limit:
            self._close(self._sample, self._samples - 1)

    def _close(self, end: int, samples: int) -> None:
        self._take(end)
        self._blocks.append(Block(self._first, self._block, end - self._block, samples - self._first, self._hash.digest()))
        self._block, self._first, self._hash = end, samples, xxhash.xxh3_128()

    def _take(self, end: int) -> None:
        """Put the bytes up to ``end`` into the block's hash."""
        while self._hashed < end and self._chunks:
            offset, chunk = self._chunks[0]
            piece = chunk[self._hashed - offset : end - offset]
            self._hash.update(piece)
            bounds: list[int] = []
            while self._bounds and self._bounds[0] < self._hashed + len(piece):
                bounds.append(self._bounds.popleft() - self._hashed)
            self.digests.update(piece, bounds)
            self._hashed += len(piece)
            self._drop(self._hashed)

    def _drop(self, end: int) -> None:
        while self._chunks and self._chunks[0][0] + len(self._chunks[0][1]) <= end:
            self._chunks.popleft()
