"""Block tables, sample indexes, and the builder that makes them."""

from __future__ import annotations

import hashlib
import re
import struct
import threading
from collections.abc import Iterator
from itertools import pairwise, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagekit.errors import CorruptShard, DuplicateKey, KeyNotAllowed, ManifestError, ShardError, SourceError
from stagekit.shards.archive import ArchiveReader, Data, samples
from stagekit.shards.index import (
    BLOCK_SIZE,
    Block,
    BlockTable,
    BuiltShard,
    FieldTotals,
    ShardBuilder,
    block_digest,
    index_from_bytes,
    index_to_bytes,
)

from . import handmade

SOURCE = "shards/000000.blocks"
D = bytes(range(16))

# --------------------------------------------------------------------------------------------------------------------- block table


@st.composite
def tables(draw: st.DrawFn) -> BlockTable:
    offset = draw(st.integers(0, 10**6)) * 512
    first = 0
    blocks = []
    for _ in range(draw(st.integers(1, 6))):
        count = draw(st.integers(1, 10**9))
        size = count * 512 + draw(st.integers(0, 2**40))
        blocks.append(Block(first, offset, size, count, draw(st.binary(min_size=16, max_size=16))))
        first += count
        offset += size
    return BlockTable(tuple(blocks))


@given(tables())
def test_a_table_comes_back(table: BlockTable) -> None:
    data = table.to_bytes()
    assert len(data) == 16 + 48 * len(table.blocks) + 16
    assert BlockTable.from_bytes(data, source=SOURCE) == table
    assert BlockTable.from_bytes(memoryview(data), source=SOURCE) == table
    assert table.samples == sum(table.block_samples)
    assert table.end == table.blocks[0].offset + sum(block.size for block in table.blocks)
    assert table.largest == max(block.size for block in table.blocks)


def test_the_digest_is_xxh3_128() -> None:
    # The published test vector for no input and seed 0.
    assert block_digest(b"").hex() == "99aa06d3014798d86001c324468d497f"


@given(tables(), st.data())
def test_any_changed_byte_and_any_cut_is_found(table: BlockTable, data: st.DataObject) -> None:
    raw = table.to_bytes()
    at = data.draw(st.integers(0, len(raw) - 1))
    changed = raw[:at] + bytes([raw[at] ^ data.draw(st.integers(1, 255))]) + raw[at + 1 :]
    with pytest.raises((CorruptShard, ManifestError), match=SOURCE):
        BlockTable.from_bytes(changed, source=SOURCE)
    with pytest.raises(CorruptShard, match=SOURCE):
        BlockTable.from_bytes(raw[:at], source=SOURCE)
    with pytest.raises(CorruptShard, match=SOURCE):
        BlockTable.from_bytes(raw + b"\0", source=SOURCE)


def forged(*entries: tuple[int, int, int, int], version: int = 1, count: int | None = None) -> bytes:
    body = b"SKBLOCKS" + struct.pack("<II", version, len(entries) if count is None else count)
    body += b"".join(struct.pack("<QQQQ", *entry) + D for entry in entries)
    return body + block_digest(body)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes that start with b''"),
        (b"<html>not a table at all, but longer</html>", "expected a block table, which starts with SKBLOCKS"),
        (forged(), "expected at least one block, found none"),
        (forged((0, 0, 1024, 1), count=2), "expected 128 bytes for 2 blocks, found 80 bytes"),
        (forged((0, 0, 1024, 1), count=2**32 - 1), "for 4294967295 blocks"),
        (forged((1, 0, 1024, 1)), "expected block 0 to go on at sample 0 and offset 0, found sample 1"),
        (forged((0, 0, 1024, 0)), "expected at least one sample of 512 bytes in block 0, found 0 samples"),
        (forged((0, 0, 1024, 3)), "found 3 samples in 1024 bytes"),
        (forged((0, 2**63, 1024, 1)), "in block 0"),
        (forged((0, 0, 2**63, 1)), "in block 0"),
        (
            forged((0, 0, 1024, 1), (1, 2048, 512, 1)),
            "expected block 1 to go on at sample 1 and offset 1024, found sample 1 and offset 2048",
        ),
        (forged((0, 0, 1024, 1), (1, 512, 512, 1)), "found sample 1 and offset 512"),
        (forged((0, 0, 1024, 1), (2, 1024, 512, 1)), "found sample 2 and offset 1024"),
    ],
)
def test_tables_that_do_not_hold_together(data: bytes, words: str) -> None:
    with pytest.raises(CorruptShard, match=f"{re.escape(SOURCE)} is damaged: .*") as caught:
        BlockTable.from_bytes(data, source=SOURCE)
    assert words in str(caught.value)
    assert "publish the shard again" in str(caught.value)


