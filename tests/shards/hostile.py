"""Damaged and forged archives, each with the error it must raise. Offsets are those the message must name."""

from __future__ import annotations

import gzip
from dataclasses import dataclass

from stagekit.errors import CorruptShard, KeyNotAllowed, ShardError

from .handmade import END, header, member, pax, pax_record

FIRST = member(b"a.cls", b"3")
SECOND = member(b"a.txt", b"x" * 700)
THIRD = member(b"b.cls", b"4")
GOOD = FIRST + SECOND + THIRD


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


@dataclass(frozen=True)
class Hostile:
    """``body`` has no end blocks (they are added for the stream reader) unless ``whole``: then it is only
    for that one. ``block`` cases are only for the block readers."""

    what: str
    body: bytes
    offset: int
    words: str
    error: type[ShardError] = CorruptShard
    whole: bool = False
    block: bool = False


def _sized(size: bytes, **forged: bytes) -> bytes:
    return FIRST + header(b"b.bin", size, **forged) + bytes(512)


CASES = [
    # cut
    Hostile("cut in a header", GOOD[: 1024 + 100], 1024, "found the end of the data after 100 of 512 bytes", whole=True),
    Hostile(
        "cut behind a header", GOOD[: 1024 + 512], 1536, "expected the 700 bytes of b'a.txt', found the end of the data after 0", whole=True
    ),
    Hostile(
        "cut in a payload",
        GOOD[: 1024 + 800],
        1536,
        "expected the 700 bytes of b'a.txt', found the end of the data after 288 of 700",
        whole=True,
    ),
    Hostile(
        "cut in padding",
        GOOD[: 1024 + 512 + 800],
        2236,
        "expected the padding behind a member, found the end of the data after 100 of 324",
        whole=True,
    ),
    Hostile(
        "cut between members", GOOD[:1024], 1024, "a member's header or the first of two end blocks, found the end of the data", whole=True
    ),
    Hostile("cut before the end blocks", GOOD, len(GOOD), "the first of two end blocks, found the end of the data", whole=True),
    Hostile(
        "cut between the end blocks", GOOD + bytes(512), len(GOOD) + 512, "expected the second of two end blocks, found the end", whole=True
    ),
    Hostile("cut in the second end block", GOOD + bytes(1000), len(GOOD) + 512, "found the end of the data after 488 of 512", whole=True),
    Hostile("nothing", b"", 0, "a member's header or the first of two end blocks, found the end of the data", whole=True),
    # joined
    Hostile(
        "one end block, then members",
        FIRST + bytes(512) + THIRD + END,
        1536,
        "expected the second of two end blocks, found other",
        whole=True,
    ),
    Hostile("two archives", FIRST + END + THIRD + END, 2048, "nothing behind the end blocks, found more data", whole=True),
    Hostile("a byte behind the end", FIRST + END + bytes(9000) + b"x", 1024 + 1024 + 9000, "nothing behind the end blocks", whole=True),
    # headers
    Hostile("text", b"<html>" * 100 + bytes(424), 148, "expected a header checksum in octal"),
    Hostile(
        "an end block in a block",
        FIRST + bytes(512) + THIRD,
        1024,
        "expected a member's header, found 512 NUL bytes (an end block)",
        block=True,
    ),
    Hostile("gzip", gzip.compress(GOOD, mtime=0).ljust(512, b"\0"), 0, "one compressed with gzip, which cannot; decompress it first"),
    Hostile("no magic", member(b"a.cls", b"3", magic=bytes(8)), 257, "the magic of a USTAR or GNU header"),
    Hostile("magic of neither", member(b"a.cls", b"3", magic=b"ustar 00"), 257, "the magic of a USTAR or GNU header"),
    Hostile("unknown type", member(b"a.cls", b"3", kind=b"Z"), 156, "expected a known member type, found b'Z'"),
    Hostile("no name", member(b"", b"3"), 0, "expected a member's name, found an empty one"),
    Hostile("wrong checksum", member(b"a.cls", b"3", checksum=b"000001\0 "), 0, "add up to its checksum 1, found a sum of 3503"),
    Hostile("checksum of letters", member(b"a.cls", b"3", checksum=b"00x001\0 "), 148, "a header checksum in octal, found b'00x001"),
    # sizes
    Hostile("size beyond the end", _sized(b"%011o\0" % 10**9), 1536, "expected the 1000000000 bytes of b'b.bin'"),
    Hostile("largest octal size", _sized(b"77777777777\0"), 1536, "expected the 8589934591 bytes"),
    Hostile("size with a sign", _sized(b"-0000000001\0"), 1024 + 124, "a size in octal, found b'-0000000001"),
    Hostile("size with a plus", _sized(b"+0000000001\0"), 1024 + 124, "a size in octal"),
    Hostile("size with an underscore", _sized(b"0000000_001\0"), 1024 + 124, "a size in octal"),
    Hostile("size with an 8", _sized(b"00000000008\0"), 1024 + 124, "a size in octal"),
    Hostile("size in hex", _sized(b"0x000000001\0"), 1024 + 124, "a size in octal"),
    Hostile("size with a NUL inside", _sized(b"000\x000000001\0"), 1024 + 124, "a size in octal"),
    Hostile("size in other digits", _sized(b"000000000" + "٣".encode() + b"\0"), 1024 + 124, "a size in octal"),
    Hostile("negative base 256", _sized(b"\xff" * 12), 1024 + 124, "a size of zero or more, found a negative one"),
    Hostile("huge base 256", _sized(b"\x80\0\0\0" + b"\xff" * 8), 1024 + 124, "a size below 2^63"),
    Hostile("base 256 beyond the end", _sized(b"\x80" + bytes(6) + b"\x10" + bytes(4)), 1536, "expected the 68719476736 bytes"),
    # padding
    Hostile("padding", header(b"a.cls", 1) + b"3" + bytes(100) + b"!" + bytes(410), 513, "NUL bytes up to the next record"),
    # extended headers
    Hostile(
        "pax of 4 GiB", header(b"x", 2**32, kind=b"x") + bytes(512), 0, "an extended header of at most 1048576 bytes, found 4294967296"
    ),
    Hostile(
        "long name of 8 EiB", header(b"x", b"\x80\0\0\0\x7f" + b"\xff" * 7, kind=b"L"), 0, "an extended header of at most 1048576 bytes"
    ),
    Hostile("pax cut", header(b"x", 2000, kind=b"x") + bytes(512), 512, "expected an extended header's bytes", whole=True),
    Hostile(
        "pax at the end", pax(pax_record(b"path", b"a.cls")), 1024, "expected the header that an extended header announces", whole=True
    ),
    Hostile("pax then end blocks", pax(pax_record(b"path", b"a.cls")) + bytes(512), 1024, "an end block"),
    Hostile("pax length too large", pax(b"99 path=a.cls\n") + FIRST, 512, "record 'length key=value'"),
    Hostile("pax length zero", pax(b"0 path=a.cls\n") + FIRST, 512, "record 'length key=value'"),
    Hostile("pax length negative", pax(b"-1 path=a\n") + FIRST, 512, "record 'length key=value'"),
    Hostile("pax length of many digits", pax(b"1" * 500 + b" path=a\n") + FIRST, 512, "record 'length key=value'"),
    Hostile("pax without newline", pax(b"13 path=a.clsX") + FIRST, 512, "record 'length key=value'"),
    Hostile("pax without equals", pax(b"8 path\n\n") + FIRST, 512, "record 'length key=value'"),
    Hostile("pax size negative", pax(pax_record(b"size", b"-5")) + FIRST, 1024, "a size below 2^63 in the extended header, found b'-5'"),
    Hostile("pax size huge", pax(pax_record(b"size", b"9" * 19)) + FIRST, 1024, "a size below 2^63 in the extended header"),
    Hostile(
        "pax size of many digits", pax(pax_record(b"size", b"1" * 5000)) + FIRST, 512 + 5120, "a size below 2^63 in the extended header"
    ),
    Hostile(
        "global name",
        pax(pax_record(b"path", b"a.cls"), b"g") + FIRST,
        0,
        "a global header that names no member, found one that sets 'path'",
    ),
    Hostile("NUL in a pax name", pax(pax_record(b"path", b"a\0b.cls")) + FIRST, 0, "a name without NUL bytes"),
    Hostile("name not UTF-8", member(b"\xff\xfe.cls", b"3"), 0, r"not UTF-8: '\\xff\\xfe.cls'", error=KeyNotAllowed),
    Hostile("reserved field", member(b"a.__key__", b"3"), 0, "'__key__' is a name of the sample itself", error=KeyNotAllowed),
]
