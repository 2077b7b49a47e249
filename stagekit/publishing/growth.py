"""What ``update`` needs to know: which samples a published data set holds, and whether the source still has them as they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..config import StoreConfig
from ..errors import PublishError
from ..location import Location
from ..progress import Subscriber, ignore
from ..shards.archive import ArchiveReader
from ..shards.index import FieldTotals
from ..shards.manifest import Manifest, ShardRecord, shard_name
from ..shards.plan import Plan, PlannedSample, PlannedShard, SampleRange
from ..shards.sample import split_name
from ..store import open_store
from ..store.base import Store
from ..transfer.fetch import fetch_pieces
from ..units import counted

_SHOWN = 3

_DIGEST = "S16"  # numpy's type for 16 bytes; all have that length, so what it does with NULs at their ends does no harm


class Fingerprints:
    """Of each of many samples, in order, a digest of its key and one of its fields' names and sizes: 32 bytes in all."""

    def __init__(self) -> None:
        self._keys = bytearray()
        self._shapes = bytearray()

    def add(self, key: str, fields: Iterable[tuple[str, int]]) -> None:
        self._keys += xxhash.xxh3_128_digest(key.encode())
        self._shapes += xxhash.xxh3_128_digest("\n".join(f"{size} {name}" for name, size in sorted(fields)).encode())

    def __len__(self) -> int:
        return len(self._keys) // 16

    @property
    def keys(self) -> NDArray[np.bytes_]:
        return np.frombuffer(self._keys, _DIGEST)

    @property
    def shapes(self) -> NDArray[np.bytes_]:
        return np.frombuffer(self._shapes, _DIGEST)


@dataclass(frozen=True, slots=True)
class ReadBack:
    """The job of reading a published shard's headers."""

    record: ShardRecord
    where: Location | Store
    config: StoreConfig | None


def published_fingerprints(job: ReadBack, *, on_event: Subscriber = ignore) -> Fingerprints:
    """What a published shard holds, read from its tar. Raises ``CorruptShard`` when that is broken."""
    found = Fingerprints()
    for key, fields in _published(job, on_event):
        found.add(key, fields)
    return found


def _published(job: ReadBack, on_event: Subscriber = ignore) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Each sample of a published shard: its key, and names and sizes of its fields."""
    store = open_store(job.where, job.config, on_event=on_event)
    pieces = fetch_pieces(store, job.record.name, size=job.record.bytes)
    key, fields = "", list[tuple[str, int]]()
    for member, _ in ArchiveReader(pieces, source=str(store.location / job.record.name)):
        parts = split_name(member.name)
        if parts is None:
            continue
        if fields and parts[0] != key:
            yield key, fields
            fields = []
        key = parts[0]
        fields.append((parts[1], member.size))
    if fields:
        yield key, fields


def refuse_indexed(store: Store, manifest: Manifest) -> None:
    """Raise ``PublishError`` for a data set whose tars Stagekit did not write."""
    if any(record.url is not None for record in manifest.shards):
        raise PublishError(
            f"updating {store.location}: its shards were indexed where they lie, and --update goes on with shards that "
            "stagekit shard wrote; choose another destination"
        )


@dataclass(frozen=True, slots=True)
class Growth:
    """``before``: the published shards as the source would make them today, by names and sizes. ``new``: what else it has, in its order."""

    before: list[PlannedShard]
    new: Sequence[PlannedSample]


def growth(store: Store, jobs: Sequence[ReadBack], published: Sequence[Fingerprints], samples: Sequence[PlannedSample]) -> Growth:
    """Compare what is ``published``, by the shards of ``jobs``, with what the source has. No sample is kept as an object.

    Raises ``PublishError`` naming samples that are gone from the source or have other fields or sizes there.
    """
    listed = Fingerprints()
    for sample in samples:
        listed.add(sample.key, [(planned.field, planned.size) for planned in sample.fields])
    order = np.argsort(listed.keys, kind="stable")
    ordered = listed.keys[order]
    is_new = np.ones(len(listed), np.bool_)
    positions: list[NDArray[np.int64]] = []
    gone: list[NDArray[np.bool_]] = []
    changed: list[NDArray[np.bool_]] = []
    for shard in published:
        found = order[np.minimum(np.searchsorted(ordered, shard.keys), len(ordered) - 1)]
        here = listed.keys[found] == shard.keys
        positions.append(found)
        gone.append(~here)
        changed.append(here & (listed.shapes[found] != shard.shapes))
        is_new[found[here]] = False
    for differing, what in ((gone, "gone from the source"), (changed, "changed in the source")):
        count = sum(int(flags.sum()) for flags in differing)
        if count:
            verb = "is" if count == 1 else "are"
            raise not_grown(store, f"{counted(count, 'published sample')} {verb} {what} ({_keys(jobs, differing)})")
    before = [
        PlannedShard(number, job.record.name, _picked(samples, where)[:], job.record.bytes)
        for number, (job, where) in enumerate(zip(jobs, positions, strict=True))
    ]
    return Growth(before, _picked(samples, np.flatnonzero(is_new)))


def moved_classes(published: Sequence[str], now: Sequence[str]) -> str | None:
    """Why samples have another class number than when they were published; ``None`` when that is not it. Numbers follow from the names."""
    if not published:
        return "the source has classes now (--labels dir), and had none when it was published" if now else None
    if not now:
        return "its samples were published with their classes (--labels dir), and the source is read without now"
    numbers = {name: number for number, name in enumerate(now)}
    moved = [name for number, name in enumerate(published) if numbers.get(name, number) != number]
    if not moved:
        return None
    added = [name for name in now if name not in published]
    gone = [name for name in published if name not in numbers]
    causes = [f"{', '.join(map(repr, names[:_SHOWN]))} {verb}" for names, verb in ((added, "came"), (gone, "went")) if names]
    name = moved[0]
    return (
        f"the numbers of its classes moved ({'; '.join(causes)}): {name!r} was class {published.index(name)} and would be "
        f"{numbers[name]}, since the folders count in the order of their names. A new class whose name comes last moves none"
    )


def _picked(samples: Sequence[PlannedSample], positions: NDArray[np.int64]) -> Sequence[PlannedSample]:
    if isinstance(samples, SampleRange):
        return samples.picked(positions.tolist())
    return tuple(samples[position] for position in positions.tolist())


def _keys(jobs: Sequence[ReadBack], flags: Sequence[NDArray[np.bool_]]) -> str:
    """The first few of the published keys that are flagged, read from their tars once more."""
    wanted = ((job, marked) for job, marked in zip(jobs, flags, strict=True) if marked.any())
    found = (key for job, marked in wanted for (key, _), is_it in zip(_published(job), marked.tolist(), strict=True) if is_it)
    shown = list(islice(found, _SHOWN + 1))
    return ", ".join(shown[:_SHOWN]) + (" …" if len(shown) > _SHOWN else "")


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
