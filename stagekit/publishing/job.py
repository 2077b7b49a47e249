"""One shard from its source into the store: the unit of work that an executor runs, wherever it runs.

The objects of a shard are written in the order tar, index, digests of samples, block table, each verified before the next. The block
table is the shard's commit: where it lies, the tar it describes lies too. So a shard that a former run finished is recognised by building
it again from the source without sending it, which costs reading instead of sending.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..config import StoreConfig
from ..errors import NotFound, SourceError
from ..location import Location
from ..parallel import each
from ..pieces import keep_freed_memory
from ..progress import Progress, Stage, Subscriber, ignore
from ..shards.index import Batch, BuiltShard, FieldTotals, ShardBuilder
from ..shards.manifest import ShardRecord, blocks_name, index_name, samples_name
from ..shards.plan import PlannedSample, PlannedShard
from ..sources.base import Bad, InOrder, OnBad, Read, Source
from ..store import open_store
from ..store.base import Data, ObjectInfo, Store
from ..transfer.checksum import EtagOfParts
from ..transfer.put import Stored, part_size_for, put_object
from .destination import content, stored_sha256
from .rate import Rate
from .sending import tar_writer

_REPORT_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class ShardJob:
    """What to do with one shard.

    ``task`` is ``"publish"``: the shard's objects are in the store afterwards; ``"compare"``: build it and send nothing.
    ``resume`` says that a former run may have left objects of this shard.
    """

    source: Source
    shard: PlannedShard
    where: Location | Store
    config: StoreConfig | None
    task: Literal["publish", "compare"] = "publish"
    resume: bool = True
    on_bad: OnBad = "raise"
    rate: Rate | None = None


@dataclass(frozen=True, slots=True)
class ShardOutcome:
    """What became of a job. ``record`` is ``None`` when every sample of the shard was bad and skipped: there is no such shard then.

    ``kept`` means that the store held the shard already. ``objects`` is what the store holds, to be compared before the commit.
    """

    number: int
    record: ShardRecord | None
    fields: dict[str, FieldTotals] = field(default_factory=dict)
    largest_block: int = 0
    kept: bool = False
    sent_bytes: int = 0
    bad: tuple[Bad, ...] = ()
    objects: tuple[Stored, ...] = ()


def publish_shard(job: ShardJob, *, on_event: Subscriber = ignore) -> ShardOutcome:
    """Run one job. Running it again, or in two places at once, leaves the same objects.

    After a failure there may be a tar without a block table; the next run replaces it. Raises ``SourceError`` for raw data that is not
    what was listed (unless ``on_bad="skip"``), ``StoreError`` for the store.
    """
    _prepare()
    return _Work(job, open_store(job.where, job.config, on_event=on_event), on_event).run()


def read_samples(source: Source, samples: Sequence[PlannedSample], passed_over: Container[str] = ()) -> Iterator[Read]:
    """The payload of each of ``samples`` in order, or the ``SourceError`` in its place. A source that reads them singly is not asked for
    the keys in ``passed_over``; from another one they may come all the same."""
    if isinstance(source, InOrder):
        return source.read_in_order(samples)

    def read(sample: PlannedSample) -> Read:
        try:
            return sample.key, source.read(sample)
        except SourceError as error:
            return sample.key, error

    wanted = (sample for sample in samples if sample.key not in passed_over)
    return map(read, wanted) if source.readers == 1 else each(read, wanted, threads=source.readers)


_prepare = functools.cache(keep_freed_memory)  # once in each process that does jobs


class _SampleSpoiled(Exception):
    """A sample failed after some of its bytes were passed on: start over without it."""


class _NothingLeft(Exception):
    """Every sample of the shard was bad."""


class _AlreadyThere(Exception):
    """Another run with the same plan finished this shard first."""


class _Work:
    def __init__(self, job: ShardJob, store: Store, on_event: Subscriber) -> None:
        self._job = job
        self._store = store
        self._on_event = on_event
        self._name = job.shard.name
        self._bad: dict[str, Bad] = {}
        self._toll = job.rate.toll(store.location) if job.rate is not None else None
        self._reported_s = 0.0

    def run(self) -> ShardOutcome:
        resume = self._job.resume
        while True:
            try:
                if self._job.task == "compare":
                    return self._outcome(self._build(), kept=True)
                if resume and (kept := self._held()) is not None:
                    return kept
                return self._send()
            except _SampleSpoiled:
                continue
            except _AlreadyThere:
                resume = True
            except _NothingLeft:
                return ShardOutcome(self._job.shard.number, None, bad=tuple(self._bad.values()))

    def _pieces(self, builder: ShardBuilder) -> Iterator[Data]:
        """The shard's bytes, made from the samples that can be read."""
        done = 0
        for read in read_samples(self._job.source, self._job.shard.samples, self._bad):
            if isinstance(read, Batch):
                for piece in builder.batch(read):
                    done += len(piece)
                    yield piece
                self._report(done, builder)
                continue
            key, payload = read
            if key in self._bad:
                continue
            if isinstance(payload, SourceError):
                self._skip(key, payload)
                continue
            try:
                for piece in builder.sample(key, payload):
                    done += len(piece)
                    yield piece
            except SourceError as error:
                self._skip(key, error)
                raise _SampleSpoiled from error
            self._report(done, builder)
        if not builder.samples:
            raise _NothingLeft
        yield from builder.finish()

    def _skip(self, key: str, error: SourceError) -> None:
        if self._job.on_bad == "raise":
            raise error
        self._bad[key] = Bad(key, str(error))

    def _build(self, digests: EtagOfParts | None = None) -> BuiltShard:
        """The shard's digests, without keeping or sending a byte."""
        builder = ShardBuilder()
        for piece in self._pieces(builder):
            if digests is not None:
                digests.update(piece)
        return builder.result

    def _held(self) -> ShardOutcome | None:
        """The outcome when the store holds this shard as the source makes it; ``None`` when it has to be sent."""
        store, name = self._store, self._name
        table = content(store, blocks_name(name))
        if table is None:
            return None
        index, of_samples = content(store, index_name(name)), content(store, samples_name(name))
        try:
            info = store.head(name)
        except NotFound:
            info = ObjectInfo(name, 0)
        digests = EtagOfParts.like(info, part_size_for(None))
        built = self._build(digests)
        same = built.table.to_bytes() == table and built.bytes == info.size
        if same and digests is not None and not digests.gives(info):
            # An etag may look like an MD5 and be none (server-side encryption), so it can only acquit.
            same = stored_sha256(store, name) == built.sha256
        if not same:
            # First the commit, then what it stands for: else a kill in between would leave a block table beside another tar.
            store.delete(blocks_name(name))
            return None
        sent = 0
        if index != built.index:
            sent = put_object(store, index_name(name), built.index).size
        if of_samples != built.sample_digests:
            sent += put_object(store, samples_name(name), built.sample_digests).size
        self._went(sent, whole=True)
        self._on_event(Stage("kept", name))
        record = ShardRecord.of(name, built)
        objects = (
            Stored(name, info.size, record.sha256, info.etag),
            Stored(index_name(name), len(built.index), record.idx_sha256),
            Stored(blocks_name(name), len(table), record.blocks_sha256),
        )
        return self._outcome(built, kept=not sent, sent_bytes=sent, objects=objects)

    def _send(self) -> ShardOutcome:
        store, name = self._store, self._name
        builder = ShardBuilder()
        with tar_writer(store, name, builder, check=self._not_finished_by_another) as writer:
            for piece in self._pieces(builder):
                writer.write(piece)
                self._went(len(piece))
            self._went(0, whole=True)  # before what is left of it goes
        tar, built = writer.stored, builder.result
        self._on_event(Stage("tar", name))
        index = put_object(store, index_name(name), built.index)
        self._on_event(Stage("index", name))
        digests = put_object(store, samples_name(name), built.sample_digests)
        table = put_object(store, blocks_name(name), built.table.to_bytes())
        self._on_event(Stage("shard", name))
        objects = tar, index, digests, table
        self._went(sum(one.size for one in objects[1:]), whole=True)
        return self._outcome(built, sent_bytes=sum(one.size for one in objects), objects=objects)

    def _went(self, size: int, *, whole: bool = False) -> None:
        """``size`` bytes were sent; ``whole``: with them, all of an object."""
        if self._toll is not None:
            self._toll.went(size)
            if whole:
                self._toll.settle()

    def _not_finished_by_another(self) -> None:
        """Called when the tar is complete and not yet visible. A run beside this one may have finished the shard, and a published object
        must not be replaced under its readers, not even by the same bytes."""
        try:
            self._store.head(blocks_name(self._name))
        except NotFound:
            return
        raise _AlreadyThere

    def _outcome(self, built: BuiltShard, *, kept: bool = False, sent_bytes: int = 0, objects: tuple[Stored, ...] = ()) -> ShardOutcome:
        return ShardOutcome(
            self._job.shard.number,
            ShardRecord.of(self._name, built),
            built.fields,
            built.table.largest,
            kept,
            sent_bytes,
            tuple(self._bad.values()),
            objects,
        )

    def _report(self, done: int, builder: ShardBuilder) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_s >= _REPORT_EVERY_S:
            self._reported_s = now_s
            self._on_event(Progress(self._name, builder.files, unit="files"))
            self._on_event(Progress(self._name, done, self._job.shard.bytes))
