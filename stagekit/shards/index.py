"""Side files of a shard: its block table and its sample index, and the builder that makes them while the shard's bytes pass by.

``docs/format.md`` section 4 is the specification.
"""

from __future__ import annotations

import bisect
import builtins
import hashlib
import operator
import queue
import struct
import sys
import threading
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import xxhash

from ..errors import CorruptShard, DuplicateKey, ManifestError, ShardError, SourceError
from ..pieces import Pieces
from .archive import END, RECORD, Data, member_header, member_headers, padding
from .digests import SampleDigests
from .sample import member_name, member_names

BLOCK_SIZE = 8 * 2**20

_MAGIC = b"SKBLOCKS"
_VERSION = 1
_HEAD = struct.Struct("<8sII")
_ENTRY = struct.Struct("<QQQQ16s")
_DIGEST_BYTES = 16
_LIMIT = 2**63


def block_digest(data: Data) -> bytes:
    """XXH3 with 128 bits of ``data``: what a block's bytes are compared with before anything of them is handed out."""
    return xxhash.xxh3_128_digest(data)


@dataclass(frozen=True, slots=True)
class Block:
    """A run of whole samples in a shard. ``first_sample`` counts within the shard; ``offset`` and ``size`` are bytes of the tar."""

    first_sample: int
    offset: int
    size: int
    samples: int
    digest: bytes

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks of one shard, in order; they touch each other. Raises ``CorruptShard`` when they do not."""

    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        _check_blocks(self.blocks, "a block table")

    @property
    def samples(self) -> int:
        return self.blocks[-1].first_sample + self.blocks[-1].samples

    @property
    def block_samples(self) -> tuple[int, ...]:
        return tuple(block.samples for block in self.blocks)

    @property
    def largest(self) -> int:
        """Bytes of the largest block."""
        return max(block.size for block in self.blocks)

    @property
    def end(self) -> int:
        """Where the last block ends."""
        return self.blocks[-1].end

    def to_bytes(self) -> bytes:
        """The content of a ``.blocks`` file."""
        body = _HEAD.pack(_MAGIC, _VERSION, len(self.blocks)) + b"".join(
            _ENTRY.pack(block.first_sample, block.offset, block.size, block.samples, block.digest) for block in self.blocks
        )
        return body + block_digest(body)

    @classmethod
    def from_bytes(cls, data: Data, *, source: str) -> BlockTable:
        """Parse a ``.blocks`` file; everything ``docs/format.md`` 4.1 asks for is checked.

        Raises ``ManifestError`` for a version this release does not read and ``CorruptShard`` for any other defect, naming ``source``.
        """
        raw = bytes(data)
        if len(raw) < _HEAD.size + _DIGEST_BYTES or not raw.startswith(_MAGIC):
            raise _broken(source, f"a block table, which starts with {_MAGIC.decode()}", f"{len(raw)} bytes that start with {raw[:8]!r}")
        _, version, count = _HEAD.unpack_from(raw)
        if version != _VERSION:
            raise ManifestError(
                f"{source} is a block table of version {version}, and this release reads version {_VERSION}; "
                "install a release of Stagekit that knows it"
            )
        length = _HEAD.size + count * _ENTRY.size + _DIGEST_BYTES
        if len(raw) != length:
            raise _broken(source, f"{length} bytes for {count} blocks", f"{len(raw)} bytes")
        body, stored = raw[:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
        counted = block_digest(body)
        if stored != counted:
            raise _broken(source, f"the digest {stored.hex()} over its entries", counted.hex())
        blocks = tuple(Block(*values) for values in _ENTRY.iter_unpack(body[_HEAD.size :]))
        _check_blocks(blocks, source)
        return cls(blocks)


def _check_blocks(blocks: tuple[Block, ...], source: str) -> None:
    if not blocks:
        raise _broken(source, "at least one block", "none")
    sample, offset = 0, blocks[0].offset
    for number, block in enumerate(blocks):
        if not 0 <= block.offset < _LIMIT or not 0 < block.samples < _LIMIT or block.size >= _LIMIT or block.size < block.samples * RECORD:
            raise _broken(
                source, f"at least one sample of {RECORD} bytes in block {number}", f"{block.samples} samples in {block.size} bytes"
            )
        if block.first_sample != sample or block.offset != offset:
            raise _broken(
                source,
                f"block {number} to go on at sample {sample} and offset {offset}",
                f"sample {block.first_sample} and offset {block.offset}",
            )
        if len(block.digest) != _DIGEST_BYTES:
            raise _broken(source, f"a digest of {_DIGEST_BYTES} bytes in block {number}", f"{len(block.digest)}")
        sample += block.samples
        offset += block.size


def _broken(source: str, expected: str, found: str) -> CorruptShard:
    return CorruptShard(f"{source} is damaged: expected {expected}, found {found}. Fetch it again; if it stays so, publish the shard again")


def index_to_bytes(offsets: Iterable[int]) -> bytes:
    """The content of an ``.idx`` file: the samples' offsets, and last the end of the last member."""
    numbers = array("Q", offsets)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def index_from_bytes(data: Data, *, source: str = "a sample index") -> list[int]:
    """The offsets in an ``.idx`` file: one for each sample, and last the end. Raises ``CorruptShard`` naming ``source``."""
    raw = bytes(data)
    if len(raw) % 8 or len(raw) < 16:
        raise _broken(source, "at least two numbers of 8 bytes each", f"{len(raw)} bytes")
    numbers = array("Q", raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    for number, (before, after) in enumerate(pairwise(numbers)):
        if before >= after or after >= _LIMIT:
            raise _broken(source, f"ascending offsets, entry {number + 1} above {before}", f"{after}")
    return numbers.tolist()


class FieldTotals(NamedTuple):
    """How many samples have a field, and the sum of its bytes."""

    samples: int
    bytes: int


@dataclass(frozen=True, slots=True)
class BuiltShard:
    """What is known of a shard when its last byte has passed: all that its manifest entry and its side files need."""

    bytes: int
    samples: int
    sha256: str
    table: BlockTable
    index: builtins.bytes
    fields: dict[str, FieldTotals]
    sample_digests: builtins.bytes


@dataclass(slots=True)
class _OpenBlock:
    """The block that samples are being added to."""

    first_sample: int
    offset: int
    size: int = 0
    samples: int = 0


_Job = tuple[bytes, list[int], list[int]]
"""A piece, where blocks end in it, and where samples begin or end in it."""


class _Digests:
    """SHA-256 of a shard and XXH3 of its blocks and samples, taken in a thread of their own while the next bytes are read.

    The thread begins with the second piece, so a small shard has none, and ends by itself with the object or after ``finish``.
    """

    _AHEAD = 4  # pieces that may wait: the memory they take is bounded, and reading is seldom held up

    def __init__(self) -> None:
        self._hashing = _Hashing()
        self._first: _Job | None = None
        self._jobs: queue.SimpleQueue[_Job | None] | None = None
        self._room = threading.Semaphore(self._AHEAD)

    def add(self, piece: bytes, ends: list[int], bounds: list[int]) -> None:
        """The next bytes of the shard; a block ends at each of the positions ``ends`` in them, a sample begins or ends at ``bounds``."""
        if self._jobs is None:
            if self._first is None:
                self._first = piece, ends, bounds
                return
            self._start()
        assert self._jobs is not None
        self._room.acquire()
        self._jobs.put((piece, ends, bounds))

    def finish(self) -> tuple[str, list[bytes], bytes]:
        """The shard's digest as hex, those of its blocks, and the content of the file with those of its samples."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._thread.join()
        elif self._first is not None:
            self._hashing.update(*self._first)
        return self._hashing.sha.hexdigest(), self._hashing.blocks, self._hashing.samples.to_bytes()

    def _start(self) -> None:
        assert self._first is not None
        self._jobs = queue.SimpleQueue()
        self._room.acquire()
        self._jobs.put(self._first)
        self._thread = threading.Thread(target=_hash, args=(self._jobs, self._hashing, self._room), name="stagekit-hash", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)


class _Hashing:
    def __init__(self) -> None:
        self.sha = hashlib.sha256()
        self.blocks: list[bytes] = []
        self.samples = SampleDigests()
        self._block = xxhash.xxh3_128()

    def update(self, piece: bytes, ends: list[int], bounds: list[int]) -> None:
        self.sha.update(piece)
        view = memoryview(piece)
        self.samples.update(view, bounds)
        begin = 0
        for end in ends:
            self._block.update(view[begin:end])
            self.blocks.append(self._block.digest())
            self._block = xxhash.xxh3_128()
            begin = end
        self._block.update(view[begin:])


def _hash(jobs: queue.SimpleQueue[_Job | None], hashing: _Hashing, room: threading.Semaphore) -> None:
    while (job := jobs.get()) is not None:
        hashing.update(*job)
        del job  # its memory is free before the wait for the next one
        room.release()


_name = operator.itemgetter(0)


_TWICE = "the key {!r} comes twice in a row, and its samples would be read as one; give each sample its own key"


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one field each, all of the same name, in order: ``keys[i]`` has the bytes ``payloads[i]``."""

    keys: Sequence[str]
    field: str
    payloads: Sequence[bytes]


class ShardBuilder:
    """A shard's bytes, made as its samples come, with everything that is known of them at the end.

    ::

        builder = ShardBuilder()
        for key, fields in samples:
            for piece in builder.sample(key, fields):
                send(piece)
        for piece in builder.finish():
            send(piece)
        builder.result.table.to_bytes()

    The pieces in order are the shard. Each but the last has exactly ``PIECE`` bytes, so a small sample yields nothing and a later one
    more. What a payload yields is copied before it is asked for more, so it may use its buffer again. Digests are taken in a thread
    beside; it does no I/O of its own. Each generator must be exhausted; after an exception the shard is lost and the builder refuses to
    go on.
    """

    PIECE = 4 * 2**20  # large enough that handing it to other threads costs nothing, small enough to stay in the processor's cache

    def __init__(self, *, block_size: int = BLOCK_SIZE) -> None:
        self._block_size = block_size
        self._digests = _Digests()
        self._pieces = Pieces(self.PIECE)
        self._yielded = 0
        self._ends: list[int] = []
        self._offset = 0
        self._offsets = array("Q")
        self._samples = 0  # once it is finished: then the last offset is the end of the last sample
        self._told = 0  # how many of the offsets were passed on with the bytes there
        self._blocks: list[_OpenBlock] = []
        self._block = _OpenBlock(0, 0)
        self._fields: dict[str, list[int]] = {}
        self._last_key: str | None = None
        self._broken = False
        self._result: BuiltShard | None = None

    @property
    def samples(self) -> int:
        """Samples so far."""
        return self._samples or len(self._offsets)

    @property
    def files(self) -> int:
        """Fields of all samples so far: the members of the tar."""
        return sum(samples for samples, _ in self._fields.values())

    @property
    def bytes(self) -> int:
        """Bytes of the shard if it were finished now."""
        return self._offset + len(END)

    def sample(self, key: str, fields: Iterable[tuple[str, int, Iterable[Data]]]) -> Iterator[Data]:
        """Add a sample: ``(field, size_bytes, pieces)`` for each field, in any order. Yields shard bytes that are ready.

        Payloads are taken one after the other, each when its turn comes. Raises ``KeyNotAllowed`` for a name or size that a shard cannot
        hold and ``DuplicateKey`` for a field or a key twice in a row, both before anything of the sample is written, and
        ``SourceError`` when a payload has not the size that was announced, before the next header.
        """
        self._go_on()
        ordered = sorted(fields, key=_name)
        headers: list[builtins.bytes] = []
        total = 0
        before: str | None = None
        for name, size, _ in ordered:
            if name == before:
                raise DuplicateKey(f"the sample {key!r} has the field {name!r} twice; leave one of them out")
            before = name
            headers.append(member_header(member_name(key, name), size))
            total += RECORD + size + -size % RECORD
        if not ordered:
            raise ShardError(f"the sample {key!r} has no field; a shard cannot hold it")
        if key == self._last_key:
            raise DuplicateKey(_TWICE.format(key))
        self._last_key = key
        self._broken = True
        block = self._block
        if block.size and block.size + total > self._block_size:
            self._close_block()
            block = self._block
        self._offsets.append(self._offset)
        self._offset += total
        block.size += total
        block.samples += 1
        add = self._pieces.add
        for head, (name, size, pieces) in zip(headers, ordered, strict=True):
            add(head)
            left = size
            for piece in pieces:
                left -= piece.nbytes if isinstance(piece, memoryview) else len(piece)
                if left < 0:
                    break
                if add(piece):
                    yield from self._full()
            if left:
                raise SourceError(
                    f"the field {name!r} of the sample {key!r} was announced with {size} bytes and has "
                    f"{'more' if left < 0 else f'only {size - left}'}: it changed while it was read. Try again when nothing writes to it"
                )
            add(padding(size))
            totals = self._fields.get(name) or self._fields.setdefault(name, [0, 0])
            totals[0] += 1
            totals[1] += size
        if len(self._pieces) >= self.PIECE:
            yield from self._full()
        self._broken = False

    def batch(self, batch: Batch) -> Iterator[Data]:
        """``sample`` for each of a batch, the same bytes in a fraction of the time. Raises before anything of the batch is written."""
        self._go_on()
        keys, payloads = batch.keys, batch.payloads
        names = member_names(keys, batch.field)
        for before, key in pairwise((self._last_key, *keys)):
            if before == key:
                raise DuplicateKey(_TWICE.format(key))
        sizes = list(map(len, payloads))
        headers = member_headers(names, sizes)
        self._last_key = keys[-1] if keys else self._last_key
        self._broken = True
        started = self._offset
        offsets, offset, begin, limit = self._offsets, started, self._block.offset, self._block_size
        parts: list[builtins.bytes] = []
        at = 0
        for payload, size in zip(payloads, sizes, strict=True):
            end = offset + RECORD + size + -size % RECORD
            if end - begin > limit and offset > begin:
                self._fill_block(offset)
                self._close_block()
                begin = offset
            offsets.append(offset)
            offset = end
            parts += (headers[at : at + RECORD], payload, padding(size))
            at += RECORD
        self._fill_block(offset)
        totals = self._fields.setdefault(batch.field, [0, 0])
        totals[0] += len(sizes)
        totals[1] += sum(sizes)
        if self._pieces.add_all(parts, offset - started):
            yield from self._full()
        self._broken = False

    def finish(self) -> Iterator[Data]:
        """End the shard: yields what is left and the end blocks. ``result`` is there afterwards.

        Raises ``ShardError`` when it has no sample.
        """
        self._go_on()
        if not self._offsets:
            raise ShardError("a shard without a sample cannot be finished")
        self._broken = True
        self._close_block()
        self._samples = len(self._offsets)
        self._offsets.append(self._offset)
        if self._pieces.add(END):
            yield from self._full()
        if len(self._pieces):
            yield self._hashed(self._pieces.rest())
        sha256, digests, sample_digests = self._digests.finish()
        self._result = BuiltShard(
            bytes=self._offset + len(END),
            samples=self._samples,
            sha256=sha256,
            table=BlockTable(
                tuple(
                    Block(block.first_sample, block.offset, block.size, block.samples, digest)
                    for block, digest in zip(self._blocks, digests, strict=True)
                )
            ),
            index=index_to_bytes(self._offsets),
            fields={name: FieldTotals(*self._fields[name]) for name in sorted(self._fields)},
            sample_digests=sample_digests,
        )

    @property
    def result(self) -> BuiltShard:
        """What became of it. ``ShardError`` before ``finish`` was exhausted."""
        if self._result is None:
            raise ShardError("the shard is not finished")
        return self._result

    def _go_on(self) -> None:
        if self._broken or self._result is not None:
            raise ShardError("this shard is finished, or one of its samples failed; start a new one")

    def _fill_block(self, offset: int) -> None:
        """The shard ends at ``offset`` now, and all samples since the open block's first belong to it."""
        self._offset = offset
        self._block.size = offset - self._block.offset
        self._block.samples = len(self._offsets) - self._block.first_sample

    def _close_block(self) -> None:
        self._blocks.append(self._block)
        self._ends.append(self._offset)
        self._block = _OpenBlock(len(self._offsets), self._offset)

    def _full(self) -> Iterator[Data]:
        for piece in self._pieces.full():
            yield self._hashed(piece)

    def _hashed(self, piece: builtins.bytes) -> Data:
        begin, self._yielded = self._yielded, self._yielded + len(piece)
        reached = bisect.bisect_right(self._ends, self._yielded)
        # An offset at the very end of the bytes comes with the next ones: the sample that begins there may not have come yet.
        passed = bisect.bisect_left(self._offsets, self._yielded, self._told)
        bounds = [offset - begin for offset in self._offsets[self._told : passed]]
        self._told = passed
        self._digests.add(piece, [end - begin for end in self._ends[:reached]], bounds)
        del self._ends[:reached]
        return piece
