"""docs/format.md is complete enough to write a reader from: this one shares nothing with the package."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path

import xxhash

from . import golden

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


def read_dataset(folder: Path) -> list[dict[str, object]]:
    raw = (folder / "manifest.json").read_bytes()
    manifest = json.loads(raw)
    assert (manifest["format"], manifest["version"]) == ("stagekit-dataset", 1)
    blank = re.sub(rb'("checksum"\s*:\s*")[0-9a-f]{64}"', rb"\g<1>" + b"0" * 64 + b'"', raw)
    assert hashlib.sha256(blank).hexdigest() == manifest["checksum"]
    lines = "".join(f"{shard['bytes']} {shard['samples']} {shard['sha256']} {shard['blocks_sha256']}\n" for shard in manifest["shards"])
    assert hashlib.sha256(lines.encode("ascii")).hexdigest() == manifest["digest"]
    found: list[dict[str, object]] = []
    for shard in manifest["shards"]:
        table = (folder / (shard["name"].removesuffix(".tar") + ".blocks")).read_bytes()
        assert hashlib.sha256(table).hexdigest() == shard["blocks_sha256"]
        assert xxhash.xxh3_128(table[:-16]).digest() == table[-16:]
        magic, version, count = struct.unpack_from("<8sII", table)
        assert (magic, version, len(table)) == (b"SKBLOCKS", 1, 16 + 48 * count + 16)
        index = (folder / (shard["name"] + ".idx")).read_bytes()
        assert hashlib.sha256(index).hexdigest() == shard["idx_sha256"]
        starts = struct.unpack(f"<{len(index) // 8}Q", index)
        tar = (folder / shard["name"]).read_bytes()
        assert (len(tar), hashlib.sha256(tar).hexdigest()) == (shard["bytes"], shard["sha256"])
        assert tar[starts[-1] :] == bytes(1024)
        for (first, offset, size, samples, digest), expected in zip(
            struct.iter_unpack("<QQQQ16s", table[16:-16]), shard["block_samples"], strict=True
        ):
            block = tar[offset : offset + size]
            assert (samples, xxhash.xxh3_128(block).digest()) == (expected, digest)
            assert offset == starts[first]
            inside = read_block(block)
            assert len(inside) == samples
            found += inside
    assert len(found) == manifest["samples"]
    return found


def read_block(block: bytes) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    at = 0
    while at < len(block):
        head = block[at : at + 512]
        assert int(head[148:154], 8) == sum(head[:148]) + 8 * 32 + sum(head[156:])
        assert (head[156:157], head[257:265]) == (b"0", b"ustar\x0000")
        size = int(head[124:135], 8)
        prefix, name = head[345:500].rstrip(b"\0").decode(), head[:100].rstrip(b"\0").decode()
        path = f"{prefix}/{name}" if prefix else name
        directory, slash, base = path.rpartition("/")
        stem, _, field = base.partition(".")
        key = directory + slash + stem
        if not found or found[-1]["__key__"] != key:
            found.append({"__key__": key})
        assert field not in found[-1]
        found[-1][field.lower()] = block[at + 512 : at + 512 + size]
        at += 512 + size + -size % 512
    assert at == len(block)
    return found


def test_it_reads_the_golden_data_set() -> None:
    assert read_dataset(golden.FOLDER) == [{"__key__": key, **dict(fields)} for samples in golden.SHARDS for key, fields in samples]


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def test_the_page_s_permutations_follow_from_its_words() -> None:
    rows = re.findall(r"\| `(..)` × 32, (−?\d+), (\d+), `(\w+)`, (\d+) \| ([\d ]+) \|", PAGE.read_text())
    assert len(rows) == 4
    for pair, seed, epoch, purpose, number, expected in rows:
        text = "\n".join(["stagekit-order/1", pair * 32, seed.replace("−", "-"), epoch, purpose, number, ""])
        a, b = struct.unpack("<QQ", hashlib.sha256(text.encode()).digest()[:16])
        scores = [mix(mix((i * 0x9E3779B97F4A7C15 + a) % 2**64) ^ b) for i in range(10)]
        assert sorted(range(10), key=scores.__getitem__) == [int(number) for number in expected.split()]


def test_the_page_has_the_numbers_of_the_code() -> None:
    from stagekit.shards import archive, index, manifest

    page = PAGE.read_text()
    for text in (
        f"{index.BLOCK_SIZE:,} (8 MiB)",
        f"{archive.LARGEST_MEMBER:,} bytes",
        manifest.FORMAT,
        "header is at most 1 MiB",
        manifest.WIDS,
    ):
        assert text in page
    assert archive.LARGEST_EXTENSION == 2**20
    assert manifest.VERSION == 1
