"""Tar archives: USTAR when writing, anything WebDataset users have when reading, and strict in both.

``docs/format.md`` section 3 is the specification. There are three readers for three jobs, with one grammar:

- ``samples`` takes a block that was compared with its digest, and is the hot path of training (with ``grid`` for many small members),
- ``members`` takes the same and tells where everything lies,
- ``ArchiveReader`` takes a whole archive as a stream, in constant memory, and also checks how it ends.

Python's ``tarfile`` is not used: in stream mode it ends without an error on an archive cut between members, on a flipped bit in a
later header, and after the first of two archives in one file.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from ..errors import CorruptShard, DuplicateKey, KeyNotAllowed
from .sample import NAME_BYTES, check_member, cut_name, is_meta, split_name

Data = bytes | bytearray | memoryview

RECORD = 512
END = bytes(2 * RECORD)
LARGEST_MEMBER = 8**11 - 1
LARGEST_EXTENSION = 2**20

_ZEROS = bytes(RECORD)
_PADDINGS = tuple(bytes(size) for size in range(RECORD))
_OWNER = b"0000644\0" + b"0000000\0" * 2
_MTIME = b"00000000000\0"
# Everything behind the checksum of a header whose name needs no prefix: type, link name, magic, version, owners, devices, prefix.
_TAIL = b"0" + bytes(100) + b"ustar\x0000" + bytes(247)
# What the tail and a blank checksum field add to the checksum.
_TAIL_SUM = sum(_TAIL) + 8 * 0x20
_USTAR = b"ustar\x0000"
_GNU = b"ustar  \0"

Kind = Literal["file", "directory", "hard link", "symbolic link", "device", "fifo", "sparse file", "other"]
_KINDS: dict[bytes, Kind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hard link",
    b"2": "symbolic link",
    b"3": "device",
    b"4": "device",
    b"5": "directory",
    b"6": "fifo",
    b"S": "sparse file",
    b"D": "other",
    b"V": "other",
}

# What PAX headers say of every other member, and what is no business of ours.
_IGNORED = frozenset({b"mtime", b"atime", b"ctime", b"uid", b"gid", b"uname", b"gname"})

_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def padding(size: int) -> bytes:
    """The NULs behind a payload of ``size`` bytes."""
    return _PADDINGS[-size % RECORD]


def member_bytes(name: str, size: int) -> int:
    """Bytes that a member takes in a shard: header, payload, padding. Raises like ``header``."""
    check_member(name)
    _check_size(name, size)
    return RECORD + size + -size % RECORD


def header(name: str, size: int) -> bytes:
    """The 512 bytes in front of a payload of ``size`` bytes.

    Raises ``KeyNotAllowed`` for a name that ``check_member`` refuses and for a payload of 8 GiB or more, showing the name.
    """
    check_member(name)
    return member_header(name, size)


def member_header(name: str, size: int) -> bytes:
    """``header`` for a name that was checked already."""
    _check_size(name, size)
    encoded = name.encode()
    tail, rest = _TAIL, _TAIL_SUM
    if len(encoded) > NAME_BYTES:
        parts = cut_name(encoded)
        if parts is None:
            raise KeyNotAllowed(f"a shard cannot hold {name!r}: USTAR has no room for {len(encoded)} bytes. Rename it, or leave it out")
        prefix, encoded = parts
        tail = _TAIL[:189] + prefix.ljust(155, b"\0") + bytes(12)
        rest += sum(prefix)
    front = b"%b%b%011o\0%b" % (encoded.ljust(NAME_BYTES, b"\0"), _OWNER, size, _MTIME)
    # The low half of an Adler-32 is 1 + the sum of the bytes modulo 65,521, which 148 bytes never reach.
    return b"%b%06o\0 %b" % (front, (zlib.adler32(front) & 0xFFFF) - 1 + rest, tail)


def member_headers(names: Sequence[str], sizes: Sequence[int]) -> bytes:
    """The headers of many members in one text, for names that were checked already: several times faster than one by one."""
    encoded = [name.encode() for name in names]
    if max(map(len, encoded), default=0) > NAME_BYTES or max(sizes, default=0) > LARGEST_MEMBER:
        return b"".join(map(member_header, names, sizes))
    headers = np.empty((len(names), RECORD), np.uint8)
    headers[:] = np.frombuffer(bytes(NAME_BYTES) + _OWNER + bytes(12) + _MTIME + b" " * 8 + _TAIL, np.uint8)
    headers[:, :NAME_BYTES] = np.array(encoded, f"S{NAME_BYTES}").view(np.uint8).reshape(-1, NAME_BYTES)
    headers[:, 124:135] = (np.array(sizes, np.int64)[:, None] >> _OCTAL[11]) % 8 + ord("0")
    headers[:, 148:156] = (0, 0, 0, 0, 0, 0, 0, ord(" "))
    # The blank checksum field counts as eight spaces, and one of them is there.
    sums = headers.sum(axis=1, dtype=np.int64) + 7 * ord(" ")
    headers[:, 148:154] = (sums[:, None] >> _OCTAL[6]) % 8 + ord("0")
    return headers.tobytes()


# How far to shift a number for each of its octal digits.
_OCTAL = {digits: 3 * np.arange(digits - 1, -1, -1) for digits in (6, 11)}


def _check_size(name: str, size: int) -> None:
    if size > LARGEST_MEMBER:
        raise KeyNotAllowed(
            f"a shard cannot hold {name!r}: it has {size:,} bytes, and a USTAR member ends at 8 GiB. Split it, or leave it out"
        )
    if size < 0:
        raise ValueError(f"{name!r}: a size of {size} bytes")


def _sum(data: bytes) -> int:
    """The sum of up to 512 bytes: the low half of an Adler-32 is 1 + that sum modulo 65,521, which 512 × 127 (ASCII) never reaches."""
    return (zlib.adler32(data) & 0xFFFF) - 1 if data.isascii() else sum(data)


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file in an archive. ``offset`` is where its first header starts, ``data_offset`` where its ``size`` bytes start."""

    name: str
    offset: int
    size: int
    data_offset: int

    @property
    def end(self) -> int:
        """Where the next header starts."""
        return self.data_offset + self.size + -self.size % RECORD


