"""One tar, read once: what is found in it, and what is refused."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekit.errors import CorruptShard, DuplicateKey, KeyNotAllowed, ShardError
from stagekit.indexing.scan import key_hash, scan
from stagekit.shards.archive import samples as parse
from stagekit.shards.index import ShardBuilder, block_digest, index_from_bytes

from ..shards.handmade import END, header, member, pax, pax_record
from .tars import FORMATS, expected, samples, tar


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


def ours(files: list[tuple[str, bytes]], block_size: int) -> tuple[bytes, ShardBuilder]:
    builder = ShardBuilder(block_size=block_size)
    body = bytearray()
    for sample in expected(files):
        fields = [(name, len(data), [data]) for name, data in sample.items() if name != "__key__"]
        for piece in builder.sample(sample["__key__"], fields):
            body += piece
    for piece in builder.finish():
        body += piece
    return bytes(body), builder


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=25),
    block_size=st.sampled_from([1, 2048, 4096, 10_000, 2**20]),
    chunk=st.sampled_from([1, 100, 512, 700, 4096, 2**20]),
)
def test_of_our_own_shards_it_finds_what_their_builder_knew(sizes: list[int], block_size: int, chunk: int) -> None:
    """The same cut rule, digests, index and totals, however the bytes come."""
    files = [(f"{number:03d}.{field}", bytes([number]) * size) for number, size in enumerate(sizes) for field in ("a", "b")]
    body, builder = ours(files, block_size)
    found = scan(pieces(body, chunk), source="x.tar", block_size=block_size)
    assert found.built == builder.result
    assert found.keys.tolist() == [key_hash(f"{number:03d}") for number in range(len(sizes))]
    assert (found.skipped, found.unnamed, found.examples) == ({}, 0, {})


_NAME = st.text(st.sampled_from("abé/_ "), min_size=1, max_size=6).map(lambda text: "k" + text.strip("/"))
_ODD = ["link", "hard", "directory", "README", "__meta__/x.txt", ".hidden", "fifo"]


@st.composite
def foreign(draw: st.DrawFn) -> tuple[bytes, list[tuple[str, bytes]]]:
    """A tar with everything that a data set's tar may hold, and the files in it that are fields."""
    out = io.BytesIO()
    files: list[tuple[str, bytes]] = []
    keys = draw(st.lists(_NAME, min_size=1, max_size=8, unique=True))
    with tarfile.open(fileobj=out, mode="w|", format=draw(st.sampled_from(FORMATS))) as archive:
        for number, key in enumerate(keys):
            long = draw(st.booleans()) and archive.format != tarfile.USTAR_FORMAT
            key = f"{'d' * 120}/{key}" if long else key
            for field in draw(st.lists(st.sampled_from(["jpg", "CLS", "seg.PNG", "é"]), min_size=1, max_size=3, unique=True)):
                data = draw(st.binary(max_size=1500))
                entry = tarfile.TarInfo(f"{key}.{field}")
                entry.size, entry.mtime, entry.uname = (
                    len(data),
                    number + draw(st.sampled_from([0, 0.5])),
                    draw(st.sampled_from(["", "me"])),
                )
                archive.addfile(entry, io.BytesIO(data))
                files.append((entry.name, data))
                if draw(st.integers(0, 4)) == 0:
                    odd = draw(st.sampled_from(_ODD))
                    kinds = {"link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "directory": tarfile.DIRTYPE, "fifo": tarfile.FIFOTYPE}
                    entry = tarfile.TarInfo(odd)
                    entry.type, entry.linkname = kinds.get(odd, tarfile.REGTYPE), "elsewhere"
                    entry.size = 700 if odd in ("README", "__meta__/x.txt", ".hidden") else 0
                    archive.addfile(entry, io.BytesIO(bytes(entry.size)))
    return out.getvalue(), files


@settings(max_examples=150)
@given(made=foreign(), block_size=st.sampled_from([1, 3000, 2**20]), chunk=st.sampled_from([1, 512, 1000, 2**20]))
def test_blocks_of_foreign_tars_parse_to_exactly_their_samples(
    made: tuple[bytes, list[tuple[str, bytes]]], block_size: int, chunk: int
) -> None:
    body, files = made
    found = scan(pieces(body, chunk), source="x.tar", block_size=block_size)
    read = []
    offsets = index_from_bytes(found.built.index)
    for block in found.built.table.blocks:
        data = body[block.offset : block.end]
        assert block_digest(data) == block.digest
        inside = list(parse(data, source="x.tar", base=block.offset))
        assert len(inside) == block.samples
        assert block.samples == 1 or block.size <= block_size
        assert offsets[block.first_sample] == block.offset
        read += inside
    assert read == expected(files)
    assert found.built.bytes == len(body)
    assert found.built.table.end == offsets[-1]
    assert not body[offsets[-1] :].strip(b"\0")
    for number, sample in enumerate(read):
        alone = list(parse(body[offsets[number] : offsets[number + 1]], source="x.tar"))
        assert alone == [sample]
        assert found.keys[number] == np.uint64(key_hash(sample["__key__"]))


def test_what_is_no_field_is_counted_with_an_example() -> None:
    body = (
        member(b"dir/", kind=b"5")
        + member(b"a.jpg", b"1")
        + header(b"b.jpg", 0, kind=b"1", link=b"a.jpg")
        + header(b"c.jpg", 0, kind=b"1", link=b"a.jpg")
        + header(b"d.jpg", 0, kind=b"2", link=b"a.jpg")
        + header(b"null", 0, kind=b"3")
        + header(b"block", 0, kind=b"4")
        + header(b"queue", 0, kind=b"6")
        + pax(pax_record(b"GNU.sparse.major", b"1"))
        + member(b"e.bin", b"x" * 600)
        + member(b"README", b"hello")
        + member(b"LICENSE", b"")
        + member(b"z.jpg", b"2")
        + END
    )
    found = scan([body], source="x.tar")
    assert found.skipped == {"device": 2, "directory": 1, "fifo": 1, "hard link": 2, "sparse file": 1, "symbolic link": 1}
    assert found.unnamed == 2
    assert found.examples == {
        "device": "null",
        "directory": "dir/",
        "fifo": "queue",
        "hard link": "b.jpg",
        "sparse file": "e.bin",
        "symbolic link": "d.jpg",
        "unnamed": "README",
    }
    assert found.built.samples == 2
    assert found.built.fields == {"jpg": (2, 2)}
    assert found.built.table.blocks[0].offset == 512  # what lies before the first sample is in no block


GOOD = tar(samples(0, 4))
CUT = tar([("a.txt", b"x" * 3000)])


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (b"", CorruptShard, r"x\.tar is empty \(0 bytes\), so it is no tar"),
        (gzip.compress(GOOD), CorruptShard, "is no tar but compressed with gzip .*decompress it first"),
        (b"BZh91AY" + bytes(2000), CorruptShard, "is no tar but compressed with bzip2"),
        (b"\x28\xb5\x2f\xfd" + bytes(2000), CorruptShard, "is no tar but compressed with zstd"),
        (b"<!DOCTYPE html><html>" + b" " * 2000, CorruptShard, r"is no tar but a web page .*begins with b'<!DOCTYPE html><html>"),
        (b"\n  <Error><Code>AccessDenied", CorruptShard, "is no tar but a web page or XML"),
        (b'{"error": "not found"}', CorruptShard, "is no tar but JSON"),
        (b"PK\x03\x04" + bytes(2000), CorruptShard, "is no tar but a zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:", CorruptShard, "is no tar but a pointer to a file in Git LFS"),
        (b"some text" * 200, CorruptShard, "is damaged at offset 148: expected a header checksum in octal"),
        (CUT[:2000], CorruptShard, "is damaged at offset 512: expected the 3000 bytes of b'a.txt', found the end of the data after 1488"),
        (CUT[:3584], CorruptShard, "offset 3584: expected a member's header or the first of two end blocks, found the end of the data"),
        (CUT[: 3584 + 512], CorruptShard, "offset 4096: expected the second of two end blocks"),
        (GOOD + GOOD, CorruptShard, "expected nothing behind the end blocks, found more data"),
        (bytes(10240), ShardError, "x.tar holds no sample: it is an empty archive. Leave it out"),
        (
            tar([("README", b"x"), ("LICENSE", b"")]),
            ShardError,
            "holds no sample: 2 files without a key and an extension, such as 'README'",
        ),
        (member(b"d/", kind=b"5") + END, ShardError, "holds no sample: 1 × directory"),
        (
            tar([("a.jpg", b"1"), ("a.JPG", b"2")]),
            DuplicateKey,
            r"x\.tar holds the field 'jpg' of the sample 'a' twice, the second time at offset 1024 \('a.JPG'; readers lower-case fields\)",
        ),
        (
            tar([("a.jpg", b"1"), ("b.jpg", b"2"), ("a.cls", b"3"), ("b.cls", b"3")]),
            DuplicateKey,
            r"its sample 0 \(offset 0\) again as sample 2 \(offset 2048\), not next to it: its members are interleaved",
        ),
        (tar([("a.__key__", b"1")]), KeyNotAllowed, "x.tar holds 'a.__key__' at offset 0: .*start with two underscores"),
        (tar([("b.jpg", b"1"), ("a\nb.jpg", b"1")]), KeyNotAllowed, r"holds 'a\\nb.jpg' at offset 1024: it holds a newline"),
        (member(b"\xff.jpg", b"1") + END, KeyNotAllowed, r"member at offset 0 whose name is not UTF-8: '\\\\xff.jpg'"),
    ],
)
@pytest.mark.parametrize("chunk", [300, 2**20])
def test_what_is_refused(body: bytes, error: type[ShardError], words: str, chunk: int) -> None:
    with pytest.raises(error, match=words) as caught:
        scan(pieces(body, chunk), source="x.tar", block_size=2048)
    assert type(caught.value) is error
    assert "x.tar" in str(caught.value)


def test_memory_is_that_of_a_block_and_a_few_chunks() -> None:
    """Large fields, large members that are no fields before and behind a sample, and many NULs at the end pass by."""
    large, chunk = 40 * 2**20, 2**20

    def passing() -> Iterator[bytes]:
        zeros = bytes(chunk)
        for name, sparse in ((b"first", True), (b"a.bin", False), (b"inside", True), (b"b.bin", False), (b"b.jpg", False)):
            if sparse:
                yield pax(pax_record(b"GNU.sparse.major", b"1"))
            yield header(name, large)
            for _ in range(large // chunk):
                yield bytes(zeros)
        for _ in range(20):
            yield bytes(zeros)

    tracemalloc.start()
    try:
        found = scan(passing(), source="x.tar", block_size=4 * 2**20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 * 2**20
    assert found.built.table.block_samples == (1, 1)
    assert found.built.bytes == 5 * (512 + large) + 2 * 1024 + 20 * chunk
    assert found.skipped == {"sparse file": 2}
