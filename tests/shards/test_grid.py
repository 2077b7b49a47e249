"""All headers of a block at once: either exactly what ``archive.samples`` finds, or nothing."""

from __future__ import annotations

import io
import random
import tarfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagekit.shards.archive import samples
from stagekit.shards.grid import grid_samples

from . import handmade
from .test_archive import SAMPLES, SOURCE


def found(data: bytes | bytearray | memoryview) -> list[dict[str, Any]] | None:
    grid = grid_samples(data)
    return None if grid is None else list(grid)


def plain(content: list[tuple[str, bytes]], **forged: Any) -> bytes:
    return b"".join(handmade.member(name.encode(), data, **forged) for name, data in content)


RECORDS = [(f"dir/{number:04d}.{field}", bytes([number]) * (number * 37 % 1200)) for number in range(40) for field in ("cls", "txt")]


@given(SAMPLES, st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_what_is_found_is_what_the_whole_grammar_finds(content: dict[str, dict[str, bytes]], form: int) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, encoding="utf-8") as archive:
        for key, fields in content.items():
            for field, data in fields.items():
                info = tarfile.TarInfo(f"{key}.{field}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        end = archive.offset
    for kind in (bytes, bytearray, memoryview):
        assert found(kind(out.getvalue()[:end])) in (None, list(samples(out.getvalue()[:end], source=SOURCE)))


@pytest.mark.parametrize(
    "content",
    [
        RECORDS,
        [(f"{number}.json", b"x" * number) for number in range(2000)],
        [("a.b/c.d.JPG", b"1"), ("a.b/c.cls", b"2"), ("a.b/d.d.JPG", b"3")],
        [("ü.txt", b""), ("a" * 96 + ".txt", b"x" * 512)],
        [("one.txt", b"x" * 511)],
    ],
)
@pytest.mark.parametrize("magic", [b"ustar\x0000", b"ustar  \0"])
def test_plain_members_are_found(content: list[tuple[str, bytes]], magic: bytes) -> None:
    data = plain(content, magic=magic)
    for _ in range(2):  # the second time, the extensions are known
        got = found(data)
        assert got is not None
        assert got == list(samples(data, source=SOURCE))
        assert [value for sample in got for name, value in sample.items() if name != "__key__"] == [value for _, value in content]


def test_samples_are_taken_by_number_from_both_ends_and_by_slices() -> None:
    grid = grid_samples(plain(RECORDS))
    assert grid is not None
    assert len(grid) == 40
    assert grid[-1] == grid[39] == list(grid)[39]
    assert grid[3:5] == [grid[3], grid[4]]
    with pytest.raises(IndexError):
        grid[40]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(plain(RECORDS)[:-1], id="no whole records"),
        pytest.param(plain(RECORDS)[:-512], id="a cut payload"),
        pytest.param(plain(RECORDS) + bytes(512), id="an end block"),
        pytest.param(handmade.pax(b"12 mtime=1.5\n") + plain(RECORDS), id="an extended header"),
        pytest.param(plain([("a.txt", plain(RECORDS))]), id="a tar in a tar"),
        pytest.param(plain([("a.txt", b"1")]) + plain([("b.txt", b"2")], kind=b"5"), id="a directory"),
        pytest.param(plain([("a.txt", b"1")], prefix=b"dir"), id="a prefix"),
        pytest.param(plain([("a.txt", b"1"), ("a.txt", b"2")]), id="a field twice"),
        pytest.param(plain([("a.txt", b"1"), ("a.cls", b"2"), ("a.txt", b"3")]), id="a field twice, not side by side"),
        pytest.param(plain([("a.txt", b"1"), ("README", b"2")]), id="no sample"),
        pytest.param(plain([("a.txt", b"1"), ("__meta__/b.txt", b"2")]), id="what readers skip"),
        pytest.param(plain([("a.txt", b"1"), ("dir/.b.txt", b"2")]), id="a hidden file"),
        pytest.param(plain([(".b.txt", b"2"), ("a.txt", b"1")]), id="a hidden file first"),
        pytest.param(plain([("a.txt", b"1"), ("b.__x", b"2")]), id="a name of the sample itself"),
        pytest.param(plain([("a.txt", b"1"), ("b\0c.txt", b"2")]), id="a NUL in a name"),
        pytest.param(plain([("a.txt", b"1"), ("b\nc.txt", b"2")]), id="a newline in a name"),
        pytest.param(handmade.member(b"\xff.txt", b"1"), id="no UTF-8"),
        pytest.param(handmade.header(b"a.txt", b"         1 \0") + handmade.pad(b"1"), id="another spelling of a size"),
    ],
)
def test_whatever_is_not_plain_is_left_to_the_whole_grammar(data: bytes) -> None:
    found(plain(RECORDS))  # so that the extensions are known
    assert found(data) is None


def test_a_changed_byte_is_never_taken_for_something_else() -> None:
    """A byte changed anywhere: refused here, or found by both readers alike (a payload is what the digest is for)."""
    data = plain(RECORDS[:6])
    chosen = random.Random(0)
    refused = 0
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << chosen.randrange(8)
        got = found(changed)
        refused += got is None
        if got is not None:
            assert got == list(samples(changed, source=SOURCE))
    assert refused == len(data) - sum(len(value) for _, value in RECORDS[:6])