def corrupt(source: str, offset: int, expected: str, found: str) -> CorruptShard:
    """The error for ``source`` being something else at ``offset``."""
    return CorruptShard(
        f"{source} is damaged at offset {offset}: expected {expected}, found {found}. "
        "Fetch it again; if it stays so, publish this shard again from its source"
    )


class _Cursor(Protocol):
    """A position in an archive that only moves forward."""

    source: str

    @property
    def offset(self) -> int: ...

    def read(self, size: int, expected: str) -> bytes:
        """Exactly ``size`` bytes (at most ``LARGEST_EXTENSION`` + padding), or ``CorruptShard``."""

    def skip(self, size: int, expected: str) -> None: ...


@dataclass(slots=True)
class _Entry:
    """One member with its extended headers read; the cursor is where its payload starts."""

    name: bytes
    kind: Kind
    size: int
    offset: int


def _number(field: bytes, source: str, offset: int, what: str) -> int:
    """A tar number: octal digits, padded by blanks in front, ended by NULs and blanks; or base 256 when the first bit is set."""
    if field[0] & 0x80:
        negative = bool(field[0] & 0x40)
        value = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        if negative:
            raise corrupt(source, offset, f"a {what} of zero or more", "a negative one")
        if value >= 2**63:
            raise corrupt(source, offset, f"a {what} below 2^63", f"{value}")
        return value
    digits = field.lstrip(b" ").rstrip(b" \0")
    if not digits:
        return 0
    if not digits.isdigit() or b"8" in digits or b"9" in digits:
        raise corrupt(source, offset, f"a {what} in octal", repr(field))
    return int(digits, 8)


