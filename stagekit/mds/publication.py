"""Raw data to a complete data set in MosaicML's format: in parallel, resumable at any point, ``index.json`` last."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal

from ..config import StoreConfig
from ..errors import Conflict, PublishError, SourceError
from ..location import Location
from ..progress import Message, Stage, Subscriber, ignore
from ..publishing import source_of
from ..publishing.begun import enter_and_note, note_ended
from ..publishing.claim import CLAIM, claimed, confirm_claim, release_claim
from ..publishing.destination import CLASSES, Found, classes_json, confirm_objects, content, is_probe, refuse_overlap
from ..publishing.meter import Meter
from ..publishing.publication import RawData
from ..publishing.running import Engine, Wanted, Work, open_engine
from ..publishing.summary import stream_it
from ..shards.plan import Dots
from ..sources.base import Bad, OnBad, Source
from ..sources.choice import SourceFormat
from ..store import Where, open_store
from ..store.base import ObjectInfo, Store
from ..store.removing import removal
from ..transfer.put import put_object
from ..units import counted, format_count, format_duration, format_rate, format_size
from . import index
from .index import INDEX, Entry
from .job import MdsJob, MdsOutcome, require_writer, run_job
from .outline import SHARD_SIZE, MdsOutline, mds_outline


@dataclass(frozen=True, slots=True)
class MdsPublication:
    """What a run of ``publish_mds`` did. ``sent`` and ``kept`` count files; ``sent_bytes`` is what left this machine."""

    location: Location
    entries: tuple[Entry, ...]
    outline: MdsOutline
    sent: int
    kept: int
    sent_bytes: int
    bad: tuple[Bad, ...]
    seconds: float
    config: StoreConfig | None = None
    unchanged: bool = False
    """Whether the destination held exactly this data set before, so that nothing was done."""

    @property
    def samples(self) -> int:
        return sum(entry["samples"] for entry in self.entries)

    @property
    def bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(map(index.bytes_of, self.entries))

    @property
    def lines(self) -> list[str]:
        """The result as text: what there is, what was done, and the lines that stream it."""
        if self.unchanged:
            done = f"nothing to do: {self.location} holds this data set already"
        else:
            speed = f", {format_rate(self.sent_bytes / self.seconds)}" if self.seconds > 0 else ""
            kept = f"; {format_count(self.kept)} more lay there already" if self.kept else ""
            done = f"published {self.location}: {counted(self.sent, 'shard')} sent in {format_duration(self.seconds)}{speed}{kept}"
        lines = [
            done,
            f"  {counted(self.samples, 'sample')} in {counted(len(self.entries), 'shard')} of MosaicML's format, {format_size(self.bytes)}",
            *(f"  {name}: {encoding}" for name, encoding in self.outline.columns.items()),
        ]
        if left_out := self.outline.plan.left_out_with(len(self.bad)):
            lines.append(f"  left out: {left_out}")
        if self.bad:
            lines.append(f"  skipped: {format_count(len(self.bad))} bad, listed above")
        return [*lines, *stream_it(self.code)]

    @property
    def code(self) -> list[str]:
        """The lines of Python that stream this data set."""
        where = f"local={self.location.path!r}"
        first = []
        if not self.location.is_directory:
            where = f"remote={str(self.location)!r}, local='/tmp/{self.location.name or 'dataset'}'"
            if self.config is not None and self.config.endpoint_url:
                first = ["import os", f"os.environ['S3_ENDPOINT_URL'] = {self.config.endpoint_url!r}"]
        names = ", ".join(f"sample[{name!r}]" for name in self.outline.columns)
        return [
            *first,
            "from streaming import StreamingDataset",
            f"for sample in StreamingDataset({where}, batch_size={min(64, self.samples)}):",
            f"    print({names})",
        ]

    @property
    def record(self) -> dict[str, Any]:
        """The result for programs."""
        return {
            "url": str(self.location),
            "format": "mds",
            "columns": dict(self.outline.columns),
            "samples": self.samples,
            "bytes": self.bytes,
            "shards": len(self.entries),
            "unchanged": self.unchanged,
            "sent_shards": self.sent,
            "kept_shards": self.kept,
            "sent_bytes": self.sent_bytes,
            "left_out": dict(sorted(self.outline.plan.skipped.items())),
            "bad": [{"path": bad.path, "reason": bad.reason} for bad in self.bad],
            "seconds": round(self.seconds, 3),
            "code": self.code,
        }


def shard_mds(
    source: RawData,
    dest: Where,
    *,
    columns: Iterable[str] | Mapping[str, str] = (),
    shard_size: str | int = SHARD_SIZE,
    samples_per_shard: int | None = None,
    labels: Literal["dir"] | None = None,
    dots: Dots = "refuse",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    symlinks: Literal["follow", "skip"] = "follow",
    source_format: SourceFormat = "auto",
    key: str | None = None,
    file_columns: Sequence[str] = (),
    text_field: str | None = None,
    on_bad: OnBad = "raise",
    workers: int | None = None,
    executor: Executor | str | None = None,
    takeover: bool = False,
    limit_rate: str | float | None = None,
    allow_mount: bool = False,
    store: StoreConfig | None = None,
    on_event: Subscriber = ignore,
) -> MdsPublication:
    """``stagekit.shard`` into MosaicML's format, for its ``StreamingDataset``: the same sources, options and promises.

    The data set is there completely or not at all: ``index.json`` is written last. After an error, Ctrl-C or a crash nothing is published,
    finished files stay, and the same call continues. Called again on an unchanged source it sends nothing; on a changed one it raises
    ``PublishError``.

    Each field becomes a column, and the key the column ``__key__``; ``columns`` (``["cls:int64"]`` or ``{"cls": "int64"}``) names encodings
    where those of the fields' extensions are not wanted. Every sample must have every field. Files have ``shard_size`` bytes at most,
    unless one sample alone is larger, and lie on this machine's disk, one planned shard a worker, before they are sent.

    >>> stagekit.shard_mds("raw/digits", "s3://bucket/digits-mds", labels="dir")  # doctest: +SKIP
    """
    prepared = source_of(
        source,
        labels=labels,
        dots=dots,
        include=include,
        exclude=exclude,
        symlinks=symlinks,
        source_format=source_format,
        key=key,
        file_columns=file_columns,
        text_field=text_field,
        on_bad=on_bad,
        allow_mount=allow_mount,
        store=store,
        on_event=on_event,
    )
    return publish_mds(
        prepared,
        dest,
        columns=columns,
        shard_size=shard_size,
        samples_per_shard=samples_per_shard,
        on_bad=on_bad,
        workers=workers,
        executor=executor,
        takeover=takeover,
        limit_rate=limit_rate,
        store=store,
        on_event=on_event,
    )


def publish_mds(
    source: Source,
    dest: Where,
    *,
    columns: Iterable[str] | Mapping[str, str] = (),
    shard_size: str | int = SHARD_SIZE,
    samples_per_shard: int | None = None,
    on_bad: OnBad = "raise",
    workers: int | None = None,
    executor: Executor | str | None = None,
    takeover: bool = False,
    limit_rate: str | float | None = None,
    store: StoreConfig | None = None,
    on_event: Subscriber = ignore,
) -> MdsPublication:
    """``shard_mds`` for a prepared source. The promises and arguments are the same."""
    started_s = time.monotonic()
    wanted = Wanted.of(workers, executor, limit_rate)
    opened = open_store(dest, store, on_event=on_event)
    refuse_overlap(source.location, opened.location)
    plan = mds_outline(source, columns=columns, shard_size=shard_size, samples_per_shard=samples_per_shard)
    for note in plan.plan.notes:
        on_event(Message(note, "warning"))
    for bad in plan.plan.bad:
        on_event(Message(f"skipped {bad.path}: {bad.reason}", "warning"))
    run = _Run(source, plan, dest, opened, store, on_bad, on_event, started_s)
    work = Work(len(plan.shards), plan.bytes, plan.plan.files)
    with open_engine(wanted, work, opened.location, run.on_shard_event) as engine:
        published = run.publish(engine, takeover=takeover, here=wanted.executor is None)
    note_ended(opened.location)
    return published


class _Run:
    """One publication in progress."""

    def __init__(
        self,
        source: Source,
        plan: MdsOutline,
        dest: Where,
        store: Store,
        config: StoreConfig | None,
        on_bad: OnBad,
        on_event: Subscriber,
        started_s: float,
    ) -> None:
        self._source = source
        self._outline = plan
        text = json.dumps({"plan": plan.plan.plan.digest, "columns": dict(plan.columns), "shard_size": plan.shard_size}, sort_keys=True)
        self._digest = hashlib.sha256(f"mds {text}".encode()).hexdigest()
        # A store that was opened by somebody else travels as it is; a location is opened afresh by each worker.
        self._where = dest if isinstance(dest, Store) else store.location
        self._store = store
        self._config = config
        self._on_bad = on_bad
        self._on_event = on_event
        self._started_s = started_s
        self._meter = Meter(on_event)

    def publish(self, engine: Engine, *, takeover: bool, here: bool) -> MdsPublication:
        """``here`` says that the workers are processes of this machine, with the packages that it has."""
        found = look(self._store)
        published = read_index(self._store)
        if published is None:
            if here:
                require_writer()  # before the claim: teardown would ask for shards of which none was made
            resume = enter_and_note(self._store, self._config, self._digest, found, takeover=takeover, again=look, uploads="")
            # Between looking and claiming another run may have finished.
            published = read_index(self._store)
            if published is None:
                return self._write(engine, resume=resume)
            release_claim(self._store)
            found = look(self._store)
        return self._compare(engine, published, found)

    def _write(self, engine: Engine, *, resume: bool) -> MdsPublication:
        self._on_event(Stage("claimed", str(self._store.location)))
        with claimed(self._where, self._config, self._digest):
            outcomes = self._run(engine, self._jobs(engine, "publish", resume=resume))
            entries = _entries(outcomes)
            if not entries:
                raise SourceError(f"reading {self._source.name}: not one sample could be read; nothing was published")
            confirm_objects(self._store, (info for outcome in outcomes for info in outcome.objects), prefix="")
            self._on_event(Stage("confirmed", str(self._store.location)))
            confirm_claim(self._store, self._digest)
            self._commit(index.to_bytes(entries))
        self._on_event(Stage("published", str(self._store.location / INDEX)))
        return self._publication(entries, outcomes)

    def _commit(self, data: bytes) -> None:
        """The names of the classes, then the index, then the claim goes. The data set exists from the index on."""
        store = self._store
        if self._outline.plan.classes:
            put_object(store, CLASSES, classes_json(self._outline.plan.classes))
        exclusive = store.conditional_create()
        before = None if exclusive else content(store, INDEX)
        if before is None:
            try:
                put_object(store, INDEX, data, if_absent=exclusive)
            except Conflict:
                before = content(store, INDEX)
        if before is not None and before != data:
            raise self._holds_another("it was published while this run was writing")
        release_claim(store)

    def _compare(self, engine: Engine, published: list[Entry], found: Found) -> MdsPublication:
        """The destination is complete. If it holds this very data set, send what got lost since; else refuse, having changed nothing."""
        if self._on_bad == "raise" and sum(entry["samples"] for entry in published) != self._outline.plan.plan.samples:
            raise self._holds_another("it holds another number of samples")
        outcomes = self._run(engine, self._jobs(engine, "compare", resume=True))
        if _entries(outcomes) != published:
            raise self._holds_another("its files would be others from the source, with these options, as it is now")
        lost = [outcome.number for outcome in outcomes if not all(_is_whole(entry, found) for entry in outcome.entries)]
        if lost:
            self._on_event(Message(f"files of {counted(len(lost), 'shard')} are missing or damaged: sent again", "warning"))
            jobs = self._jobs(engine, "publish", resume=True)
            again = {outcome.number: outcome for outcome in self._run(engine, [jobs[number] for number in lost])}
            outcomes = [again.get(outcome.number, outcome) for outcome in outcomes]
            if _entries(outcomes) != published:
                raise SourceError(f"reading {self._source.name}: it changed while it was read; run again once it stands still")
        if found.claimed:  # a run that was killed between its index and its last step
            release_claim(self._store)
        return self._publication(published, outcomes, unchanged=not lost)

    def _holds_another(self, why: str) -> PublishError:
        return PublishError(
            f"publishing to {self._store.location}: it holds another data set in MosaicML's format: {why}. Nothing of it was changed. "
            f"Choose another destination, or put this one in its place: {removal(self._store, INDEX)}, then the same with --takeover "
            "(takeover=True)"
        )

    def _jobs(self, engine: Engine, task: Literal["publish", "compare"], *, resume: bool) -> list[MdsJob]:
        return [
            MdsJob(
                self._source,
                shard,
                self._outline.columns,
                self._outline.shard_size,
                self._where,
                self._config,
                task,
                resume,
                self._on_bad,
                engine.rate,
            )
            for shard in self._outline.shards
        ]

    def _run(self, engine: Engine, jobs: Sequence[MdsJob]) -> list[MdsOutcome]:
        """All jobs' outcomes, in order."""
        self._meter.begin([job.shard for job in jobs])
        outcomes = []
        for _, outcome in engine.each(run_job, jobs):
            outcomes.append(outcome)
            for bad in outcome.bad:
                self._on_event(Message(f"skipped {bad.path}: {bad.reason}", "warning"))
            self._meter.shard_done(outcome.number, outcome.fields)
        return sorted(outcomes, key=lambda outcome: outcome.number)

    def on_shard_event(self, event: Any) -> None:
        """Shards report their own bytes and files; a person wants the sum."""
        if not self._meter.takes(event):
            self._on_event(event)

    def _publication(self, entries: list[Entry], outcomes: list[MdsOutcome], *, unchanged: bool = False) -> MdsPublication:
        sent = sum(len(outcome.objects) - outcome.kept for outcome in outcomes)
        return MdsPublication(
            location=self._store.location,
            entries=tuple(entries),
            outline=self._outline,
            sent=sent,
            kept=len(entries) - sent,
            sent_bytes=sum(outcome.sent_bytes for outcome in outcomes),
            bad=(*self._outline.plan.bad, *(bad for outcome in outcomes for bad in outcome.bad)),
            seconds=time.monotonic() - self._started_s,
            config=self._config,
            unchanged=unchanged,
        )


def look(store: Store) -> Found:
    """List the destination. Raises ``PublishError`` naming the first object that no publication in this format made."""
    objects: dict[str, ObjectInfo] = {}
    claimed = False
    for info in store.list():
        if info.key == CLAIM:
            claimed = True
        elif index.is_shard(info.key):
            objects[info.key] = info
        elif info.key not in (INDEX, CLASSES) and not is_probe(info.key):
            raise PublishError(
                f"publishing to {store.location}: it holds {info.key!r}, which is no part of a data set in MosaicML's format; nothing was "
                f"written. Choose an empty destination, such as {store.location / 'mds'}"
            )
    return Found(None, objects, claimed)


def read_index(store: Store) -> list[Entry] | None:
    """What is published at the destination, if anything is."""
    data = content(store, INDEX)
    return None if data is None else index.from_bytes(data, source=str(store.location / INDEX))


def _entries(outcomes: Sequence[MdsOutcome]) -> list[Entry]:
    return [entry for outcome in outcomes for entry in outcome.entries]


def _is_whole(entry: Entry, found: Found) -> bool:
    info = found.objects.get(index.name_of(entry))
    return info is not None and info.size == index.bytes_of(entry)
