"""``stagekit shard``: raw data to a complete data set, in parallel, resumable at any point, the manifest last."""

from __future__ import annotations

import hashlib
import operator
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ..config import StoreConfig
from ..errors import ManifestError, PublishError, SourceError, Unreachable, UsageError
from ..location import Location
from ..mounts import refuse_mount
from ..progress import Event, Message, Stage, Subscriber, ignore
from ..shards.manifest import MANIFEST, Manifest, blocks_name, index_name
from ..shards.plan import Dots, PlannedShard
from ..shards.plan import plan as plan_shards
from ..sources.base import Bad, OnBad, Source
from ..sources.choice import RowOptions, SourceFormat, table_source
from ..sources.files import FileRules
from ..sources.folder import FolderSource
from ..sources.prefix import PrefixSource
from ..store import Where, open_store
from ..store.base import Store
from ..units import counted, format_count, format_duration, format_rate, parse_size
from .begun import enter_and_note, note_ended
from .claim import claimed, confirm_claim, release_claim
from .destination import Found, commit, confirm_objects, holds_another, look, published_classes, read_manifest, refuse_overlap
from .growth import ReadBack, appended, growth, moved_classes, not_grown, published_fingerprints, refuse_indexed, summed
from .job import ShardJob, ShardOutcome, publish_shard
from .meter import Meter
from .outline import Outline, outline
from .running import Engine, Wanted, Work, open_engine
from .summary import dataset_lines, dataset_record, stream_it, streaming_code
from .writer import ShardWriter

if TYPE_CHECKING:
    from ..dataset import Dataset


RawData = str | os.PathLike[str] | Location | Source


@dataclass(frozen=True, slots=True)
class Publication:
    """What a run of ``publish`` did. ``sent`` and ``kept`` count shards; ``sent_bytes`` is what left this machine."""

    location: Location
    manifest: Manifest
    outline: Outline
    sent: int
    kept: int
    sent_bytes: int
    bad: tuple[Bad, ...]
    seconds: float
    config: StoreConfig | None = None
    grown_from: Manifest | None = None
    unchanged: bool = False
    """Whether the destination held exactly this data set before, so that nothing was done."""

    @property
    def lines(self) -> list[str]:
        """The result as text: what there is, what was done, and the lines that stream it."""
        manifest = self.manifest
        if self.unchanged:
            done = f"nothing to do: {self.location} holds this data set already"
        else:
            speed = f", {format_rate(self.sent_bytes / self.seconds)}" if self.seconds > 0 else ""
            kept = f"; {format_count(self.kept)} more lay there already" if self.kept else ""
            verb = "published" if self.grown_from is None else "updated"
            done = f"{verb} {self.location}: {counted(self.sent, 'shard')} sent in {format_duration(self.seconds)}{speed}{kept}"
            if self.grown_from is not None:
                done += f"; {counted(manifest.samples - self.grown_from.samples, 'new sample')}"
        lines = [done, *dataset_lines(manifest)]
        if left_out := self.outline.left_out_with(len(self.bad)):
            lines.append(f"  left out: {left_out}")
        if self.bad:
            lines.append(f"  skipped: {format_count(len(self.bad))} bad, listed above")
        return [*lines, *stream_it(self.code)]

    @property
    def code(self) -> list[str]:
        """The lines of Python that stream this data set from where it was published, with the same settings."""
        return streaming_code(self.location, self.manifest, self.config)

    @property
    def record(self) -> dict[str, Any]:
        """The result for programs."""
        return {
            **dataset_record(self.location, self.manifest),
            "unchanged": self.unchanged,
            "sent_shards": self.sent,
            "kept_shards": self.kept,
            "sent_bytes": self.sent_bytes,
            "left_out": dict(sorted(self.outline.skipped.items())),
            "bad": [{"path": bad.path, "reason": bad.reason} for bad in self.bad],
            "seconds": round(self.seconds, 3),
            "code": self.code,
        }


