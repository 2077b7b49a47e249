"""Is what lies in the bucket whole? Structure by default, every byte with ``deep``.

A look reads manifests and side files, and asks the store for the size of every object that a manifest names. A deep look also reads
every byte, in parallel, compares it with the digests that the manifests hold, and names the shard, block and offset of what differs.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .config import StoreConfig, home_directory
from .contents import checkpoint_at, kind_of, nothing, refuse_selector
from .dataset import with_shards
from .errors import CorruptShard, DamagedCheckpoint, ManifestError, NotFound, ShardError
from .looked import Looked
from .parallel import each
from .progress import Progress, Subscriber, ignore
from .runs import catalog
from .runs.layout import RUN_JSON, Checkpoint, CheckpointName, FileRecord, RunRecord, Selector, address_of, parse_reference
from .shards.archive import members
from .shards.digests import digests_from_bytes, sample_digest
from .shards.index import Block, BlockTable, block_digest, index_from_bytes
from .shards.manifest import MANIFEST, WIDS, Manifest, ShardRecord, blocks_name, index_name, samples_name, wids_json
from .shards.sample import split_name
from .store import Where, open_store
from .store.base import Data, ObjectInfo, Store, uploads_if_told
from .transfer.fetch import Fetcher, Range, fetch_pieces
from .units import format_count, format_size
from .wrapping.logs import LOGS, LogFile, manifests

_SHOWN = 5  # damaged samples of a block that are named
_TAIL = "the end of the archive"
_AGAIN = "the stagekit shard or index that made the data set, given again, writes it"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is not as its manifest says. A ``note`` is worth knowing and no damage: nothing that a reader needs is affected.

    ``samples`` are the numbers in their shard of those that differ, where that can be told.

    ``what`` is one word: ``missing``, ``size``, ``bytes``, ``manifest``, ``leftover``, ``unfinished``, ``transfer``.
    """

    weight: Literal["fault", "note"]
    what: str
    subject: str
    detail: str
    shard: str | None = None
    block: int | None = None
    samples: tuple[int, ...] | None = None
    offset: int | None = None
    expected: str | None = None
    found: str | None = None

    @property
    def line(self) -> str:
        """One sentence for people."""
        return f"{self.subject}: {self.detail}"

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values; absent ones are left out."""
        names = ("weight", "what", "subject", "detail", "shard", "block", "samples", "offset", "expected", "found")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was looked at and what was found. ``ok`` when there is no fault; notes do not count. ``read_before`` counts shards that an
    interrupted look had read already."""

    url: str
    kind: Literal["dataset", "run", "checkpoint"]
    deep: bool
    objects: int
    bytes: int
    findings: tuple[Fault, ...]
    read_before: int = 0

    @property
    def ok(self) -> bool:
        """Whether everything that a reader needs is there and, with ``deep``, is what was written."""
        return not self.faults

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The findings that are damage."""
        return tuple(finding for finding in self.findings if finding.weight == "fault")

    @property
    def line(self) -> str:
        """One sentence for people."""
        how = "every byte read" if self.deep else "structure and sizes; --deep reads every byte"
        if self.read_before:
            how += f", {format_count(self.read_before)} of the shards by an interrupted look before; --afresh reads them again"
        result = "whole" if self.ok else f"{format_count(len(self.faults))} {'fault' if len(self.faults) == 1 else 'faults'}"
        noun = {"dataset": "data set", "run": "run", "checkpoint": "checkpoint"}[self.kind]
        return f"{self.url}: {noun}, {format_count(self.objects)} objects, {format_size(self.bytes)}: {result} ({how})"


def verify(
    where: Where,
    *,
    deep: bool = False,
    afresh: bool = False,
    store: StoreConfig | None = None,
    threads: int = 8,
    on_event: Subscriber = ignore,
) -> VerifyReport:
    """Check a data set, a run, or one checkpoint (``RUN@1200``) against its manifests. Nothing is written.

    A deep look at a data set that was interrupted within the last day is continued: a shard that it read and found whole, and that was
    not replaced since, is not read again; ``afresh`` reads everything.

    What differs is in the report's ``findings``. Raises ``ManifestError`` when nothing that can be verified lies there, and the store's
    own errors when it cannot be told: a bucket that may not be read is never reported as whole, or as damaged.

    Example: ``stagekit.verify("s3://bucket/run", deep=True).ok``.
    """
    url: Where = where
    selector: Selector = "latest"
    if isinstance(where, str):
        url, selector = parse_reference(where)
    opened = open_store(url, store, on_event=on_event)
    look = _Look(opened, deep, threads, on_event, afresh=afresh)
    kind = kind_of(opened)
    if kind == "dataset":
        if isinstance(where, str):
            refuse_selector(str(url), where, "verifying")
        return look.report("dataset", _dataset(look, store))
    if kind == "run":
        if isinstance(where, str) and url != where:
            checkpoint = checkpoint_at(opened, selector, on_event=on_event)
            return look.report("checkpoint", _files(look, [checkpoint]), f"{url}@{address_of(checkpoint.name, selector)}")
        return look.report("run", _run(look))
    raise nothing(opened, "verifying")


@dataclass(slots=True)
class _Look:
    """One verification on its way: counts, and the events about them."""

    store: Store
    deep: bool
    threads: int
    on_event: Subscriber
    objects: int = 0
    bytes: int = 0
    total: int | None = None
    afresh: bool = False
    elsewhere: dict[str, str] = field(default_factory=dict)
    looked: Looked | None = None
    read_before: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def url(self, key: str) -> str:
        return self.elsewhere.get(key) or str(self.store.location / key)

    def fault(self, what: str, key: str, detail: str, **values: Any) -> Fault:
        return Fault("fault", what, self.url(key), detail, **values)

    def note(self, what: str, key: str, detail: str, **values: Any) -> Fault:
        return Fault("note", what, self.url(key), detail, **values)

    def passed(self, size: int, objects: int = 0) -> None:
        with self.lock:
            self.bytes += size
            self.objects += objects
        self.on_event(Progress("verify", self.bytes, self.total))

    def report(self, kind: Literal["dataset", "run", "checkpoint"], faults: Iterator[Fault], url: str | None = None) -> VerifyReport:
        findings = list(faults)
        self.on_event(Progress("verify", self.bytes, self.bytes, finished=True))
        if self.looked is not None:
            self.looked.finish()
        return VerifyReport(url or str(self.store.location), kind, self.deep, self.objects, self.bytes, tuple(findings), self.read_before)

    def info(self, key: str) -> ObjectInfo | None:
        """The object's size and etag, or ``None`` when it is provably not there."""
        try:
            return self.store.head(key)
        except NotFound:
            return None

    def size(self, key: str) -> int | None:
        """The object's size, or ``None`` when it is provably not there."""
        info = self.info(key)
        return None if info is None else info.size


