"""The hot path takes shortcuts for headers that other writers repeat. It must agree with the full grammar on every tar."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import pytest

from stagekit.errors import ShardError
from stagekit.shards.archive import ArchiveReader, members, samples
from stagekit.shards.sample import is_meta, split_name

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def made(format: int, mtime: float) -> bytes:
    """Members of two samples, without the end blocks."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for name, data in (("a.cls", b"7"), ("a.JPG", b"x" * 513), ("b.cls", b""), ("README", b"no"), ("b.txt", bytes(range(256)) * 2)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.uname, entry.gname, entry.mode = len(data), mtime, "bigdata", "bigdata", 0o444
            archive.addfile(entry, io.BytesIO(data))
        end = archive.offset
    return out.getvalue()[:end]


def by_the_grammar(data: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for member in members(data, source="x.tar"):
        parts = split_name(member.name)
        if parts is None or is_meta(member.name):
            continue
        key, field = parts
        if not found or found[-1]["__key__"] != key:
            found.append({"__key__": key})
        elif field in found[-1]:
            raise ShardError("twice")
        found[-1][field] = data[member.data_offset : member.data_offset + member.size]
    return found


def outcome(read: Any) -> object:
    try:
        return list(read())
    except ShardError:
        return "refused"


@pytest.mark.parametrize("mtime", [12, 1_600_000_000.25])
@pytest.mark.parametrize("format", FORMATS)
def test_every_kind_of_buffer(format: str, mtime: float) -> None:
    data = made(FORMATS[format], mtime)
    expected = by_the_grammar(data)
    assert [sorted(sample) for sample in expected] == [["__key__", "cls", "jpg"], ["__key__", "cls", "txt"]]
    for buffer in (data, bytearray(data), memoryview(data), memoryview(bytearray(data))):
        assert list(samples(buffer, source="x.tar")) == expected


@pytest.mark.parametrize("mtime", [12, 1_600_000_000.25])
@pytest.mark.parametrize("format", FORMATS)
def test_a_flipped_bit_anywhere_is_judged_alike(format: str, mtime: float) -> None:
    data = made(FORMATS[format], mtime)
    refused = 0
    for at in range(3072):
        damaged = bytearray(data)
        damaged[at] ^= 1 << (at % 8)
        body = bytes(damaged)
        expected = outcome(lambda body=body: by_the_grammar(body))
        assert outcome(lambda body=body: samples(body, source="x.tar")) == expected, at
        streamed = outcome(
            lambda body=body: [(member, b"".join(payload)) for member, payload in ArchiveReader([body, bytes(1024)], source="x")]
        )
        assert (streamed == "refused") == (outcome(lambda body=body: members(body, source="x.tar")) == "refused"), at
        refused += expected == "refused"
    assert refused > 500


@pytest.mark.parametrize(
    ("headers", "same"),
    [
        ({"path": "c.jpg"}, False),
        ({"size": "3"}, False),
        ({"comment": "x"}, True),
        ({"mtime": "1.5", "comment": "x"}, True),
        ({"GNU.sparse.major": "1"}, False),
        ({"mtime": "1" * 600}, True),
    ],
)
def test_a_header_that_says_more_than_a_time_is_read(headers: dict[str, str], same: bool) -> None:
    entry = tarfile.TarInfo("a.jpg")
    entry.size, entry.pax_headers = 2, headers
    data = entry.tobuf(tarfile.PAX_FORMAT) + b"hi" + bytes(510)
    expected = outcome(lambda: by_the_grammar(data))
    assert outcome(lambda: samples(data, source="x.tar")) == expected
    assert (expected == [{"__key__": "a", "jpg": b"hi"}]) is same
