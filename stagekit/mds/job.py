"""One planned shard into files of MosaicML's format, and these into the store: the unit of work that an executor runs.

``MDSWriter`` writes to a local disk, so each job has a folder there for its own files, which go into the store one after the other,
verified, and are removed. It is made again for a shard that a former run has finished, and then compared instead of sent.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from ..config import StoreConfig
from ..errors import MissingExtra, NotFound, OutOfSpace, SourceError
from ..location import Location
from ..progress import Progress, Stage, Subscriber, ignore
from ..publishing.destination import stored_sha256
from ..publishing.job import read_samples
from ..publishing.rate import Rate
from ..shards.index import Batch
from ..shards.plan import PlannedShard
from ..sources.base import Bad, OnBad, Source
from ..store import open_store
from ..store.base import Data, ObjectInfo, Store
from ..transfer.checksum import EtagOfParts
from ..transfer.put import Stored, part_size_for, put_file
from .columns import KEY, Columns, value_of
from .index import HASH, INDEX, Entry, bytes_of, name_of, renamed, sha256_of, shard_name
from .scratch import scratch_folder

LARGEST = 2**32 - 2**20
"""Bytes of a sample at most, with room for the rest of its shard: the format counts in 32 bits."""

_REPORT_EVERY_S = 0.1
_PIECE = 2**20


@dataclass(frozen=True, slots=True)
class MdsJob:
    """What to do with one planned shard. ``"compare"`` makes its files and sends none. ``resume`` says that a former run may have left
    objects of it."""

    source: Source
    shard: PlannedShard
    columns: Columns
    size_limit: int
    where: Location | Store
    config: StoreConfig | None
    task: Literal["publish", "compare"] = "publish"
    resume: bool = True
    on_bad: OnBad = "raise"
    rate: Rate | None = None


@dataclass(frozen=True, slots=True)
class MdsOutcome:
    """What became of a job: what the index will say of its files, none when every sample was bad and skipped. ``kept`` counts files that
    the store held already."""

    number: int
    entries: tuple[Entry, ...]
    fields: int = 0
    kept: int = 0
    sent_bytes: int = 0
    bad: tuple[Bad, ...] = ()
    objects: tuple[Stored, ...] = ()


def run_job(job: MdsJob, *, on_event: Subscriber = ignore) -> MdsOutcome:
    """Run one job. Running it again, or in two places at once, leaves the same objects.

    After a failure some of its files may be in the store; no index names them. Raises ``SourceError`` for raw data that is not what was
    listed (unless ``on_bad="skip"``), ``OutOfSpace`` when this machine's disk is full, ``StoreError`` for the store.
    """
    return _Work(job, on_event).run()


class _Work:
    def __init__(self, job: MdsJob, on_event: Subscriber) -> None:
        self._job = job
        self._on_event = on_event
        self._bad: list[Bad] = []
        self._samples = self._done = 0
        location = job.where if isinstance(job.where, Location) else job.where.location
        self._toll = job.rate.toll(location) if job.rate is not None else None
        self._reported_s = 0.0

    def run(self) -> MdsOutcome:
        job = self._job
        kept = sent = 0
        objects: list[Stored] = []
        with scratch_folder() as folder:
            made = self._write(folder)
            if job.task == "publish":
                store = open_store(job.where, job.config, on_event=self._on_event)
                for path, entry in made:
                    stored = self._held(store, path, entry) if job.resume else None
                    if stored is None:
                        stored = put_file(store, name_of(entry), path, on_bytes=self._passed)
                        sent += stored.size
                        if self._toll is not None:
                            self._toll.settle()
                        self._on_event(Stage("shard", name_of(entry)))
                    else:
                        kept += 1
                        self._on_event(Stage("kept", name_of(entry)))
                    objects.append(stored)
                    path.unlink()
        entries = tuple(entry for _, entry in made)
        fields = self._samples * (len(job.columns) - 1)
        return MdsOutcome(job.shard.number, entries, fields, kept, sent, tuple(self._bad), tuple(objects))

    def _write(self, folder: Path) -> list[tuple[Path, Entry]]:
        """The shard's files, with what the index will say of each."""
        job = self._job
        writer = _writer(job, folder)
        try:
            for key, values in self._values():
                writer.write({KEY: key, **values})
                self._samples += 1
            writer.finish()
            listed: list[Entry] = json.loads((folder / INDEX).read_bytes())["shards"]
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfSpace(
                    f"writing {job.shard.name} to {folder}: the disk or quota is full; a shard lies there before it is sent. Set TMPDIR to "
                    "a folder with more room, or choose a smaller --shard-size"
                ) from error
            raise
        # A sample that is larger than a shard makes the writer leave an empty one in front of it.
        filled = [entry for entry in listed if entry["samples"]]
        return [(folder / name_of(entry), renamed(entry, shard_name(job.shard.number, part))) for part, entry in enumerate(filled)]

    def _values(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each sample that can be read: its key and the values of its columns."""
        job = self._job
        for read in read_samples(job.source, job.shard.samples):
            if isinstance(read, Batch):
                for key, data in zip(read.keys, read.payloads, strict=True):
                    yield from self._sample(key, [(read.field, len(data), (data,))])
            elif isinstance(read[1], SourceError):
                self._skip(read[0], read[1])
            else:
                yield from self._sample(read[0], read[1])

    def _sample(self, key: str, payload: Iterable[tuple[str, int, Iterable[Data]]]) -> Iterator[tuple[str, dict[str, Any]]]:
        values: dict[str, Any] = {}
        total = 0
        try:
            for name, size, pieces in payload:
                total += size
                if total > LARGEST:
                    raise SourceError(
                        f"the sample {key!r} is larger than {LARGEST:,} bytes, and MosaicML's format counts in 32 bits; split it"
                    )
                data = _whole(key, name, size, pieces)
                values[name] = value_of(name, self._job.columns[name], data, key=key)
        except SourceError as error:
            self._skip(key, error)
            return
        self._done += total
        yield key, values
        self._report()

    def _skip(self, key: str, error: SourceError) -> None:
        if self._job.on_bad == "raise":
            raise error
        self._bad.append(Bad(key, str(error)))

    def _held(self, store: Store, path: Path, entry: Entry) -> Stored | None:
        """The object when the store holds this file already; ``None`` when it has to be sent."""
        name, size = name_of(entry), bytes_of(entry)
        try:
            info = store.head(name)
        except NotFound:
            return None
        if info.size != size or not (_has_etag(path, info) or stored_sha256(store, name) == sha256_of(entry)):
            return None
        return Stored(name, size, sha256_of(entry), info.etag)

    def _passed(self, size: int) -> None:
        if self._toll is not None:
            self._toll.went(size)

    def _report(self) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_s >= _REPORT_EVERY_S:
            self._reported_s = now_s
            name = self._job.shard.name
            self._on_event(Progress(name, self._samples * (len(self._job.columns) - 1), unit="files"))
            self._on_event(Progress(name, self._done, self._job.shard.bytes))


def require_writer() -> None:
    """Nothing when MosaicML's package is installed here, which is not imported for that. Raises ``MissingExtra``."""
    if find_spec("streaming") is None:
        raise _missing()


def _missing() -> MissingExtra:
    return MissingExtra.of("mosaicml", "mosaicml-streaming", "writing MosaicML's format")


def _writer(job: MdsJob, folder: Path) -> Any:
    try:
        from streaming import MDSWriter
    except ImportError:
        raise _missing() from None
    return MDSWriter(out=str(folder), columns=dict(job.columns), hashes=[HASH], size_limit=job.size_limit)


def _whole(key: str, name: str, size: int, pieces: Iterable[Data]) -> bytes:
    """A field's bytes, which must have the size that was announced."""
    held = list(pieces)
    data = held[0] if len(held) == 1 and isinstance(held[0], bytes) else b"".join(held)
    if len(data) != size:
        raise SourceError(
            f"the field {name!r} of the sample {key!r} was announced with {size} bytes and has {len(data)}: it changed while it was read. "
            "Try again when nothing writes to it"
        )
    return data


def _has_etag(path: Path, info: ObjectInfo) -> bool:
    etag = EtagOfParts.like(info, part_size_for(None))
    if etag is None:
        return False
    with path.open("rb") as file:
        while data := file.read(_PIECE):
            etag.update(data)
    return etag.gives(info)