def test_another_version_is_told() -> None:
    with pytest.raises(
        ManifestError, match=r"000000\.blocks is a block table of version 2, and this release reads version 1; install a release"
    ):
        BlockTable.from_bytes(forged((0, 0, 1024, 1), version=2), source=SOURCE)


def test_a_table_that_does_not_hold_together_cannot_be_made() -> None:
    with pytest.raises(CorruptShard, match="at least one block"):
        BlockTable(())
    with pytest.raises(CorruptShard, match="a digest of 16 bytes in block 0, found 4"):
        BlockTable((Block(0, 0, 512, 1, b"four"),))


# -------------------------------------------------------------------------------------------------------------------- sample index


@given(st.lists(st.integers(0, 2**62), min_size=2, unique=True).map(sorted))
def test_an_index_comes_back(offsets: list[int]) -> None:
    data = index_to_bytes(offsets)
    assert data == b"".join(struct.pack("<Q", offset) for offset in offsets)
    assert index_from_bytes(data) == offsets


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "at least two numbers of 8 bytes each, found 0 bytes"),
        (bytes(8), "found 8 bytes"),
        (bytes(15), "found 15 bytes"),
        (bytes(16), "expected ascending offsets, entry 1 above 0, found 0"),
        (index_to_bytes([0, 1024, 512]), "entry 2 above 1024, found 512"),
        (b"\0" * 8 + b"\xff" * 8, "entry 1 above 0, found 18446744073709551615"),
    ],
)
def test_indexes_that_do_not_ascend(data: bytes, words: str) -> None:
    with pytest.raises(CorruptShard, match=r"x\.idx is damaged") as caught:
        index_from_bytes(data, source="x.idx")
    assert words in str(caught.value)


# ------------------------------------------------------------------------------------------------------------------------- builder

Content = dict[str, dict[str, bytes]]

CONTENT = st.dictionaries(
    st.text("abcdé/ ", min_size=1, max_size=12).filter(lambda key: all(key.split("/"))),
    st.dictionaries(st.sampled_from(["jpg", "cls", "seg.png"]), st.binary(max_size=3000), min_size=1),
    min_size=1,
    max_size=8,
)


def in_pieces(data: bytes, size: int) -> Iterator[Data]:
    for at in range(0, len(data), size):
        yield memoryview(data)[at : at + size]


def build(content: Content, *, block_size: int = BLOCK_SIZE, piece: int = 1000) -> tuple[bytes, BuiltShard]:
    builder = ShardBuilder(block_size=block_size)
    out = bytearray()
    for key, fields in content.items():
        for part in builder.sample(key, ((field, len(data), in_pieces(data, piece)) for field, data in fields.items())):
            out += part
    assert builder.samples == len(content)
    size = builder.bytes
    for part in builder.finish():
        out += part
    assert size == len(out)
    return bytes(out), builder.result