def _check_header(head: bytes, source: str, offset: int) -> None:
    """Refuse ``head`` unless its checksum and its magic are right."""
    magic = head[257:265]
    if offset == 0 and magic not in (_USTAR, _GNU):
        for start, kind in _COMPRESSED.items():
            if head.startswith(start):
                raise corrupt(
                    source, 0, "a tar, which can be read by ranges", f"one compressed with {kind}, which cannot; decompress it first"
                )
    stored = _number(head[148:156], source, offset + 148, "header checksum")
    counted = _sum(head) - sum(head[148:156]) + 8 * 0x20
    if stored != counted:
        if head == _ZEROS:
            raise corrupt(source, offset, "a member's header", "512 NUL bytes (an end block)")
        raise corrupt(source, offset, f"a header whose bytes add up to its checksum {stored}", f"a sum of {counted}")
    if magic not in (_USTAR, _GNU):
        raise corrupt(source, offset + 257, "the magic of a USTAR or GNU header", repr(magic))


def _entry(cursor: _Cursor, head: bytes, first: int) -> _Entry:
    """The member whose first header is ``head``, read by ``cursor`` at offset ``first``."""
    source = cursor.source
    long_name: bytes | None = None
    extended: dict[bytes, bytes] = {}
    offset = first
    while True:
        _check_header(head, source, offset)
        kind = head[156:157]
        size = _number(head[124:136], source, offset + 124, "size")
        if kind in b"xgXLK":
            data = _extension(cursor, size, offset)
            if kind == b"L":
                long_name = data.rstrip(b"\0")
            elif kind in b"xX":
                extended = _pax_records(data, source, offset + RECORD)
            elif kind == b"g":
                unwanted = sorted({b"path", b"size"} & _pax_records(data, source, offset + RECORD).keys())
                if unwanted:
                    raise corrupt(source, offset, "a global header that names no member", f"one that sets {unwanted[0].decode()!r}")
            offset = cursor.offset
            head = cursor.read(RECORD, "the header that an extended header announces")
            if long_name is None and extended.keys() <= _IGNORED and (plain := _plain_entry(head, first)):
                return plain
            continue
        break
    found = _KINDS.get(kind)
    if found is None:
        raise corrupt(source, offset + 156, "a known member type", repr(kind))
    if b"size" in extended:
        size = _pax_size(extended[b"size"], source, offset)
    if b"path" in extended:
        name = extended[b"path"]
    elif long_name is not None:
        name = long_name
    else:
        name = head[:100].partition(b"\0")[0]
        prefix = head[345:500].partition(b"\0")[0] if head[257:265] == _USTAR else b""
        if prefix:
            name = prefix + b"/" + name
    if not name:
        raise corrupt(source, offset, "a member's name", "an empty one")
    if any(record.startswith(b"GNU.sparse.") for record in extended):
        found = "sparse file"
    elif found == "file" and name.endswith(b"/"):
        found = "directory"  # archives older than USTAR's directory type
    if kind == b"S" and head[482]:
        # GNU continues a long list of holes in extra records that the size does not count.
        while cursor.read(RECORD, "a sparse file's next list of holes")[504]:
            pass
    if found not in ("file", "sparse file", "other"):
        size = 0  # links, devices and directories have no payload, whatever their size says
    return _Entry(name, found, size, first)


def _plain_entry(head: bytes, first: int) -> _Entry | None:
    """The member whose header is ``head``, when ``samples`` would take it for a plain one; ``None`` sends it to the full grammar."""
    size = _plain_size(head)
    name = head[:100].partition(b"\0")[0]
    return None if size < 0 or not name or name.endswith(b"/") else _Entry(name, "file", size, first)


def _extension(cursor: _Cursor, size: int, offset: int) -> bytes:
    # Checked before anything is read: a forged length must not make us allocate.
    if size > LARGEST_EXTENSION:
        raise corrupt(cursor.source, offset, f"an extended header of at most {LARGEST_EXTENSION} bytes", f"{size} bytes")
    data = cursor.read(size, "an extended header's bytes")
    _check_padding(cursor.read(-size % RECORD, "an extended header's padding"), cursor.source, offset + RECORD + size)
    return data


def _check_padding(data: Data, source: str, offset: int) -> None:
    if data != _ZEROS[: len(data)]:
        raise corrupt(source, offset, "NUL bytes up to the next record", "other bytes")


