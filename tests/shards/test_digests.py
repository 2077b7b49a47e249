"""Digests of single samples, taken while bytes pass in pieces that know nothing of samples."""

from __future__ import annotations

import random

import pytest

from stagekit.indexing.scan import scan
from stagekit.shards.digests import SampleDigests, digests_from_bytes, sample_digest
from stagekit.shards.index import Batch, ShardBuilder, index_from_bytes


@pytest.mark.parametrize("seed", range(8))
def test_they_do_not_depend_on_how_the_bytes_come(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([1, 7, 512, 3000]) for _ in range(60)]
    front = rng.choice([0, 512])
    data = rng.randbytes(front + sum(sizes) + 1024)
    starts = [front + sum(sizes[:number]) for number in range(len(sizes) + 1)]
    digests = SampleDigests()
    at = told = 0
    while at < len(data):
        end = min(len(data), at + rng.choice([1, 100, 5000]))
        bounds = []
        while told < len(starts) and starts[told] < end:
            bounds.append(starts[told] - at)
            told += 1
        digests.update(memoryview(data)[at:end], bounds)
        at = end
    expected = [sample_digest(data[begin : begin + size]) for begin, size in zip(starts, sizes, strict=False)]
    assert digests_from_bytes(digests.to_bytes(), len(sizes)) == expected


def test_a_shard_and_its_index_agree_with_them_in_every_way_it_is_made() -> None:
    rng = random.Random(3)
    samples = [(f"{number:04d}", rng.randbytes(rng.choice([0, 10, 512, 1024, 2_000_000]))) for number in range(40)]
    single, batched = ShardBuilder(), ShardBuilder()
    data = b""
    for key, payload in samples:
        for piece in single.sample(key, [("bin", len(payload), (payload,))]):
            data += piece
    for piece in single.finish():
        data += piece
    for _ in batched.batch(Batch([key for key, _ in samples], "bin", [payload for _, payload in samples])):
        pass
    for _ in batched.finish():
        pass
    scanned = scan((data[at : at + 70_000] for at in range(0, len(data), 70_000)), source="x").built
    assert single.result == batched.result == scanned
    offsets = index_from_bytes(single.result.index)
    assert digests_from_bytes(single.result.sample_digests, len(samples)) == [
        sample_digest(data[offsets[number] : offsets[number + 1]]) for number in range(len(samples))
    ]
    assert (single.samples, single.result.samples) == (40, 40)


def test_what_is_no_such_file() -> None:
    digests = SampleDigests()
    digests.update(memoryview(b"abcd"), [0, 2])
    digests.update(memoryview(b""), [0])
    data = digests.to_bytes()
    assert digests_from_bytes(data, 2) == [sample_digest(b"ab"), sample_digest(b"cd")]
    assert digests_from_bytes(data, 3) is None
    assert digests_from_bytes(b"", 2) is None
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1
        assert digests_from_bytes(flipped, 2) is None