@given(CONTENT, st.integers(1, 8000), st.integers(1, 4000))
def test_everything_about_a_built_shard(content: Content, block_size: int, piece: int) -> None:
    data, built = build(content, block_size=block_size, piece=piece)
    expected = [{"__key__": key, **{field: fields[field] for field in sorted(fields)}} for key, fields in content.items()]
    by_hand = [
        b"".join(handmade.member(f"{key}.{field}".encode(), fields[field]) for field in sorted(fields)) for key, fields in content.items()
    ]
    assert data == b"".join(by_hand) + handmade.END
    assert (built.bytes, built.samples, built.sha256) == (len(data), len(content), hashlib.sha256(data).hexdigest())
    assert sum(1 for _ in ArchiveReader([data], source=SOURCE)) == sum(map(len, content.values()))
    # The index has every sample.
    starts = index_from_bytes(built.index)
    assert [data[start:end] for start, end in pairwise(starts)] == by_hand
    # Blocks hold whole samples, are cut by the rule, and have their bytes' digests.
    again: list[dict[str, object]] = []
    for number, block in enumerate(built.table.blocks):
        body = data[block.offset : block.end]
        assert block_digest(body) == block.digest
        assert block.first_sample == len(again)
        found = list(samples(body, source=SOURCE, base=block.offset))
        assert len(found) == block.samples
        again += found
        assert block.size <= block_size or block.samples == 1
        if number + 1 < len(built.table.blocks):
            assert block.size + len(by_hand[len(again)]) > block_size
    assert again == expected
    assert built.table.end == len(data) - 1024
    totals = {
        field: FieldTotals(
            sum(field in fields for fields in content.values()), sum(len(fields.get(field, b"")) for fields in content.values())
        )
        for field in {field for fields in content.values() for field in fields}
    }
    assert built.fields == totals
    assert list(built.fields) == sorted(built.fields)


def test_a_block_may_be_filled_exactly() -> None:
    content = {key: {"bin": b"x" * 512} for key in "abcde"}
    assert build(content, block_size=2048)[1].table.block_samples == (2, 2, 1)
    assert build(content, block_size=2047)[1].table.block_samples == (1, 1, 1, 1, 1)
    assert build(content)[1].table.block_samples == (5,)


def test_a_payload_without_an_end_is_not_read_for_ever() -> None:
    with pytest.raises(SourceError, match="was announced with 3 bytes and has more"):
        list(ShardBuilder().sample("a", [("txt", 3, repeat(b"xx"))]))


def test_all_pieces_but_the_last_have_one_size() -> None:
    builder = ShardBuilder()
    sizes = [len(part) for number in range(3000) for part in builder.sample(f"s{number}", [("txt", 2000, [b"x" * 2000])])]
    large = 5 * ShardBuilder.PIECE
    sizes += [len(part) for part in builder.sample("large", [("bin", large, [bytes(large)])])]
    assert set(sizes) == {ShardBuilder.PIECE}
    last = [len(part) for part in builder.finish()]
    assert len(last) == 1
    assert sum(sizes + last) == builder.result.bytes


def test_the_digests_of_many_pieces_and_blocks() -> None:
    """Blocks that end where a piece does, and elsewhere: digests are taken in another thread, of pieces that know nothing of blocks."""
    content = {f"{number:03d}": {"bin": bytes([number]) * 2**17} for number in range(70)}
    content |= {f"exact{number}": {"bin": bytes([number]) * (2**18 - 512)} for number in range(20)}
    data, built = build(content, block_size=2**20, piece=100_000)
    assert built.sha256 == hashlib.sha256(data).hexdigest()
    assert len(built.table.blocks) > 10
    assert all(block.digest == block_digest(data[block.offset : block.end]) for block in built.table.blocks)


def test_a_builder_that_is_given_up_leaves_no_thread() -> None:
    builder = ShardBuilder()
    large = 5 * ShardBuilder.PIECE
    assert len(list(builder.sample("large", [("bin", large, [bytes(large)])]))) == 5
    (hashing,) = (thread for thread in threading.enumerate() if thread.name == "stagekit-hash")
    del builder
    hashing.join(60)
    assert not hashing.is_alive()