def source_of(
    source: RawData,
    *,
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
    allow_mount: bool = False,
    store: StoreConfig | None = None,
    on_event: Subscriber = ignore,
) -> Source:
    """The source for what a person named: a folder, a table, the objects below a URL, or a ``Source`` as it is.

    A folder on a mounted bucket is refused untouched. ``store`` is how to reach a URL. Raises ``UsageError`` for a published data set,
    unless its files are asked for by ``source_format="files"``.
    """
    of_files = bool(labels or include or exclude or dots != "refuse" or symlinks != "follow")
    if isinstance(file_columns, str):
        raise UsageError("file_columns: give a list of columns, not one text")
    row_options = RowOptions(key, tuple(file_columns), text_field)
    if isinstance(source, Source):
        if of_files or row_options.given or source_format != "auto":
            raise UsageError(
                "labels, dots, include, exclude, symlinks, source_format, key, file_columns and text_field are for paths and URLs; "
                "give them to the source itself"
            )
        return source
    rules = FileRules(labels, dots, tuple(include), tuple(exclude), on_bad)
    location = Location.parse(source)
    if location.is_directory:
        warning = refuse_mount(location.path, "packing the small files of", allow_mount=allow_mount).warning
        if warning:
            on_event(Message(warning, "warning"))
    if source_format == "auto":
        _refuse_dataset(location, store)
    table = table_source(location, source_format, row_options, on_bad, store=store)
    if table is not None:
        if of_files:
            raise UsageError(
                f"labels, dots, include, exclude and symlinks are for folders of files, and {location} is read as rows or documents; "
                "leave them out, or say --source-format files"
            )
        return table
    if not location.is_directory:
        return PrefixSource(location, rules, store)
    return FolderSource(location.path, rules, symlinks)


def _refuse_other_content(store: Store, outcomes: Sequence[ShardOutcome], manifest: Manifest, before: Sequence[PlannedShard]) -> None:
    """Raise ``PublishError`` unless the source makes the published shards again."""
    for outcome, record, shard in zip(outcomes, manifest.shards, before, strict=True):
        if outcome.record != record:
            raise not_grown(
                store,
                f"published samples have other content in the source now, among those of {record.name} "
                f"({shard.samples[0].key} to {shard.samples[-1].key})",
            )


def _refuse_dataset(location: Location, store: StoreConfig | None) -> None:
    """Raise ``UsageError`` where a published data set lies: its shards are no raw files. A ``manifest.json`` of another kind may be one."""
    try:
        local = location.is_directory
        data = (location.local_path / MANIFEST).read_bytes() if local else bytes(open_store(location, store).get(MANIFEST))
        Manifest.from_bytes(data, source=str(location / MANIFEST))
    except (Unreachable, TimeoutError):
        raise
    except (OSError, ManifestError):  # "no such object" as well: whoever lists the source says what else is wrong
        return
    raise UsageError(
        f"packing {location}: it is a published data set already; stagekit pull {location} DIRECTORY copies it. Were source "
        "and destination swapped? To pack its files as they are, say --source-format files"
    )


