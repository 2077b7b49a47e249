"""A reader of data sets put together from docs/format.md alone, without the package: what the code is compared with.

It compares every digest and every sum that the page promises. Numbers in comments are the page's sections.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

Sample = dict[str, Any]


def read_dataset(folder: Path) -> list[Sample]:
    """All samples of the data set in a directory, in source order."""
    manifest = read_manifest(folder)
    found: list[Sample] = []
    largest, totals = 0, dict[str, dict[str, int]]()
    for shard in manifest["shards"]:
        samples, blocks = read_shard(folder, shard)
        largest = max(largest, *blocks)
        found += samples
    for sample in found:
        for field in sample.keys() - {"__key__"}:
            total = totals.setdefault(field, {"bytes": 0, "samples": 0})
            total["bytes"] += len(sample[field])
            total["samples"] += 1
    assert (len(found), largest, totals) == (manifest["samples"], manifest["largest_block"], manifest["fields"])
    assert len({sample["__key__"] for sample in found}) == len(found)  # 2.3
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """5."""
    raw = (folder / "manifest.json").read_bytes()
    manifest: dict[str, Any] = json.loads(raw)
    assert set(manifest) == {"bytes", "checksum", "digest", "fields", "format", "largest_block", "samples", "shards", "version"}
    assert (manifest["format"], manifest["version"]) == ("stagekit-dataset", 1)
    assert raw == json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    blank = re.sub(rb'("checksum":")[0-9a-f]{64}"', rb"\g<1>" + b"0" * 64 + b'"', raw)
    assert hashlib.sha256(blank).hexdigest() == manifest["checksum"]  # 5.2
    shards = manifest["shards"]
    lines = "".join(f"{shard['bytes']} {shard['samples']} {shard['sha256']} {shard['blocks_sha256']}\n" for shard in shards)
    assert hashlib.sha256(lines.encode("ascii")).hexdigest() == manifest["digest"]  # 5.1
    for key in ("bytes", "samples"):
        assert manifest[key] == sum(shard[key] for shard in shards)
    for number, shard in enumerate(shards):
        assert set(shard) - {"url"} == {"block_samples", "blocks_sha256", "bytes", "idx_sha256", "name", "samples", "sha256"}
        assert shard["samples"] == sum(shard["block_samples"])
        assert "url" in shard or shard["name"] == f"shards/{number:06d}.tar"
    wids = json.loads((folder / "wids.json").read_bytes())  # 7
    assert wids.pop("shardlist") == [
        {"filesize": shard["bytes"], "nsamples": shard["samples"], "url": shard.get("url", shard["name"])} for shard in shards
    ]
    assert wids == {"__kind__": "wids-shard-index-v1", "name": f"stagekit-{manifest['digest'][:16]}", "wids_version": 1}
    return manifest


def read_shard(folder: Path, shard: dict[str, Any]) -> tuple[list[Sample], list[int]]:
    """The samples of a shard, and the bytes of its blocks."""
    tar = Path(shard["url"]).read_bytes() if "url" in shard else (folder / shard["name"]).read_bytes()
    assert (len(tar), hashlib.sha256(tar).hexdigest()) == (shard["bytes"], shard["sha256"])
    index = (folder / (shard["name"] + ".idx")).read_bytes()  # 4.2
    assert hashlib.sha256(index).hexdigest() == shard["idx_sha256"]
    starts = struct.unpack(f"<{len(index) // 8}Q", index)
    assert (len(starts), list(starts)) == (shard["samples"] + 1, sorted(set(starts)))
    assert not tar[starts[-1] :].strip(b"\0")
    assert len(tar) - starts[-1] >= 1024
    assert "url" in shard or len(tar) - starts[-1] == 1024  # 3.2
    stem = shard["name"].removesuffix(".tar")
    digests = (folder / (stem + ".samples")).read_bytes()  # 4.3
    assert struct.unpack_from("<8sIQ", digests) == (b"SKSAMPLE", 1, shard["samples"])
    assert xxhash.xxh3_128(digests[:-16]).digest() == digests[-16:]
    bodies = [tar[begin:end] for begin, end in itertools.pairwise(starts)]
    assert digests[20:-16] == struct.pack(f"<{len(bodies)}Q", *(xxhash.xxh3_64(body).intdigest() for body in bodies))
    table = (folder / (stem + ".blocks")).read_bytes()  # 4.1
    assert hashlib.sha256(table).hexdigest() == shard["blocks_sha256"]
    assert xxhash.xxh3_128(table[:-16]).digest() == table[-16:]
    magic, version, count = struct.unpack_from("<8sII", table)
    assert (magic, version, len(table)) == (b"SKBLOCKS", 1, 16 + 48 * count + 16)
    found: list[Sample] = []
    sizes = []
    at = starts[0]
    entries = struct.iter_unpack("<QQQQ16s", table[16:-16])
    for (first, offset, size, samples, digest), expected in zip(entries, shard["block_samples"], strict=True):
        block = tar[offset : offset + size]
        assert (first, offset, offset, samples) == (len(found), at, starts[first], expected)
        assert xxhash.xxh3_128(block).digest() == digest
        following = starts[first + samples + 1] if first + samples < shard["samples"] else offset + 2**63
        assert size <= 8 * 2**20 or samples == 1  # 4, the cut rule
        assert following - offset > 8 * 2**20
        inside = list(read_samples(block, foreign="url" in shard))
        assert len(inside) == samples
        found += inside
        sizes.append(size)
        at += size
    assert at == starts[-1]
    return found, sizes


def read_samples(block: bytes, *, foreign: bool) -> Iterator[Sample]:
    """The samples in a block (6.3): 2.1 for names, 3.1 and, where the tar is ``foreign``, 3.4 for headers."""
    sample: Sample = {}
    for name, data in read_members(block, foreign=foreign):
        directory, slash, base = name.rpartition("/")
        stem, _, field = base.partition(".")
        if not stem or not field or re.match(r"__[^/]*__/", name):
            assert foreign
            continue
        key = directory + slash + stem
        if sample.get("__key__") != key:
            if sample:
                yield sample
            sample = {"__key__": key}
        assert field.lower() not in sample
        assert foreign or (field == field.lower() and [*sample][1:] == sorted([*sample][1:]))
        sample[field.lower()] = data
    yield sample


def read_members(block: bytes, *, foreign: bool) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each regular file."""
    at, extended = 0, dict[str, str]()
    while at < len(block):
        head = block[at : at + 512]
        assert int(head[148:156].strip(b"\0 "), 8) == sum(head[:148]) + 8 * 32 + sum(head[156:])
        kind, magic = head[156:157], head[257:265]
        assert magic == b"ustar\x0000" or (foreign and magic == b"ustar  \0")
        size = int.from_bytes(head[124:136], "big") - (0x80 << 88) if head[124] & 0x80 else int(head[124:136].strip(b"\0 "), 8)
        size = int(extended.pop("size", size))
        name = head[:100].partition(b"\0")[0].decode()
        prefix = head[345:500].partition(b"\0")[0].decode() if magic == b"ustar\x0000" else ""
        data = block[at + 512 : at + 512 + size]
        padded = 512 + size + -size % 512
        assert not block[at + 512 + size : at + padded].strip(b"\0")
        at += padded
        if kind == b"L":
            extended["path"] = data.partition(b"\0")[0].decode()
        elif kind == b"x":
            while data:
                length = int(data.partition(b" ")[0])
                word, _, value = data[:length].partition(b" ")[2][:-1].decode().partition("=")
                extended[word] = value
                data = data[length:]
        else:
            path = extended.pop("path", f"{prefix}/{name}" if prefix else name)
            extended.clear()
            if kind in (b"0", b"\0", b"7"):
                yield path, data
            assert foreign or kind == b"0"
    assert at == len(block)


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def permutation(count: int, digest: str, seed: int, epoch: int, purpose: str, number: int) -> list[int]:
    """8."""
    text = "".join(f"{line}\n" for line in ("stagekit-order/1", digest, seed, epoch, purpose, number))
    a, b = struct.unpack("<QQ", hashlib.sha256(text.encode("ascii")).digest()[:16])
    return sorted(range(count), key=lambda i: mix(mix((i * 0x9E3779B97F4A7C15 + a) % 2**64) ^ b))