@pytest.mark.parametrize(
    ("pieces", "words"), [([b"ab"], "has only 2"), ([], "has only 0"), ([b"abc", b"d"], "has more"), ([b"abcd"], "has more")]
)
def test_a_payload_of_another_size_is_refused_before_the_next_header(pieces: list[bytes], words: str) -> None:
    builder = ShardBuilder()
    list(builder.sample("a", [("cls", 1, [b"1"])]))
    taken = []

    def later() -> Iterator[bytes]:
        taken.append(True)
        yield b"1"

    with pytest.raises(
        SourceError, match=f"the field 'jpg' of the sample 'b' was announced with 3 bytes and {words}: it changed while it was read"
    ):
        list(builder.sample("b", [("txt", 1, later()), ("jpg", 3, pieces)]))
    assert not taken
    for call in (lambda: list(builder.sample("c", [("cls", 1, [b"1"])])), lambda: list(builder.finish())):
        with pytest.raises(ShardError, match="one of its samples failed; start a new one"):
            call()
    with pytest.raises(ShardError, match="not finished"):
        _ = builder.result


def test_an_empty_payload_and_empty_pieces() -> None:
    data, built = build({"a": {"txt": b""}})
    assert data == handmade.member(b"a.txt") + handmade.END
    builder = ShardBuilder()
    list(builder.sample("a", [("txt", 1, [b"", b"x", b""])]))
    assert built.fields == {"txt": (1, 0)}


def test_what_cannot_be_a_sample_changes_nothing() -> None:
    builder = ShardBuilder()
    out = b"".join(builder.sample("a", [("cls", 1, [b"1"])]))
    refused: list[tuple[type[ShardError], str, str, list[tuple[str, int, list[bytes]]]]] = [
        (KeyNotAllowed, "dot in its last component", "a.b", [("cls", 1, [b"1"])]),
        (KeyNotAllowed, "readers lower-case extensions", "b", [("CLS", 1, [b"1"])]),
        (KeyNotAllowed, "a USTAR member ends at 8 GiB", "b", [("cls", 2**33, [])]),
        (DuplicateKey, "the sample 'b' has the field 'cls' twice", "b", [("cls", 1, [b"1"]), ("cls", 1, [b"2"])]),
        (DuplicateKey, "the key 'a' comes twice in a row", "a", [("txt", 1, [b"1"])]),
        (ShardError, "the sample 'b' has no field", "b", []),
    ]
    for error, words, key, fields in refused:
        with pytest.raises(error, match=words):
            list(builder.sample(key, fields))
    out += b"".join(builder.sample("b", [("cls", 1, [b"2"])]))
    out += b"".join(builder.finish())
    assert out == handmade.member(b"a.cls", b"1") + handmade.member(b"b.cls", b"2") + handmade.END
    with pytest.raises(ShardError, match="this shard is finished"):
        list(builder.finish())


def test_a_shard_without_a_sample_cannot_be_finished() -> None:
    with pytest.raises(ShardError, match="a shard without a sample cannot be finished"):
        list(ShardBuilder().finish())


def test_an_exception_of_the_source_breaks_the_shard() -> None:
    def failing() -> Iterator[bytes]:
        yield b"x"
        raise OSError("disk")

    builder = ShardBuilder()
    with pytest.raises(OSError, match="disk"):
        list(builder.sample("a", [("cls", 2, failing())]))
    with pytest.raises(ShardError, match="start a new one"):
        list(builder.sample("b", [("cls", 1, [b"1"])]))


def test_a_reused_buffer_is_copied_in_time() -> None:
    def reusing() -> Iterator[bytearray]:
        buffer = bytearray(1000)
        for number in range(5):
            buffer[:] = bytes([number]) * 1000
            yield buffer

    builder = ShardBuilder()
    out = bytearray()
    for part in builder.sample("a", [("bin", 5000, reusing())]):
        out += part
    for part in builder.finish():
        out += part
    assert bytes(out) == handmade.member(b"a.bin", b"".join(bytes([number]) * 1000 for number in range(5))) + handmade.END
