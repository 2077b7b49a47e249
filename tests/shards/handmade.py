"""Tar bytes put together from docs/format.md alone, without the package: what the code is compared with."""

from __future__ import annotations

import hashlib
import json
import struct

import xxhash

END = b"\0" * 1024


def header(
    name: bytes,
    size: int | bytes,
    *,
    prefix: bytes = b"",
    kind: bytes = b"0",
    magic: bytes = b"ustar\x0000",
    link: bytes = b"",
    checksum: bytes | None = None,
    mode: bytes = b"0000644\0",
    last: bytes = b"",
) -> bytes:
    """One 512-byte header; every part can be forged, and the checksum fits unless it is given."""
    digits = size if isinstance(size, bytes) else b"%011o\0" % size
    parts = [
        name.ljust(100, b"\0"),
        mode,
        b"0000000\0",
        b"0000000\0",
        digits,
        b"00000000000\0",
        b"        ",
        kind,
        link.ljust(100, b"\0"),
        magic,
        b"\0" * 32,
        b"\0" * 32,
        b"\0" * 8,
        b"\0" * 8,
        prefix.ljust(155, b"\0"),
        last.ljust(12, b"\0"),
    ]
    whole = b"".join(parts)
    assert len(whole) == 512
    parts[6] = b"%06o\0 " % sum(whole) if checksum is None else checksum
    return b"".join(parts)


def pad(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 512)


def member(name: bytes, data: bytes = b"", **forged: object) -> bytes:
    return header(name, len(data), **forged) + pad(data)  # type: ignore[arg-type]


def pax(records: bytes, kind: bytes = b"x") -> bytes:
    return member(b"PaxHeader/x", records, kind=kind)


def pax_record(key: bytes, value: bytes) -> bytes:
    length = len(key) + len(value) + 3
    while len(b"%d" % length) + len(key) + len(value) + 3 != length:
        length += 1
    return b"%d %s=%s\n" % (length, key, value)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def block_table(blocks: list[tuple[int, int, int, int, bytes]]) -> bytes:
    body = b"SKBLOCKS" + struct.pack("<II", 1, len(blocks))
    for first, offset, size, samples, data in blocks:
        body += struct.pack("<QQQQ", first, offset, size, samples) + xxhash.xxh3_128(data).digest()
    return body + xxhash.xxh3_128(body).digest()


def canonical(value: object) -> bytes:
    return (json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True) + "\n").encode()


def manifest(value: dict[str, object]) -> bytes:
    """``manifest.json`` of these values, with the checksum they need."""
    blank = canonical({**value, "checksum": "0" * 64})
    assert blank.count(b"0" * 64) == 1
    return blank.replace(b"0" * 64, sha256(blank).encode())