# ---------------------------------------------------------------------------------------------------------------------- data sets


def _dataset(look: _Look, config: StoreConfig | None) -> Iterator[Fault]:
    try:
        manifest = Manifest.from_bytes(bytes(look.store.get(MANIFEST)), source=look.url(MANIFEST))
    except ManifestError as error:
        yield look.fault("manifest", MANIFEST, str(error).removeprefix(f"{look.url(MANIFEST)}: "))
        return
    look.total = manifest.bytes
    look.store = with_shards(look.store, manifest, config, allow_mount=True, on_event=look.on_event)
    look.elsewhere = {record.name: record.url for record in manifest.shards if record.url is not None}
    if look.deep and look.store.location.scheme != "memory":
        look.looked = Looked(home_directory(), str(look.store.location), manifest.digest)
        if look.afresh:
            look.looked.finish()
            look.looked = Looked(home_directory(), str(look.store.location), manifest.digest)
    # A deep look reads few shards at once with several requests each, or one with many: about ``threads`` requests in either case.
    at_once = max(1, min(len(manifest.shards), look.threads // 2)) if look.deep else look.threads
    for faults in each(lambda record: _shard(look, record, at_once), manifest.shards, threads=at_once):
        yield from faults
    try:
        if bytes(look.store.get(WIDS)) != wids_json(manifest):
            yield look.fault("bytes", WIDS, f"it is not the index that belongs to this manifest; {_AGAIN}")
    except NotFound:
        yield look.fault("missing", WIDS, f"the index for the wids reader is missing; {_AGAIN}")
    named = {
        name
        for record in manifest.shards
        for name in (record.name, index_name(record.name), samples_name(record.name), blocks_name(record.name))
    }
    for info in look.store.list("shards/"):
        if info.key not in named:
            yield look.note("leftover", info.key, f"{format_size(info.size)} that the manifest does not name; no reader looks at it")
    yield from _unfinished(look)


def _shard(look: _Look, record: ShardRecord, at_once: int) -> list[Fault]:
    """What is wrong with one shard and its side files."""
    faults: list[Fault] = []
    name = record.name
    table: BlockTable | None = None
    for key, sha256 in ((index_name(name), record.idx_sha256), (blocks_name(name), record.blocks_sha256)):
        try:
            data = bytes(look.store.get(key))
        except NotFound:
            faults.append(look.fault("missing", key, f"the side file is missing; {_AGAIN}", shard=name))
            continue
        found = hashlib.sha256(data).hexdigest()
        if found != sha256:
            faults.append(_differs(look, key, "the side file differs from the manifest", sha256, found, shard=name))
        elif key == blocks_name(name):
            table = BlockTable.from_bytes(data, source=look.url(key))
        look.passed(0, objects=1)
    info = look.info(name)
    if info is None:
        faults.append(look.fault("missing", name, f"the shard is missing, with {format_count(record.samples)} samples", shard=name))
        return faults
    size = info.size
    if size != record.bytes:
        detail = f"the shard has {format_count(size)} bytes and should have {format_count(record.bytes)}"
        faults.append(look.fault("size", name, detail, shard=name, expected=str(record.bytes), found=str(size)))
    if look.deep and not faults and look.looked is not None and look.looked.has(info):
        look.read_before += 1
        look.passed(record.bytes)
    elif look.deep:
        faults.extend(_shard_bytes(look, record, table, size, max(1, look.threads // at_once)))
        if not faults and look.looked is not None:
            look.looked.add(info)
    else:
        look.passed(record.bytes)
    look.passed(0, objects=1)
    return faults


def _shard_bytes(look: _Look, record: ShardRecord, table: BlockTable | None, size: int, threads: int) -> Iterator[Fault]:
    """Read a shard to its end and tell each block that differs."""
    ranges: list[tuple[int | None, int, int, bytes | None]] = []
    end = 0
    for position, block in enumerate(table.blocks if table else ()):
        ranges.append((position, block.offset, block.size, block.digest))
        end = block.offset + block.size
    step = 8 * 2**20
    ranges.extend((None, start, min(step, record.bytes - start), None) for start in range(end, record.bytes, step))
    readable = [part for part in ranges if part[1] + part[2] <= size]
    whole = hashlib.sha256()
    bad = False
    wanted = (Range(record.name, start, length) for _, start, length, _ in readable)
    with Fetcher(look.store, wanted, threads=threads, budget_bytes=(threads + 1) * step) as fetcher:
        for (number, start, length, digest), data in zip(readable, fetcher, strict=True):
            whole.update(data)
            look.passed(length)
            if digest is None or block_digest(data) == digest:
                continue
            bad = True  # and the shard's own digest was fed the damaged bytes
            again = look.store.get(record.name, start, length)
            found = block_digest(again)
            assert table is not None
            assert number is not None
            damaged = _damaged_samples(look, record, table.blocks[number], data if found == digest else again)
            what = f"block {number} at offset {format_count(start)} ({format_count(length)} bytes, {_samples_of(table, number, again)})"
            what += damaged.text
            place: dict[str, Any] = {"shard": record.name, "block": number, "offset": start, "expected": digest.hex()}
            if damaged.numbers:
                place["samples"] = damaged.numbers
            if found == digest:
                detail = f"{what} arrived damaged once and whole the second time; the link or a proxy flips bits"
                yield look.note("transfer", record.name, detail, found=block_digest(data).hex(), **place)
            else:
                detail = f"{what}: expected xxh3-128 {digest.hex()}, found {found.hex()}"
                yield look.fault("bytes", record.name, detail, found=found.hex(), **place)
    for cut, start, length, _ in ranges[len(readable) :]:
        if cut is not None:
            detail = f"block {cut} at offset {format_count(start)} ({format_count(length)} bytes) is cut off"
            yield look.fault("bytes", record.name, detail, shard=record.name, block=cut, offset=start)
    if not bad and size == record.bytes and whole.hexdigest() != record.sha256:
        where = f"behind offset {format_count(end)}, {_TAIL}" if table else "and its block table is unusable"
        yield _differs(
            look, record.name, f"the shard differs from the manifest ({where})", record.sha256, whole.hexdigest(), shard=record.name
        )


@dataclass(frozen=True, slots=True)
class _Damaged:
    """Which samples of a block differ, by their numbers in the shard, and as text."""

    numbers: tuple[int, ...] = ()
    text: str = ""


def _damaged_samples(look: _Look, record: ShardRecord, block: Block, data: Data) -> _Damaged:
    """The samples in the damaged ``data`` of a block that differ from their digests; none where these are missing, as in a data set that an
    older release made, or unusable."""
    try:
        index = bytes(look.store.get(index_name(record.name)))
        digests = digests_from_bytes(look.store.get(samples_name(record.name)), record.samples)
    except NotFound:
        return _Damaged()
    if digests is None or hashlib.sha256(index).hexdigest() != record.idx_sha256:
        return _Damaged()
    offsets = index_from_bytes(index)
    view = memoryview(data)
    numbers = tuple(
        number
        for number in range(block.first_sample, block.first_sample + block.samples)
        if sample_digest(view[offsets[number] - block.offset : offsets[number + 1] - block.offset]) != digests[number]
    )
    shown = [f"{format_count(number)} ({_key_at(view, offsets[number] - block.offset)})" for number in numbers[:_SHOWN]]
    if not shown:
        return _Damaged()
    return _Damaged(
        numbers, f", of which damaged: {', '.join(shown)}{f' and {len(numbers) - _SHOWN} more' if len(numbers) > _SHOWN else ''}"
    )


def _key_at(view: memoryview, offset: int) -> str:
    """The key of the sample whose first header is at ``offset``, or why there is none."""
    try:
        first = next(members(view[offset:], source=""), None)
    except ShardError:
        first = None
    split = split_name(first.name) if first is not None else None
    return split[0] if split is not None else "its header too"


def _samples_of(table: BlockTable | None, number: int | None, data: Data) -> str:
    """Which samples lie in a block, by number and, where its headers can still be read, by key."""
    if table is None or number is None:
        return "samples unknown"
    block = table.blocks[number]
    text = f"samples {format_count(block.first_sample)} to {format_count(block.first_sample + block.samples - 1)} of the shard"
    keys: list[str] = []
    try:
        keys.extend(split[0] for member in members(data, source="") if (split := split_name(member.name)) is not None)
    except CorruptShard:
        # The headers up to the damaged one are whole, so the sample after the last readable key is the one.
        return f"{text}, unreadable behind {keys[-1]}" if keys else text
    return f"{text}, {keys[0]} to {keys[-1]}" if keys else text


def _differs(look: _Look, key: str, detail: str, expected: str, found: str, **values: Any) -> Fault:
    return look.fault("bytes", key, f"{detail}: expected sha-256 {expected}, found {found}", expected=expected, found=found, **values)


# --------------------------------------------------------------------------------------------------------------------------- runs


def _run(look: _Look) -> Iterator[Fault]:
    try:
        RunRecord.from_bytes(bytes(look.store.get(RUN_JSON)), source=look.url(RUN_JSON))
        look.passed(0, objects=1)
    except NotFound:
        yield look.fault("missing", RUN_JSON, "the run's record is missing")
    except ManifestError as error:
        yield look.fault("manifest", RUN_JSON, str(error))
    committed: list[Checkpoint] = []
    uncommitted: list[CheckpointName] = []
    names = sorted(catalog.attempts(look.store))
    for name, found in zip(names, each(lambda name: _read(look.store, name), names, threads=look.threads), strict=True):
        if isinstance(found, Checkpoint):
            look.passed(0, objects=1)
            committed.append(found)
        elif found is not None:
            yield look.fault("manifest", name.manifest_key, str(found))
        else:
            uncommitted.append(name)
    explained = catalog.lending(uncommitted, committed) | catalog.dropped(look.store, uncommitted)
    for name in (name for name in uncommitted if name not in explained):
        detail = f"step {name.step} was never committed: it is on its way, or its writer died; no reader looks at it"
        yield look.note("unfinished", name.folder.rstrip("/"), detail)
    yield from _files(look, committed)
    yield from _logs(look)
    yield from _unfinished(look)


def _read(store: Store, name: CheckpointName) -> Checkpoint | ManifestError | DamagedCheckpoint | None:
    """A committed checkpoint, what is wrong with its manifest, or ``None`` when it never had one."""
    try:
        return catalog.read_committed(store, name)
    except NotFound:
        return None
    except (ManifestError, DamagedCheckpoint) as error:
        return error


def _files(look: _Look, checkpoints: list[Checkpoint]) -> Iterator[Fault]:
    """What is wrong with the files of these checkpoints. One that several of them share is read once."""
    users: dict[str, list[tuple[CheckpointName, FileRecord]]] = {}
    for checkpoint in checkpoints:
        for record in checkpoint.files:
            users.setdefault(record.key(checkpoint.name), []).append((checkpoint.name, record))
    look.total = sum(uses[0][1].bytes for uses in users.values())

    def check(item: tuple[str, list[tuple[CheckpointName, FileRecord]]]) -> list[Fault]:
        return list(_file(look, *item))

    for faults in each(check, users.items(), threads=look.threads):
        yield from faults


def _file(look: _Look, key: str, uses: list[tuple[CheckpointName, FileRecord]]) -> Iterator[Fault]:
    size = look.size(key)
    steps = ", ".join(sorted({str(name.step) for name, _ in uses}, key=int))
    of = f"step{'s' if ',' in steps else ''} {steps}"
    record = uses[0][1]
    if size is None:
        yield look.fault("missing", key, f"{record.path} ({format_size(record.bytes)}) of {of} is missing")
        return
    wrong = next((used for _, used in uses if used.bytes != size), None)
    if wrong is not None:
        detail = f"{wrong.path} of {of} has {format_count(size)} bytes and should have {format_count(wrong.bytes)}"
        yield look.fault("size", key, detail, expected=str(wrong.bytes), found=str(size))
    elif look.deep:
        sha256 = hashlib.sha256()
        for data in fetch_pieces(look.store, key, size=size, threads=2):
            sha256.update(data)
            look.passed(len(data))
        for used in {used.sha256: used for _, used in uses}.values():
            if sha256.hexdigest() != used.sha256:
                yield _differs(look, key, f"{used.path} of {of} is not what was saved", used.sha256, sha256.hexdigest())
    else:
        look.passed(size)
    look.passed(0, objects=1)


def _logs(look: _Look) -> Iterator[Fault]:
    """What is wrong with what ``stagekit run`` sent besides checkpoints."""
    listed = {info.key: info.size for info in look.store.list(LOGS)}
    files = [file for _, found in manifests(look.store) for file in found]

    def check(file: LogFile) -> list[Fault]:
        return list(_log(look, file, listed))

    for faults in each(check, files, threads=look.threads):
        yield from faults


def _log(look: _Look, file: LogFile, listed: Mapping[str, int]) -> Iterator[Fault]:
    whole, sha256 = True, hashlib.sha256()
    for key, expected in file.objects:
        size = listed.get(key)
        if size is None and (size := look.size(key)) is None:  # listings may lag
            whole = False
            yield look.fault("missing", key, f"a part ({format_size(expected)}) of the log {file.path} is missing")
        elif size != expected:
            whole = False
            detail = f"a part of the log {file.path} has {format_count(size)} bytes and should have {format_count(expected)}"
            yield look.fault("size", key, detail, expected=str(expected), found=str(size))
        elif look.deep and whole:
            for data in fetch_pieces(look.store, key, size=size, threads=2):
                sha256.update(data)
        look.passed(expected, objects=1)
    if look.deep and whole and sha256.hexdigest() != file.sha256:
        yield _differs(look, file.objects[0][0], f"the log {file.path} is not what was sent", file.sha256, sha256.hexdigest())


def _unfinished(look: _Look) -> Iterator[Fault]:
    """Uploads that nobody completed: billed, and in no listing of objects."""
    uploads = uploads_if_told(look.store)
    if uploads is None:
        yield Fault(
            "note", "unfinished", str(look.store.location), "these credentials may not list unfinished uploads, so there may be some"
        )
    for upload in uploads or ():
        yield look.note("unfinished", upload.key, "an upload that nobody completed; it is billed until it is aborted")