def epoch_of(manifest: dict[str, Any], seed: int, epoch: int, window: int) -> list[int]:
    """The numbers of all samples in the order in which a shuffled epoch has them (8)."""
    counts = [count for shard in manifest["shards"] for count in shard["block_samples"]]
    firsts = [sum(counts[:number]) for number in range(len(counts))]
    blocks = permutation(len(counts), manifest["digest"], seed, epoch, "blocks", 0)
    found: list[int] = []
    for number, begin in enumerate(range(0, len(blocks), window)):
        numbered = [firsts[block] + i for block in blocks[begin : begin + window] for i in range(counts[block])]
        found += [numbered[i] for i in permutation(len(numbered), manifest["digest"], seed, epoch, "window", number)]
    return found


def batches_of(order: list[int], cuts: list[list[int]], ranks: int, batch_size: int, *, drop_last: bool) -> list[list[list[int]]]:
    """For each rank its batches of what is left of ``order`` behind the ``cuts`` of a state (8)."""

    def shares(left: list[int], count: int) -> list[list[int]]:
        each, rest = divmod(len(left), count)
        ends = [each * number + min(number, rest) for number in range(count + 1)]
        return [left[begin:end] for begin, end in itertools.pairwise(ends)]

    for count, taken in cuts:
        order = [sample for one in shares(order, count) for sample in one[taken:]]
    number = len(order) // ranks // batch_size if drop_last else math.ceil(math.ceil(len(order) / ranks) / batch_size)
    return [[one[i * batch_size : (i + 1) * batch_size] for i in range(number)] for one in shares(order, ranks)]
