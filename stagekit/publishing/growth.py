"""What ``update`` needs to know: which samples a published data set holds, and whether the source still has them as they were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..config import StoreConfig
from ..errors import PublishError
from ..location import Location
from ..progress import Subscriber, ignore
from ..shards.archive import ArchiveReader
from ..shards.index import FieldTotals
from ..shards.manifest import Manifest, ShardRecord, shard_name
from ..shards.plan import Plan, PlannedSample, PlannedShard
from ..shards.sample import split_name
from ..store import open_store
from ..store.base import Store
from ..transfer.fetch import fetch_pieces
from .outline import counted

_SHOWN = 3

Published = list[tuple[str, dict[str, int]]]
"""The samples of a shard in order: key, and the size of each field."""


@dataclass(frozen=True, slots=True)
class ReadBack:
    """The job of reading a published shard's headers."""

    record: ShardRecord
    where: Location | Store
    config: StoreConfig | None


def published_samples(job: ReadBack, *, on_event: Subscriber = ignore) -> Published:
    """What a published shard holds, read from its tar. Raises ``CorruptShard`` when that is broken."""
    store = open_store(job.where, job.config, on_event=on_event)
    found: Published = []
    pieces = fetch_pieces(store, job.record.name, size=job.record.bytes)
    for member, _ in ArchiveReader(pieces, source=str(store.location / job.record.name)):
        parts = split_name(member.name)
        if parts is None:
            continue
        key, field = parts
        if not found or found[-1][0] != key:
            found.append((key, {}))
        found[-1][1][field] = member.size
    return found


def refuse_indexed(store: Store, manifest: Manifest) -> None:
    """Raise ``PublishError`` for a data set whose tars Stagekit did not write."""
    if any(record.url is not None for record in manifest.shards):
        raise PublishError(
            f"updating {store.location}: its shards were indexed where they lie, and --update goes on with shards that "
            "stagekit shard wrote; choose another destination"
        )


def as_published(
    store: Store, manifest: Manifest, published: Sequence[Published], listed: Mapping[str, PlannedSample]
) -> list[PlannedShard]:
    """The published shards as the source would make them today, by names and sizes.

    Raises ``PublishError`` naming samples that are gone from the source or have other fields or sizes there.
    """
    gone: list[str] = []
    changed: list[str] = []
    shards: list[PlannedShard] = []
    for number, (record, samples) in enumerate(zip(manifest.shards, published, strict=True)):
        for key, sizes in samples:
            sample = listed.get(key)
            if sample is None:
                gone.append(key)
            elif {planned.field: planned.size for planned in sample.fields} != sizes:
                changed.append(key)
        if not gone and not changed:
            shards.append(PlannedShard(number, record.name, tuple(listed[key] for key, _ in samples), record.bytes))
    for keys, what in ((gone, "gone from the source"), (changed, "changed in the source")):
        if keys:
            raise not_grown(store, f"{counted(len(keys), 'published sample')} {'is' if len(keys) == 1 else 'are'} {what} ({_some(keys)})")
    return shards


def not_grown(store: Store, why: str) -> PublishError:
    return PublishError(
        f"updating {store.location}: {why}, and --update only adds samples; it rewrites none. Nothing was changed. "
        "Publish the source as it is now to another destination"
    )


def appended(made: Plan, manifest: Manifest) -> tuple[PlannedShard, ...]:
    """The shards of ``made`` under names that come behind those of ``manifest``."""
    taken = {record.name for record in manifest.shards}
    first = len(manifest.shards)
    while any(shard_name(first + shard.number) in taken for shard in made.shards):
        first += 1
    return tuple(replace(shard, number=first + shard.number, name=shard_name(first + shard.number)) for shard in made.shards)


def summed(totals: Iterable[Mapping[str, FieldTotals]]) -> dict[str, FieldTotals]:
    """Samples and bytes of each field over all of ``totals``."""
    sums: dict[str, FieldTotals] = {}
    for fields in totals:
        for name, (samples, size) in fields.items():
            before = sums.get(name, FieldTotals(0, 0))
            sums[name] = FieldTotals(before.samples + samples, before.bytes + size)
    return sums


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:_SHOWN]) + (" …" if len(keys) > _SHOWN else "")