def _pax_records(data: bytes, source: str, offset: int) -> dict[bytes, bytes]:
    """``length key=value\\n`` records, where the length counts the whole record."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        blank = data.find(b" ", at, at + 20)
        digits = data[at:blank] if blank > 0 else b""
        end = at + int(digits) if digits.isdigit() else -1
        if not blank < end <= len(data) or data[end - 1 : end] != b"\n":
            raise corrupt(source, offset + at, "an extended header's record 'length key=value'", repr(data[at : at + 30]))
        key, equals, value = data[blank + 1 : end - 1].partition(b"=")
        if not equals:
            raise corrupt(source, offset + at, "an extended header's record 'length key=value'", repr(data[at : at + 30]))
        records[key] = value
        at = end
    return records


def _pax_size(value: bytes, source: str, offset: int) -> int:
    if not value.isdigit() or len(value) > 19 or int(value) >= 2**63:
        raise corrupt(source, offset, "a size below 2^63 in the extended header", repr(value[:30]))
    return int(value)


def _text(name: bytes, source: str, offset: int, whole: bytes = b"") -> str:
    """``name`` as text. ``whole`` is the member's name where ``name`` is only a part of it."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        shown = (whole or name).decode(errors="backslashreplace")
        raise KeyNotAllowed(
            f"{source} holds a member at offset {offset} whose name is not UTF-8: {shown!r}. Pack it again under another name"
        ) from None
    if "\0" in text:
        raise corrupt(source, offset, "a name without NUL bytes", repr(text))
    return text


class _BufferCursor:
    """A cursor over bytes in memory. ``base`` is where they lie in their shard, for messages."""

    __slots__ = ("_at", "_base", "_data", "source")

    def __init__(self, data: Data, at: int, source: str, base: int) -> None:
        self._data = data
        self._at = at
        self._base = base
        self.source = source

    @property
    def offset(self) -> int:
        return self._at + self._base

    def read(self, size: int, expected: str) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise corrupt(self.source, self.offset, expected, f"the end of the data after {len(self._data) - self._at} of {size} bytes")
        found = bytes(self._data[self._at : end])
        self._at = end
        return found

    def skip(self, size: int, expected: str) -> None:
        end = self._at + size
        if end > len(self._data):
            raise corrupt(self.source, self.offset, expected, f"the end of the data after {len(self._data) - self._at} of {size} bytes")
        self._at = end

    def pass_payload(self, entry: _Entry) -> None:
        """Pass over the payload and its padding, and check the latter."""
        self.skip(entry.size, f"the {entry.size} bytes of {entry.name!r}")
        offset = self.offset
        _check_padding(self.read(-entry.size % RECORD, "the padding behind a member"), self.source, offset)


def members(buffer: Data, *, source: str, base: int = 0) -> Iterator[Member]:
    """The regular files in ``buffer``, which holds whole members and nothing else (a block), in order.

    Offsets are those of the shard: ``base`` is where the buffer lies in it. Members of another kind are passed over; whoever indexed
    the shard reported them. Raises ``CorruptShard`` naming ``source``, the offset, what was expected and what was found.
    """
    data = _flat(buffer)
    end = len(data)
    at = 0
    while at < end:
        cursor = _BufferCursor(data, at, source, base)
        entry = _entry(cursor, cursor.read(RECORD, "a member's header"), at + base)
        data_offset = cursor.offset
        cursor.pass_payload(entry)
        at = cursor.offset - base
        if entry.kind == "file":
            yield Member(_text(entry.name, source, entry.offset), entry.offset, entry.size, data_offset)


