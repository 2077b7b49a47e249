"""Tiny data sets with known contents, written straight into a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stagekit.shards.index import FieldTotals, ShardBuilder
from stagekit.shards.manifest import MANIFEST, Manifest, ShardRecord, blocks_name, index_name, shard_name
from stagekit.store.base import Store


def numbered(count: int, *, field: str = "txt", size: int = 0) -> list[tuple[str, dict[str, bytes]]]:
    """Samples ``000000``, ``000001``, … whose field holds their own number, filled up to ``size`` bytes."""
    return [(f"{number:06d}", {field: str(number).encode().ljust(size, b" ")}) for number in range(count)]


def build(
    store: Store, samples: Sequence[tuple[str, Mapping[str, bytes]]], *, shards: Sequence[int] | None = None, block_samples: int = 3
) -> Manifest:
    """Publish ``samples`` in shards of the given lengths, cut into blocks of ``block_samples`` samples where all have one size."""
    records, fields, largest, first = [], dict[str, list[int]](), 0, 0
    for number, length in enumerate(shards or [len(samples)]):
        chosen = samples[first : first + length]
        first += length
        one = max(sum(512 + len(data) + -len(data) % 512 for data in held.values()) for _, held in chosen)
        builder = ShardBuilder(block_size=one * block_samples)
        body = bytearray()
        for key, held in chosen:
            for piece in builder.sample(key, [(name, len(data), [data]) for name, data in held.items()]):
                body += piece
        for piece in builder.finish():
            body += piece
        built, name = builder.result, shard_name(number)
        store.put(name, bytes(body))
        store.put(index_name(name), built.index)
        store.put(blocks_name(name), built.table.to_bytes())
        records.append(ShardRecord.of(name, built))
        largest = max(largest, built.table.largest)
        for field, totals in built.fields.items():
            have = fields.setdefault(field, [0, 0])
            have[0] += totals.samples
            have[1] += totals.bytes
    assert first == len(samples)
    manifest = Manifest(tuple(records), {name: FieldTotals(*totals) for name, totals in fields.items()}, largest)
    store.put(MANIFEST, manifest.to_bytes())
    return manifest