def shard(
    source: RawData | Iterable[Mapping[str, Any]],
    dest: Where,
    *,
    shard_size: str | int = "256MiB",
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
    update: bool = False,
    limit_rate: str | float | None = None,
    allow_mount: bool = False,
    store: StoreConfig | None = None,
    on_event: Subscriber = ignore,
) -> Dataset:
    """Pack ``source`` into WebDataset shards at ``dest`` and return the data set.

    ``source`` is a folder, a table (JSON lines, CSV, Parquet, what ``datasets`` saved) or text, by its path or URL; a ``Source``; or any
    iterable of samples as ``ShardWriter.write`` takes them (its docstring then holds: a stream cannot be continued, so a rerun starts
    afresh). ``source_format`` says which where the name does not.

    The data set is there completely or not at all: its manifest is written last. After an error, Ctrl-C or a crash nothing is published,
    finished shards stay, and the same call continues with what is missing; the result is byte-identical to an undisturbed run, whatever
    the number of workers. Called again on an unchanged source it sends nothing; on a changed one it raises ``PublishError``.

    ``shard_size`` bounds a shard including headers and padding, unless one sample alone is larger; ``samples_per_shard`` bounds its
    samples. ``labels="dir"`` reads a folder of class folders and adds the field ``cls``. ``dots`` says what ``cat.v1.jpg`` beside
    ``cat.v2.jpg`` means. ``include`` and ``exclude`` are globs. Of a table, ``key`` is the column of the keys (row numbers unless
    given), ``file_columns`` hold paths of files to be packed, and ``text_field`` is the column whose text is the sample.
    ``on_bad="skip"`` counts files and rows that cannot be packed and goes on.
    ``workers`` processes read and send (as many as the cores and the work ask for unless given); or ``executor`` does: any
    ``concurrent.futures.Executor``, or the URL of an engine (``dask://host:port``). ``takeover`` removes what a dead run of other data
    left at ``dest``. ``update`` adds new samples of the source to the data set at ``dest``, in further shards; it rewrites none and raises
    ``PublishError`` when published samples changed or are gone. ``limit_rate`` (``"20MB/s"``) bounds what all workers send.

    >>> ds = stagekit.shard("raw/digits", "s3://bucket/digits", labels="dir")  # doctest: +SKIP
    """
    from ..dataset import Dataset

    if not isinstance(source, str | os.PathLike | Location | Source):
        others = [
            labels,
            include,
            exclude,
            workers,
            executor,
            limit_rate,
            update,
            dots != "refuse",
            symlinks != "follow",
            source_format != "auto",
            key,
            file_columns,
            text_field,
            on_bad != "raise",
            allow_mount,
        ]
        if any(others):
            raise UsageError(
                "samples from a program are written in their order by this process: besides source and dest only shard_size, "
                "samples_per_shard, takeover, store and on_event mean something for them"
            )
        if not isinstance(source, Iterable):
            raise UsageError(f"source: {source!r} is neither a path, a URL, a source, nor an iterable of samples")
        with ShardWriter(
            dest, shard_size=shard_size, samples_per_shard=samples_per_shard, takeover=takeover, store=store, on_event=on_event
        ) as writer:
            for sample in source:
                writer.write(sample)
        return writer.dataset
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
    publish(
        prepared,
        dest,
        shard_size=shard_size,
        samples_per_shard=samples_per_shard,
        on_bad=on_bad,
        workers=workers,
        executor=executor,
        takeover=takeover,
        update=update,
        limit_rate=limit_rate,
        store=store,
        on_event=on_event,
    )
    return Dataset(dest, store=store)


def publish(
    source: Source,
    dest: Where,
    *,
    shard_size: str | int = "256MiB",
    samples_per_shard: int | None = None,
    on_bad: OnBad = "raise",
    workers: int | None = None,
    executor: Executor | str | None = None,
    takeover: bool = False,
    update: bool = False,
    limit_rate: str | float | None = None,
    store: StoreConfig | None = None,
    on_event: Subscriber = ignore,
) -> Publication:
    """``shard`` for a prepared source, telling what was done. The promises and arguments are the same."""
    started_s = time.monotonic()
    wanted = Wanted.of(workers, executor, limit_rate)
    opened = open_store(dest, store, on_event=on_event)
    refuse_overlap(source.location, opened.location)
    most_bytes = parse_size(shard_size, name="shard_size")
    plan = outline(source, shard_size=most_bytes, samples_per_shard=samples_per_shard)
    for note in plan.notes:
        on_event(Message(note, "warning"))
    for bad in plan.bad:
        on_event(Message(f"skipped {bad.path}: {bad.reason}", "warning"))
    run = _Run(source, plan, dest, opened, store, on_bad, on_event, (most_bytes, samples_per_shard), started_s)
    work = Work(len(plan.plan.shards), plan.plan.bytes, plan.files)
    with open_engine(wanted, work, opened.location, run.on_shard_event) as engine:
        published = run.publish(engine, takeover=takeover, update=update)
    note_ended(opened.location)
    return published