def samples(buffer: Data, *, source: str, base: int = 0) -> Iterator[dict[str, Any]]:
    """The samples in ``buffer``, which holds whole samples and nothing else (a block): ``{"__key__": key, field: bytes, …}``.

    Each field is copied once, so that a sample stays valid when the buffer is reused. Raises ``CorruptShard`` like ``members``, and
    ``DuplicateKey`` when a sample has a field twice. The samples in front of the damage are yielded first; a buffer that was compared
    with its digest has none.
    """
    data = memoryview(buffer).cast("B")
    end = len(data)
    at = 0
    current = b""
    sample: dict[str, Any] = {}
    fields, sums, sizes, tails, paddings, adler32, unpack = _fields, _sums, _sizes, _tails, _PADDINGS, zlib.adler32, _HOT.unpack_from
    while at < end:
        # A plain member: size and checksum are octal, the bytes add up, and everything behind the checksum is what this package writes,
        # or was seen before and is that of a regular file without a prefix (other writers repeat their owners' names there). A PAX header
        # with nothing but a time may stand before it. Whatever differs in any way goes to the full grammar, which accepts it or says what
        # is wrong.
        start = at + 512
        if start <= end:
            head, tail = unpack(data, at)
            known = sizes.get(head[124:136])
            size = _learn_size(head[124:136]) if known is None else known
            known = sums.get(head[148:])
            total = _learn_sum(head[148:]) if known is None else known
            if tail != _TAIL:
                known = tails.get(tail)
                total -= _learn_tail(tail) if known is None else known
            # 156 bytes never add up to 65,521, so the low half of the Adler-32 is the exact sum.
            plain = adler32(head) & 0xFFFF == total and size >= 0
            if not plain and tail[0] == 0x78:
                behind = _behind_time(data, head, tail, at, end)
                if behind:
                    head = bytes(data[behind : behind + 512])
                    start, size = behind + 512, _plain_size(head)
                    plain = size >= 0
        else:
            plain, size = False, 0
        if plain:
            stop = start + size
            following = stop + (at - stop & 511)
            if following > end:
                raise corrupt(source, base + start, f"{following - start} bytes of a member and its padding", f"{end - start} bytes")
            if following > stop and data[stop:following].tobytes() != paddings[following - stop]:
                raise corrupt(source, base + stop, "NUL bytes up to the next record", "other bytes")
            length = head.find(0, 0, 100)
            name = head[:length] if length >= 0 else head[:100]
        else:
            cursor = _BufferCursor(data, at, source, base)
            entry = _entry(cursor, cursor.read(RECORD, "a member's header"), at + base)
            start = cursor.offset - base
            stop = start + entry.size
            cursor.pass_payload(entry)
            following = cursor.offset - base
            name = entry.name if entry.kind == "file" else b"/"  # which is part of no sample
        dot = name.find(b".")
        key = name[:dot]
        # Fields hold no slash, so a dot in a directory's name finds none here.
        field = fields.get(name[dot + 1 :])
        if field is None or dot <= 0 or name[dot - 1] == 0x2F or name[0] == 0x5F:
            named = _named(name, source, base + at)
            if named is None:
                at = following
                continue
            text, field = named
            key = text.encode()
        else:
            text = ""
        if key != current:
            if sample:
                yield sample
            current = key
            sample = {"__key__": text or _text(key, source, base + at, name)}
        elif field in sample:
            raise DuplicateKey(
                f"{source} holds the field {field!r} of the sample {sample['__key__']!r} twice, the second time at offset {base + at}; "
                "publish it again with one of them"
            )
        sample[field] = data[start:stop].tobytes()
        at = following
    if sample:
        yield sample


def _plain_size(head: bytes) -> int:
    """The size in a header that ``samples`` takes for a plain one; -1 for any other."""
    field, tail = head[148:156], head[156:]
    total = _sums.get(field)
    if total is None:
        total = _learn_sum(field)
    if tail != _TAIL:
        extra = _tails.get(tail)
        total -= _learn_tail(tail) if extra is None else extra
    if zlib.adler32(head[:156]) & 0xFFFF != total:
        return -1
    size = _sizes.get(head[124:136])
    return _learn_size(head[124:136]) if size is None else size


def _behind_time(data: bytes | memoryview, head: bytes, tail: bytes, at: int, end: int) -> int:
    """Where the next header starts, when ``head`` and ``tail`` are a PAX header that says nothing but a time; 0 for any other.

    Python's ``tarfile`` writes one for each member whose time is no whole number, and with it ``webdataset.TarWriter`` always does.
    """
    size = _sizes.get(head[124:136])
    if size is None:
        size = _learn_size(head[124:136])
    start = at + 512
    behind = start + 512
    if not 0 < size <= 512 or behind + 512 > end:
        return 0
    total = _sums.get(head[148:])
    if total is None:
        total = _learn_sum(head[148:])
    extra = _time_tails.get(tail)
    if extra is None:
        extra = sum(tail) - sum(_TAIL) if tail[101:109] == _USTAR else _NEVER
        if len(_time_tails) < _CACHE:
            _time_tails[tail] = extra
    if zlib.adler32(head) & 0xFFFF != total - extra:
        return 0
    body = bytes(data[start:behind])
    record = _TIME.match(body)
    if record is None or record.end() != size or int(record[1]) != size or body[size:] != _PADDINGS[512 - size]:
        return 0
    return behind


