"""The bytes on disk are the format: the package must write exactly them, and other programs must read them."""

from __future__ import annotations

import gc
import io
import struct
import tarfile
from itertools import pairwise
from typing import Any

import pytest
import webdataset

from stagekit.shards.archive import ArchiveReader, members, samples
from stagekit.shards.index import BlockTable, BuiltShard, FieldTotals, ShardBuilder, block_digest, index_from_bytes
from stagekit.shards.manifest import MANIFEST, WIDS, Manifest, ShardRecord, blocks_name, index_name, shard_name, wids_json

from . import golden

NUMBERS = range(len(golden.SHARDS))


def read(name: str) -> bytes:
    return (golden.FOLDER / name).read_bytes()


def build(number: int) -> tuple[bytes, BuiltShard]:
    builder = ShardBuilder()
    out = bytearray()
    for key, fields in golden.SHARDS[number]:
        # Fields come in any order and payloads in any pieces; the bytes are the same.
        for piece in builder.sample(key, [(field, len(data), (data[:3], data[3:])) for field, data in reversed(fields)]):
            out += piece
    for piece in builder.finish():
        out += piece
    return bytes(out), builder.result


def expected(number: int) -> list[dict[str, Any]]:
    return [{"__key__": key, **dict(fields)} for key, fields in golden.SHARDS[number]]


def test_the_files_are_the_hand_made_ones() -> None:
    assert {
        path.relative_to(golden.FOLDER).as_posix(): path.read_bytes() for path in golden.FOLDER.rglob("*") if path.is_file()
    } == golden.files()


def test_the_first_header_byte_by_byte() -> None:
    head = read("shards/000000.tar")[:512]
    assert head[:100] == b"a.cls" + bytes(95)
    assert head[100:148] == b"0000644\x000000000\x000000000\x0000000000001\x0000000000000\x00"
    # "a.cls" is 97+46+99+108+115 = 465; 43 digits '0' are 43*48 = 2064; 0644 and 1 add 14 + 1;
    # 8 blanks are 256; type and version are 3*48 = 144; "ustar" is 117+115+116+97+114 = 559. Together 3503, in octal 6657.
    assert head[148:156] == b"006657\x00 "
    assert head[156:] == b"0" + bytes(100) + b"ustar\x0000" + bytes(247)
    assert read("shards/000000.tar")[512:1024] == b"3" + bytes(511)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_builder_writes_them(number: int) -> None:
    data, built = build(number)
    name = shard_name(number)
    assert data == read(name)
    assert built.index == read(index_name(name))
    assert built.table.to_bytes() == read(blocks_name(name))
    assert (built.bytes, built.samples) == (len(data), len(golden.SHARDS[number]))


def test_the_manifest_and_wids_files() -> None:
    built = [build(number)[1] for number in NUMBERS]
    totals: dict[str, FieldTotals] = {}
    for shard in built:
        for name, found in shard.fields.items():
            before = totals.get(name, FieldTotals(0, 0))
            totals[name] = FieldTotals(before.samples + found.samples, before.bytes + found.bytes)
    manifest = Manifest(
        tuple(ShardRecord.of(shard_name(number), shard) for number, shard in enumerate(built)),
        totals,
        max(shard.table.largest for shard in built),
    )
    assert manifest.to_bytes() == read(MANIFEST)
    assert wids_json(manifest) == read(WIDS)
    assert Manifest.from_bytes(read(MANIFEST), source=MANIFEST) == manifest
    assert manifest.samples == 4
    assert manifest.bytes == sum(len(read(shard_name(number))) for number in NUMBERS)


@pytest.mark.parametrize("number", NUMBERS)
def test_our_readers(number: int) -> None:
    name = shard_name(number)
    data = read(name)
    table = BlockTable.from_bytes(read(blocks_name(name)), source=blocks_name(name))
    block = table.blocks[0]
    body = data[block.offset : block.end]
    assert block_digest(body) == block.digest
    assert list(samples(body, source=name)) == expected(number)
    assert list(samples(memoryview(bytearray(body)), source=name)) == expected(number)
    found = list(members(body, source=name))
    streamed = [(member, b"".join(payload)) for member, payload in ArchiveReader([data], source=name)]
    assert [member for member, _ in streamed] == found
    assert [payload for _, payload in streamed] == [payload for _, fields in golden.SHARDS[number] for _, payload in fields]
    starts = index_from_bytes(read(index_name(name)))
    assert starts[-1] == len(data) - 1024
    assert set(starts[:-1]) <= {member.offset for member in found}


@pytest.mark.parametrize("number", NUMBERS)
def test_python_s_tarfile_reads_them(number: int) -> None:
    with tarfile.open(fileobj=io.BytesIO(read(shard_name(number))), mode="r:") as archive:
        found = {}
        for info in archive:
            payload = archive.extractfile(info)
            assert payload is not None
            assert (info.mode, info.uid, info.gid, info.mtime, info.uname, info.gname) == (0o644, 0, 0, 0, "", "")
            found[info.name] = payload.read()
    assert found == {f"{key}.{field}": data for key, fields in golden.SHARDS[number] for field, data in fields}


@pytest.mark.parametrize("number", NUMBERS)
def test_python_s_tarfile_writes_the_same_bytes(number: int) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT, encoding="utf-8") as archive:
        for key, fields in golden.SHARDS[number]:
            for field, data in fields:
                info = tarfile.TarInfo(f"{key}.{field}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    ours = read(shard_name(number))
    assert out.getvalue()[: len(ours)] == ours


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves its files open
def test_webdataset_reads_them_unchanged() -> None:
    urls = [str(golden.FOLDER / shard_name(number)) for number in NUMBERS]
    found = [
        {name: value for name, value in sample.items() if name not in ("__url__", "__local_path__")}
        for sample in webdataset.WebDataset(urls, shardshuffle=False)
    ]
    gc.collect()
    assert found == [sample for number in NUMBERS for sample in expected(number)]


def test_energon_s_view_of_the_index() -> None:
    """Energon reads sample i as the bytes between two offsets and parses them with tarfile."""
    data = read("shards/000000.tar")
    starts = [offset for (offset,) in struct.iter_unpack("<Q", read("shards/000000.tar.idx"))]
    for (key, fields), (start, end) in zip(golden.SHARDS[0], pairwise(starts), strict=True):
        with tarfile.open(fileobj=io.BytesIO(data[start:end]), mode="r:") as archive:
            assert archive.getnames() == [f"{key}.{field}" for field, _ in fields]