class _Run:
    """One publication in progress."""

    def __init__(
        self,
        source: Source,
        plan: Outline,
        dest: Where,
        store: Store,
        config: StoreConfig | None,
        on_bad: OnBad,
        on_event: Subscriber,
        cut: tuple[int, int | None],
        started_s: float,
    ) -> None:
        self._source = source
        self._outline = plan
        self._shards = plan.plan.shards
        self._digest = plan.plan.digest
        # A store that was opened by somebody else travels as it is; a location is opened afresh by each worker.
        self._where = dest if isinstance(dest, Store) else store.location
        self._store = store
        self._config = config
        self._on_bad = on_bad
        self._on_event = on_event
        self._cut = cut
        self._started_s = started_s
        self._meter = Meter(on_event)

    def publish(self, engine: Engine, *, takeover: bool, update: bool) -> Publication:
        found = look(self._store)
        if found.manifest is None:
            resume = enter_and_note(self._store, self._config, self._digest, found, takeover=takeover)
            # Between looking and claiming another run may have finished.
            manifest = read_manifest(self._store)
            if manifest is None:
                return self._write(engine, self._shards, resume=resume)
            release_claim(self._store)
            found = replace(look(self._store), manifest=manifest, claimed=False)
        if update:
            return self._update(engine, found, takeover=takeover)
        return self._compare(engine, found)

    def _write(self, engine: Engine, shards: Sequence[PlannedShard], *, resume: bool, grown_from: Manifest | None = None) -> Publication:
        """Send ``shards`` and commit them, together with those of ``grown_from``. The destination is claimed."""
        self._on_event(Stage("claimed", str(self._store.location)))
        with claimed(self._where, self._config, self._digest):
            outcomes = self._run(engine, [self._job(shard, resume=resume, rate=engine.rate) for shard in shards])
            manifest = _manifest(self._source, outcomes, grown_from)
            confirm_objects(self._store, (info for outcome in outcomes for info in outcome.objects))
            self._on_event(Stage("confirmed", str(self._store.location)))
            confirm_claim(self._store, self._digest)
            commit(self._store, manifest, self._outline.classes, grown_from=grown_from)
        self._on_event(Stage("published", str(self._store.location / MANIFEST)))
        return self._publication(manifest, outcomes, grown_from=grown_from)

    def _compare(self, engine: Engine, found: Found) -> Publication:
        """The destination is complete. If it holds this very data set, send what got lost since; else refuse, having changed nothing."""
        manifest = found.manifest
        assert manifest is not None
        if self._on_bad == "raise":
            planned = [(shard.name, shard.bytes, len(shard.samples)) for shard in self._shards]
            if planned != [(record.name, record.bytes, record.samples) for record in manifest.shards]:
                raise holds_another(
                    self._store, manifest, "its shards are cut differently or hold other samples (--update adds those it has not)"
                )
        outcomes = self._run(engine, [self._job(shard, task="compare") for shard in self._shards])
        records = [outcome.record for outcome in outcomes if outcome.record is not None]
        if tuple(records) != tuple(manifest.shards):
            stored = set(manifest.shards)
            differing = sum(record not in stored for record in records) or abs(len(records) - len(manifest.shards))
            raise holds_another(self._store, manifest, f"{counted(differing, 'shard')} would be another one from the source as it is now")
        return self._mend(engine, found, self._shards, outcomes)

    def _update(self, engine: Engine, found: Found, *, takeover: bool) -> Publication:
        """Add what the source has beyond the published samples, in shards of their own. Refuse, having changed nothing, when published
        samples are not in the source as they were."""
        manifest = found.manifest
        assert manifest is not None
        refuse_indexed(self._store, manifest)
        jobs = [ReadBack(record, self._where, self._config) for record in manifest.shards]
        published = [found for _, found in sorted(engine.each(published_fingerprints, jobs), key=_number)]
        try:
            grown = growth(self._store, jobs, published, self._outline.samples)
            before = grown.before
            outcomes = self._run(engine, [self._job(shard, task="compare") for shard in before])
            _refuse_other_content(self._store, outcomes, manifest, before)
        except PublishError as error:
            moved = moved_classes(published_classes(self._store), self._outline.classes)
            if moved is None:
                raise
            raise not_grown(self._store, moved) from error
        if not grown.new:
            return self._mend(engine, found, before, outcomes)
        shard_size, samples_per_shard = self._cut
        new = plan_shards(grown.new, shard_size=shard_size, samples_per_shard=samples_per_shard)
        # Two updates are the same when they add the same to the same.
        self._digest = hashlib.sha256(f"update {manifest.digest} {new.digest}".encode()).hexdigest()
        resume = enter_and_note(self._store, self._config, self._digest, found, takeover=takeover)
        return self._write(engine, appended(new, manifest), resume=resume, grown_from=manifest)

    def _mend(self, engine: Engine, found: Found, shards: Sequence[PlannedShard], outcomes: list[ShardOutcome]) -> Publication:
        """Send what got lost of a published data set, which ``shards`` make again, as ``outcomes`` has shown."""
        manifest = found.manifest
        assert manifest is not None
        lost = [outcome for outcome in outcomes if outcome.record is not None and not self._is_whole(outcome, found)]
        if lost:
            self._on_event(Message(f"{counted(len(lost), 'shard')} of the published data set missing or damaged: sent again", "warning"))
            by_number = {shard.number: shard for shard in shards}
            jobs = [self._job(by_number[outcome.number], resume=True, rate=engine.rate) for outcome in lost]
            sent = {outcome.number: outcome for outcome in self._run(engine, jobs)}
            outcomes = [sent.get(outcome.number, outcome) for outcome in outcomes]
            if tuple(outcome.record for outcome in outcomes if outcome.record is not None) != tuple(manifest.shards):
                raise SourceError(f"reading {self._source.name}: it changed while it was read; run again once it stands still")
        if found.claimed:  # a run that was killed between its manifest and its last step
            release_claim(self._store)
        return self._publication(manifest, outcomes, unchanged=not lost)

    def _is_whole(self, outcome: ShardOutcome, found: Found) -> bool:
        record = outcome.record
        assert record is not None
        wanted = {
            record.name: record.bytes,
            index_name(record.name): 8 * (record.samples + 1),
            blocks_name(record.name): None,
        }
        present = {key: found.objects[key].size for key in wanted if key in found.objects}
        return present.keys() == wanted.keys() and all(size is None or present[key] == size for key, size in wanted.items())

    def _job(self, shard: PlannedShard, **options: Any) -> ShardJob:
        return ShardJob(self._source, shard, self._where, self._config, on_bad=self._on_bad, **options)

    def _run(self, engine: Engine, jobs: Sequence[ShardJob]) -> list[ShardOutcome]:
        """All jobs' outcomes, in order."""
        self._meter.begin([job.shard for job in jobs])
        outcomes = []
        for _, outcome in engine.each(publish_shard, jobs):
            outcomes.append(outcome)
            for bad in outcome.bad:
                self._on_event(Message(f"skipped {bad.path}: {bad.reason}", "warning"))
            self._meter.shard_done(outcome.number, sum(totals.samples for totals in outcome.fields.values()))
        return sorted(outcomes, key=lambda outcome: outcome.number)

    def on_shard_event(self, event: Event) -> None:
        """Shards report their own bytes and files; a person wants the sum."""
        if not self._meter.takes(event):
            self._on_event(event)

    def _publication(
        self, manifest: Manifest, outcomes: list[ShardOutcome], *, grown_from: Manifest | None = None, unchanged: bool = False
    ) -> Publication:
        made = [outcome for outcome in outcomes if outcome.record is not None]
        return Publication(
            location=self._store.location,
            manifest=manifest,
            outline=self._outline,
            sent=sum(not outcome.kept for outcome in made),
            kept=len(manifest.shards) - sum(not outcome.kept for outcome in made),
            sent_bytes=sum(outcome.sent_bytes for outcome in made),
            bad=(*self._outline.bad, *(bad for outcome in outcomes for bad in outcome.bad)),
            seconds=time.monotonic() - self._started_s,
            config=self._config,
            grown_from=grown_from,
            unchanged=unchanged,
        )


_number = operator.itemgetter(0)


def _manifest(source: Source, outcomes: Sequence[ShardOutcome], grown_from: Manifest | None) -> Manifest:
    made = [outcome for outcome in outcomes if outcome.record is not None]
    if not made:
        raise SourceError(f"reading {source.name}: not one sample could be read; nothing was published")
    records = [outcome.record for outcome in made if outcome.record is not None]
    fields = [outcome.fields for outcome in made]
    largest = max(outcome.largest_block for outcome in made)
    if grown_from is None:
        return Manifest(tuple(records), summed(fields), largest)
    return Manifest((*grown_from.shards, *records), summed([grown_from.fields, *fields]), max(largest, grown_from.largest_block))