# Header up to the type, and the rest.
_HOT = struct.Struct("156s356s")
# What was parsed before, and what came of it: extensions to fields, size fields to sizes, checksum fields to the low half of the Adler-32
# of a header's first 156 bytes when ``_TAIL`` follows, other tails to what they add to that. Full caches are not emptied: what is not in
# them is parsed again.
_fields: dict[bytes, str] = {}
_sizes: dict[bytes, int] = {}
_sums: dict[bytes, int] = {}
_tails: dict[bytes, int] = {}
_time_tails: dict[bytes, int] = {}  # of PAX headers
_CACHE = 16384
_TIME = re.compile(rb"([0-9]{1,3}) mtime=[0-9.]+\n")
_NEVER = 1 << 40  # no sum of a header's bytes gets near it


def _learn_size(field: bytes) -> int:
    """The size in a size field of 11 octal digits and NUL; -1 for another form."""
    return _learn(_sizes, field, field[:11], b"\0", 0)


def _learn_sum(field: bytes) -> int:
    """The low half of the Adler-32 that belongs to a checksum field of 6 octal digits, NUL, blank; one that none has for another form."""
    return _learn(_sums, field, field[:6], b"\0 ", 1 - 8 * 0x20 + sum(field) - sum(_TAIL), -_NEVER)


def _learn_tail(tail: bytes) -> int:
    """What the bytes behind the checksum add up to beyond ``_TAIL``; ``_NEVER`` when they are not those of a plain regular file."""
    magic = tail[101:109]
    plain = tail[:1] in (b"0", b"\0", b"7") and (magic == _GNU or (magic == _USTAR and not tail[189]))
    extra = sum(tail) - sum(_TAIL) if plain else _NEVER
    if len(_tails) < _CACHE:
        _tails[tail] = extra
    return extra


def plain_tail(tail: bytes) -> int | None:
    """The sum of a header's bytes from the type on, when they are those of a regular file without a prefix; else ``None``."""
    extra = _tails.get(tail)
    if extra is None:
        extra = _learn_tail(tail)
    return None if extra == _NEVER else extra + sum(_TAIL)


def _learn(cache: dict[bytes, int], field: bytes, digits: bytes, end: bytes, add: int, otherwise: int = -1) -> int:
    if field[len(digits) :] != end or not digits.isdigit() or b"8" in digits or b"9" in digits:
        return otherwise
    value = int(digits, 8) + add
    if len(cache) < _CACHE:
        cache[field] = value
    return value


def _named(name: bytes, source: str, offset: int) -> tuple[str, str] | None:
    """Key and field of a member's name, or ``None`` for a member that is part of no sample."""
    if not name:
        raise corrupt(source, offset, "a member's name", "an empty one")
    text = _text(name, source, offset)
    parts = split_name(text)
    if parts is None or is_meta(text):
        return None
    key, field = parts
    if field.startswith("__"):
        raise KeyNotAllowed(
            f"{source} holds {text!r} at offset {offset}: {field!r} is a name of the sample itself. Pack it again under another name"
        )
    if len(_fields) < _CACHE:
        _fields[name[len(key.encode()) + 1 :]] = field
    return parts


def _flat(buffer: Data) -> bytes | memoryview:
    return buffer if isinstance(buffer, bytes) else memoryview(buffer).cast("B")


