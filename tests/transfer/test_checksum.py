"""What is known of an object's bytes, compared with bytes: etags of every form, block tables, and when neither proves anything."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from stagekit.shards.index import Block, BlockTable, block_digest
from stagekit.transfer.bulk.builtin import Trust, file_checksum
from stagekit.transfer.checksum import Checksum, EtagOfParts, Expected, Finding, part_sizes

MIB = 2**20


def found(data: bytes, expected: Expected, *, piece: int = 1000, trust_etag: bool = True) -> Finding:
    checksum = Checksum(expected, trust_etag=trust_etag)
    for start in range(0, len(data), piece):
        checksum.update(data[start : start + piece])
    return checksum.finding


def etag(data: bytes, part: int) -> str:
    parts = [hashlib.md5(data[at : at + part]).digest() for at in range(0, max(len(data), 1), part)]
    return f"{hashlib.md5(b''.join(parts)).hexdigest()}-{len(parts)}"


def test_an_etag_proves_what_it_can() -> None:
    data = os.urandom(5000)
    whole = hashlib.md5(data).hexdigest()
    assert found(data, Expected(5000, etag=whole)) == "proven"
    assert found(data, Expected(5000, etag=whole.upper())) == "proven"
    assert found(data[:-1] + b"x", Expected(5000, etag=whole)) == "differs"
    assert found(data[:-1], Expected(5000, etag=whole)) == "differs"
    assert found(b"", Expected(0, etag=hashlib.md5(b"").hexdigest())) == "proven"
    assert found(data, Expected(5000, etag=whole), trust_etag=False) == "unknown"
    for nothing in (None, "", "v-17", "0x8D4BCC2E4835CD0", f"{whole}-300"):
        assert found(data, Expected(5000, etag=nothing)) == "unknown"
        assert not Expected(5000, etag=nothing).has_md5


@pytest.mark.parametrize("part", [5, 8, 16, 50])
def test_the_part_size_is_guessed_from_the_number_of_parts(part: int) -> None:
    data = os.urandom(MIB) * 101 + b"rest"
    assert found(data, Expected(len(data), etag=etag(data, part * MIB)), piece=3 * MIB + 7) == "proven"
    assert found(data[:-1] + b"x", Expected(len(data), etag=etag(data, part * MIB)), piece=3 * MIB + 7) == "differs"


def test_no_more_than_two_part_sizes_are_tried() -> None:
    assert part_sizes(10, "a" * 32) == [10]
    assert part_sizes(0, "a" * 32 + "-1")[0] == 16 * MIB
    assert len(part_sizes(4 * MIB, "a" * 32 + "-1")) == 2


def test_our_own_etags_are_told_before_they_are_sent() -> None:
    data = os.urandom(2500)
    for size, count in ((1000, True), (2500, True), (2500, False)):
        ours = EtagOfParts(size, with_count=count)
        for start in range(0, 2500, 300):
            ours.update(data[start : start + 300])
        assert ours.value == (etag(data, size) if count else hashlib.md5(data).hexdigest())
    assert EtagOfParts(10, with_count=True).value == etag(b"", 10)


def table(data: bytes, sizes: tuple[int, ...]) -> BlockTable:
    blocks, at = [], 0
    for number, size in enumerate(sizes):
        blocks.append(Block(number, at, size, 1, block_digest(data[at : at + size])))
        at += size
    return BlockTable(tuple(blocks))


def test_a_block_table_proves_a_shard_with_zeros_behind_it(tmp_path: Path) -> None:
    data = os.urandom(1536) + bytes(512)
    shard = Expected(len(data), sha256=hashlib.sha256(data).hexdigest(), blocks=table(data, (512, 1024)))
    for piece in (1, 511, 512, 513, 4096):
        assert found(data, shard, piece=piece) == "proven"
    for place in (0, 600, 1535, 1536, 2047):
        flipped = bytearray(data)
        flipped[place] ^= 1
        assert found(bytes(flipped), shard) == "differs"
    assert found(data[:1536], shard) == "differs"
    (tmp_path / "shard").write_bytes(data)
    assert file_checksum(tmp_path / "shard", shard, Trust()).digest.startswith("xxh3:")


def test_what_a_table_does_not_cover_is_compared_by_the_sha256(tmp_path: Path) -> None:
    """A tar that was indexed where it lies may go on behind its last sample."""
    data = os.urandom(1536) + b"another archive"
    shard = Expected(len(data), sha256=hashlib.sha256(data).hexdigest(), blocks=table(data, (512, 1024)))
    (tmp_path / "shard").write_bytes(data)
    checksum = file_checksum(tmp_path / "shard", shard, Trust())
    assert (checksum.finding, checksum.digest) == ("proven", f"sha256:{shard.sha256}")
    (tmp_path / "shard").write_bytes(data[:-1] + b"X")
    assert file_checksum(tmp_path / "shard", shard, Trust()).finding == "differs"
    late = BlockTable((Block(0, 512, 1024, 1, block_digest(data[512:1536])),))
    assert found(data, Expected(len(data), sha256=shard.sha256, blocks=late)) == "proven"