class ArchiveReader:
    """A whole archive as a stream: ``for member, payload in ArchiveReader(chunks, source=…)``, in constant memory.

    ``chunks`` are the archive's bytes in order, cut anywhere. ``payload`` yields the member's bytes in pieces; what is left of it when
    the next member is asked for is passed over. A piece may be a view of a chunk. When the iteration ends normally, every header and
    all padding was right, the two end blocks were there, and nothing but NULs came behind them. Anything else raises ``CorruptShard``
    naming ``source``, the offset, what was expected and what was found.

    PAX headers and GNU's long names are understood. Members that are no regular files are not yielded but counted: ``skipped`` has
    their number by kind, ``skipped_names`` the first name of each kind.

    ``end`` is where the last member ends that was read to its end, ``reach`` where the one ends whose headers were read last, and
    ``offset`` how far the archive was read; ``ended`` is true once its end blocks have begun. ``on_bytes`` gets every byte of the archive
    in order: a member's headers before it is yielded, its payload as it is read or passed over.
    """

    def __init__(self, chunks: Iterable[Data], *, source: str, on_bytes: Callable[[Data], object] | None = None) -> None:
        self._cursor = _StreamCursor(chunks, source, on_bytes)
        self.skipped: Counter[Kind] = Counter()
        self.skipped_names: dict[Kind, str] = {}
        self.end = 0
        self.reach = 0
        self.ended = False

    @property
    def offset(self) -> int:
        return self._cursor.offset

    def __iter__(self) -> Iterator[tuple[Member, Iterator[Data]]]:
        cursor = self._cursor
        source = cursor.source
        while True:
            first = cursor.offset
            head = cursor.read(RECORD, "a member's header or the first of two end blocks")
            if head == _ZEROS:
                self.ended = True
                break
            entry = _plain_entry(head, first) or _entry(cursor, head, first)
            self.reach = cursor.offset + entry.size + -entry.size % RECORD
            if entry.kind == "file":
                payload = cursor.pieces(entry.size, f"the {entry.size} bytes of {entry.name!r}")
                yield Member(_text(entry.name, source, first), first, entry.size, cursor.offset), payload
                for _ in payload:
                    pass
            else:
                self.skipped[entry.kind] += 1
                self.skipped_names.setdefault(entry.kind, entry.name.decode(errors="backslashreplace"))
                cursor.skip(entry.size, f"the {entry.size} bytes of {entry.name!r}")
            at = cursor.offset
            if entry.size % RECORD:
                _check_padding(cursor.read(-entry.size % RECORD, "the padding behind a member"), source, at)
            self.end = cursor.offset
        at = cursor.offset
        if cursor.read(RECORD, "the second of two end blocks") != _ZEROS:
            raise corrupt(source, at, "the second of two end blocks", "other bytes")
        cursor.expect_nothing()


class _StreamCursor:
    """A cursor over chunks as they come."""

    def __init__(self, chunks: Iterable[Data], source: str, on_bytes: Callable[[Data], object] | None) -> None:
        self._chunks = iter(chunks)
        self._chunk = memoryview(b"")
        self._on_bytes = on_bytes
        self.source = source
        self._offset = 0

    @property
    def offset(self) -> int:
        return self._offset

    def pieces(self, size: int, expected: str) -> Iterator[Data]:
        start = self._offset
        left = size
        while left:
            if not self._chunk and not self._next_chunk():
                raise corrupt(self.source, start, expected, f"the end of the data after {size - left} of {size} bytes")
            piece = self._chunk[:left]
            self._chunk = self._chunk[left:]
            left -= len(piece)
            self._offset += len(piece)
            if self._on_bytes is not None:
                self._on_bytes(piece)
            yield piece

    def read(self, size: int, expected: str) -> bytes:
        if self._on_bytes is None and size <= len(self._chunk):
            found = bytes(self._chunk[:size])
            self._chunk = self._chunk[size:]
            self._offset += size
            return found
        return b"".join(self.pieces(size, expected))

    def skip(self, size: int, expected: str) -> None:
        for _ in self.pieces(size, expected):
            pass

    def expect_nothing(self) -> None:
        """Read to the end and refuse anything but NULs."""
        while self._chunk or self._next_chunk():
            piece, self._chunk = self._chunk, memoryview(b"")
            data = bytes(piece)
            if data.count(0) != len(data):
                offset = self.offset + len(data) - len(data.lstrip(b"\0"))
                raise corrupt(self.source, offset, "nothing behind the end blocks", "more data (an archive that was appended?)")
            self._offset += len(data)
            if self._on_bytes is not None:
                self._on_bytes(data)

    def _next_chunk(self) -> bool:
        for chunk in self._chunks:
            self._chunk = memoryview(chunk).cast("B")
            if self._chunk:
                return True
        return False
