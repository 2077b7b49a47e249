"""``stagekit index``: existing tars to a data set, in parallel, resumable at any point, the manifest last."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..config import StoreConfig
from ..errors import Conflict, DuplicateKey, NotFound, PublishError, ShardError, SourceError, UsageError
from ..location import Location
from ..parallel import each
from ..progress import Message, Progress, Stage, Subscriber, ignore
from ..publishing.claim import claimed, confirm_claim, read_claim, release_claim, replace_claim, take_claim
from ..publishing.destination import commit, content, drop_open_uploads, read_manifest
from ..publishing.growth import summed
from ..publishing.summary import dataset_lines, dataset_record, stream_it, streaming_code
from ..shards.archive import ArchiveReader
from ..shards.index import index_from_bytes
from ..shards.manifest import MANIFEST, WIDS, Manifest, ShardRecord, blocks_name, index_name, samples_name, wids_json
from ..shards.sample import split_name
from ..store import Where, open_store
from ..store.base import Data, Store
from ..store.removing import removal
from ..transfer.fetch import fetch_pieces
from ..transfer.put import put_object
from ..units import counted, format_count, format_duration, format_rate
from . import journal
from .journal import Found, journal_name
from .scan import Scan, scan
from .tars import Tar, find

if TYPE_CHECKING:
    from ..dataset import Dataset

RepeatedKeys = Literal["refuse", "allow"]
OnBad = Literal["raise", "skip"]

_PLAN = "index-"
_AT_ONCE = 4
_KEYS_AT_ONCE = 8 * 2**20  # hashes of keys compared in one pass
_REPORT_EVERY_S = 0.1
_KINDS = {
    "directory": "directories",
    "hard link": "hard links",
    "symbolic link": "symbolic links",
    "device": "devices",
    "fifo": "FIFOs",
    "sparse file": "sparse files",
    "other": "volume labels and the like",
}


@dataclass(frozen=True, slots=True)
class Bad:
    """A tar that was left out, and why."""

    url: str
    reason: str


@dataclass(frozen=True, slots=True)
class Indexed:
    """What a run of ``index_shards`` did.

    ``unchanged``: the data set was there already, whole. ``read`` and ``kept`` count tars, those read now and those that an earlier run
    has read; ``read_bytes`` is how much was read now.

    ``skipped`` counts members that are no fields (links, directories, devices, …), by kind; ``unnamed`` those whose name has no key or no
    extension; ``examples`` has a name of each. ``repeated`` is how many samples have a key that an earlier tar has too.
    """

    location: Location
    manifest: Manifest
    unchanged: bool
    read: int
    kept: int
    read_bytes: int
    skipped: dict[str, int]
    unnamed: int
    examples: dict[str, str]
    repeated: int
    bad: tuple[Bad, ...]
    seconds: float
    config: StoreConfig | None = None

    @property
    def elsewhere(self) -> int:
        """How many tars lie outside the data set's own place."""
        return sum(record.url is not None for record in self.manifest.shards)

    @property
    def lines(self) -> list[str]:
        """The result as text: what there is, what was left out, and the lines that stream it."""
        manifest = self.manifest
        if self.unchanged:
            done = f"nothing to do: {self.location} holds this data set already (sizes compared; stagekit verify --deep reads every byte)"
        else:
            speed = f", {format_rate(self.read_bytes / self.seconds)}" if self.seconds > 0 else ""
            kept = f"; {format_count(self.kept)} more were read by an earlier run" if self.kept else ""
            done = f"indexed {self.location}: {counted(self.read, 'tar')} read in {format_duration(self.seconds)}{speed}{kept}"
        lines = [done, *dataset_lines(manifest)]
        lines += [f"  no part of any sample: {text}" for text in self.left_out]
        if self.repeated:
            lines.append(f"  {counted(self.repeated, 'sample')} with a key that an earlier tar has too")
        if self.bad:
            lines.append(f"  left out: {counted(len(self.bad), 'tar')}, listed above")
        if self.elsewhere:
            stay = "stays where it is; the data set needs it" if self.elsewhere == 1 else "stay where they are; the data set needs them"
            lines.append(f"  {counted(self.elsewhere, 'tar')} {stay} there, unchanged")
        return [*lines, *stream_it(self.code)]

    @property
    def left_out(self) -> list[str]:
        """``3 symbolic links, such as 'a.jpg'``."""
        found = [
            f"{format_count(count)} {kind if count == 1 else _KINDS.get(kind, kind)}, such as {self.examples[kind]!r}"
            for kind, count in self.skipped.items()
        ]
        if self.unnamed:
            found.append(f"{counted(self.unnamed, 'file')} without a key and an extension, such as {self.examples['unnamed']!r}")
        return found

    @property
    def code(self) -> list[str]:
        """The lines of Python that stream this data set."""
        return streaming_code(self.location, self.manifest, self.config)

    @property
    def record(self) -> dict[str, Any]:
        """The result for programs."""
        return {
            **dataset_record(self.location, self.manifest),
            "elsewhere": self.elsewhere,
            "unchanged": self.unchanged,
            "read_shards": self.read,
            "kept_shards": self.kept,
            "read_bytes": self.read_bytes,
            "skipped_members": self.skipped,
            "unnamed_members": self.unnamed,
            "examples": self.examples,
            "repeated_keys": self.repeated,
            "bad": [{"url": bad.url, "reason": bad.reason} for bad in self.bad],
            "seconds": round(self.seconds, 3),
            "code": self.code,
        }


def index(
    shards: Where | Iterable[Where],
    dest: Where,
    *,
    repeated_keys: RepeatedKeys = "refuse",
    on_bad: OnBad = "raise",
    threads: int = 16,
    takeover: bool = False,
    allow_mount: bool = False,
    store: StoreConfig | None = None,
    on_event: Subscriber = ignore,
) -> Dataset:
    """Make the WebDataset tars ``shards`` a data set at ``dest`` and return it. They are read once and never rewritten or moved.

    ``shards`` is a pattern such as ``"s3://bucket/shard-{000000..000099}.tar"``, a prefix (all tars below it), or several. ``dest`` may be
    the prefix where they lie, or any other place: the manifest then names them by URL, and readers open them there.

    The data set is there completely or not at all: its manifest is written last. After an error, Ctrl-C or a crash the same call continues
    with the tars that were not read yet. Called again on unchanged tars it reads nothing; on others it raises ``PublishError``.

    A key that is in two tars raises ``DuplicateKey`` naming both places, unless ``repeated_keys="allow"``; one that comes back in the same
    tar always does. A tar that is missing, cut, compressed, or no tar raises an error that names it; ``on_bad="skip"`` lists it and goes
    on without it. ``threads`` ranges are fetched at a time. ``takeover`` continues where a run on another machine has stopped.

    >>> ds = stagekit.index("s3://bucket/imagenet/train-{0000..0146}.tar", "s3://bucket/imagenet")  # doctest: +SKIP
    """
    from ..dataset import Dataset

    index_shards(
        shards,
        dest,
        repeated_keys=repeated_keys,
        on_bad=on_bad,
        threads=threads,
        takeover=takeover,
        allow_mount=allow_mount,
        store=store,
        on_event=on_event,
    )
    return Dataset(dest, store=store, allow_mount=allow_mount)


def index_shards(
    shards: Where | Iterable[Where],
    dest: Where,
    *,
    repeated_keys: RepeatedKeys = "refuse",
    on_bad: OnBad = "raise",
    threads: int = 16,
    takeover: bool = False,
    allow_mount: bool = False,
    store: StoreConfig | None = None,
    on_event: Subscriber = ignore,
) -> Indexed:
    """``index``, telling what was done. The promises and arguments are the same."""
    started_s = time.monotonic()
    if repeated_keys not in ("refuse", "allow"):
        raise UsageError(f"repeated_keys: {repeated_keys!r} is neither 'refuse' nor 'allow'")
    if on_bad not in ("raise", "skip"):
        raise UsageError(f"on_bad: {on_bad!r} is neither 'raise' nor 'skip'")
    if threads < 1:
        raise UsageError(f"threads: {threads} is below 1")
    opened = open_store(dest, store, on_event=on_event)
    patterns: Iterable[Where] = shards if isinstance(shards, Iterable) and not isinstance(shards, str) else [shards]
    tars, missing = find(patterns, opened.location, config=store, allow_mount=allow_mount, threads=threads, on_event=on_event)
    if missing and on_bad == "raise":
        more = f", and {format_count(len(missing) - 1)} more" if len(missing) > 1 else ""
        raise SourceError(
            f"indexing {missing[0].url}: it is not there{more}; check the pattern, or leave out what is missing with --on-bad skip "
            "(on_bad='skip')"
        )
    bad = [Bad(one.url, "it is not there") for one in missing]
    run = _Run(tars, bad, dest, opened, store, repeated_keys, on_bad, threads, on_event, started_s)
    return run.index(takeover=takeover)


class _Stopped(Exception):
    """The run is over: another tar failed, or the user interrupted it."""


class _Run:
    """One indexing in progress."""

    def __init__(
        self,
        tars: list[Tar],
        bad: list[Bad],
        dest: Where,
        store: Store,
        config: StoreConfig | None,
        repeated_keys: RepeatedKeys,
        on_bad: OnBad,
        threads: int,
        on_event: Subscriber,
        started_s: float,
    ) -> None:
        self._tars = tars
        self._bad = bad
        # A store that was opened by somebody else is used as it is.
        self._where = dest if isinstance(dest, Store) else store.location
        self._store = store
        self._config = config
        self._repeated_keys = repeated_keys
        self._on_bad = on_bad
        self._on_event = on_event
        self._started_s = started_s
        self._at_once = max(1, min(len(tars), _AT_ONCE, threads))
        self._threads = max(1, threads // self._at_once)
        self._plan = _PLAN + _digest(tars)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._done = self._finished = self._read = self._read_bytes = 0
        self._total = sum(tar.info.size for tar in tars)
        self._reported_s = 0.0
        for one in bad:
            self._tell(one)

    def index(self, *, takeover: bool) -> Indexed:
        manifest = read_manifest(self._store)
        if manifest is None:
            self._refuse_foreign_wids()
            self._enter(takeover)
            # Between looking and claiming another run may have finished.
            manifest = read_manifest(self._store)
            if manifest is None:
                return self._write()
            release_claim(self._store)
        return self._compare(manifest)

    def _write(self) -> Indexed:
        self._on_event(Stage("claimed", str(self._store.location)))
        with claimed(self._where, self._config, self._plan):
            found = [one for one in self._each(self._found) if one is not None]
            if not found:
                raise SourceError(f"indexing to {self._store.location}: not one tar could be used; nothing was published")
            repeated = self._compare_keys(found)
            manifest = _manifest(found)
            self._confirm_tars({one.record.name for one in found})
            confirm_claim(self._store, self._plan)
            self._on_event(Stage("confirmed", str(self._store.location)))
            commit(self._store, manifest, ())
        self._on_event(Stage("published", str(self._store.location / MANIFEST)))
        self._clear_journals()
        return self._indexed(manifest, found, repeated)

    # ------------------------------------------------------------------------------------------------------------- one tar

    def _each(self, function: Any) -> Iterator[Found | None]:
        """``function`` of every tar, in order. Leaving early stops what is being read."""
        try:
            yield from each(function, self._tars, threads=self._at_once)
        finally:
            self._stop.set()

    def _found(self, tar: Tar) -> Found | None:
        """What is in a tar: from its journal, or read now. ``None`` when it is bad and left out."""
        old = content(self._store, journal_name(tar.name))
        kept = None if old is None else journal.from_bytes(old, tar.info)
        if kept is not None and kept[0].record.url == tar.url and self._sides_are_whole(kept[0].record):
            self._passed(tar.info.size, tars=1)
            self._on_event(Stage("kept", tar.name))
            return kept[0]
        try:
            scanned = self._scan(tar)
        except ShardError as error:
            if self._on_bad == "raise":
                raise type(error)(f"{error}. Or leave this tar out with --on-bad skip (on_bad='skip')") from error
            one = Bad(str(tar.location), str(error))
            with self._lock:
                self._bad.append(one)
            self._tell(one)
            self._passed(0, tars=1)
            return None
        found = _found_in(tar, scanned)
        self._store_sides(found.record, scanned, ours=old is not None)
        put_object(self._store, journal_name(tar.name), journal.to_bytes(tar.info, found, scanned.keys))
        self._on_event(Stage("shard", tar.name))
        self._passed(0, tars=1)
        return found

    def _scan(self, tar: Tar) -> Scan:
        """Read a tar to its end. One that is not what was looked up, or is replaced meanwhile, raises ``SourceError``."""
        try:
            scanned = scan(self._chunks(tar), source=str(tar.location))
        except (NotFound, Conflict) as error:
            raise SourceError(f"indexing {tar.location}: it was replaced or removed while it was read ({error}); run again") from error
        with self._lock:
            self._read += 1
        return scanned

    def _chunks(self, tar: Tar) -> Iterator[Data]:
        pieces = fetch_pieces(tar.store, tar.key, size=tar.info.size, etag=tar.info.etag, threads=self._threads)
        with closing(pieces):  # type: ignore[type-var]  # a generator, which its annotation hides
            for piece in pieces:
                if self._stop.is_set():
                    raise _Stopped
                yield piece
                self._passed(len(piece), read=len(piece))

    def _store_sides(self, record: ShardRecord, scanned: Scan, *, ours: bool) -> None:
        """Store index and block table, verified. What lies there already and is neither the same nor of a former run is not replaced."""
        for key, data in (
            (index_name(record.name), scanned.built.index),
            (samples_name(record.name), scanned.built.sample_digests),
            (blocks_name(record.name), scanned.built.table.to_bytes()),
        ):
            there = content(self._store, key)
            if there == data:
                continue
            if there is not None and not ours:
                raise PublishError(
                    f"indexing to {self._store.location}: {key} is there and was not made from this tar as it is now; nothing of it was "
                    "changed. Choose another destination, or remove that object"
                )
            put_object(self._store, key, data)

    def _sides_are_whole(self, record: ShardRecord) -> bool:
        for key, sha256 in ((index_name(record.name), record.idx_sha256), (blocks_name(record.name), record.blocks_sha256)):
            data = content(self._store, key)
            if data is None or hashlib.sha256(data).hexdigest() != sha256:
                return False
        return True

    # ------------------------------------------------------------------------------------------------------------ all tars

    def _compare_keys(self, found: list[Found]) -> int:
        """How many samples have a key that an earlier tar has too. Unless that is allowed, the first one raises ``DuplicateKey``."""
        passes = -(-sum(one.record.samples for one in found) // _KEYS_AT_ONCE)
        repeated = 0
        for part in range(passes):
            keys = [self._keys(one)[1] for one in found] if passes == 1 else [_part(self._keys(one)[1], part, passes) for one in found]
            ordered = np.sort(np.concatenate(keys))
            again = ordered[1:][ordered[1:] == ordered[:-1]]
            repeated += len(again)
            if self._repeated_keys == "refuse" and len(again):
                del keys, ordered
                repeated -= self._refuse_repeated(found, np.unique(again))
        return repeated

    def _refuse_repeated(self, found: list[Found], hashes: NDArray[np.uint64]) -> int:
        """Raise ``DuplicateKey`` for the first of ``hashes`` whose keys really are equal. Returns how many were no more than hashes."""
        places: dict[int, list[tuple[Found, int]]] = {}
        for one in found:
            keys = self._keys(one)[1]
            for number in np.flatnonzero(np.isin(keys, hashes)).tolist():
                places.setdefault(int(keys[number]), []).append((one, number))
                if len(places) > 100:
                    break
        chance = 0
        for same in places.values():
            seen: dict[str, str] = {}
            for one, number in same:
                key, offset = self._key(one, number)
                here = f"{one.record.url or self._store.location / one.record.name} (sample {number}, offset {offset})"
                if key in seen:
                    raise DuplicateKey(
                        f"the key {key!r} is in {seen[key]} and again in {here}, and {counted(len(hashes), 'key')} in all more than once. "
                        "If that is meant, as when each tar counts from 0, allow it with --repeated-keys allow "
                        "(repeated_keys='allow'); the tars are not read again"
                    )
                seen[key] = here
            chance += len(same) - 1
        return chance

    def _keys(self, found: Found) -> tuple[Found, NDArray[np.uint64]]:
        data = content(self._store, journal_name(found.record.name))
        held = None if data is None else journal.from_bytes(data, None)
        if held is None:
            raise PublishError(
                f"indexing to {self._store.location}: {journal_name(found.record.name)} is gone or damaged, so another run or person works "
                "here too; nothing was published. Stop the other one and run the same command again"
            )
        return held

    def _key(self, found: Found, number: int) -> tuple[str, int]:
        """The key of a sample of a tar, read from its first header, and its offset."""
        tar = next(tar for tar in self._tars if tar.name == found.record.name)
        offsets = index_from_bytes(self._store.get(index_name(tar.name)), source=str(self._store.location / index_name(tar.name)))
        start, end = offsets[number], offsets[number + 1]
        step = 64 * 1024
        chunks = (tar.store.get(tar.key, at, min(step, end - at), if_match=tar.info.etag) for at in range(start, end, step))
        member, _ = next(iter(ArchiveReader(chunks, source=str(tar.location))))
        parts = split_name(member.name)
        return (parts[0] if parts else member.name), start

    def _confirm_tars(self, used: set[str]) -> None:
        """Raise ``SourceError`` when a tar is another one than the one that was read."""

        def same(tar: Tar) -> bool:
            try:
                return journal.identity(tar.store.head(tar.key)) == journal.identity(tar.info)
            except NotFound:
                return False

        tars = [tar for tar in self._tars if tar.name in used]
        for tar, unchanged in zip(tars, each(same, tars), strict=True):
            if not unchanged:
                raise SourceError(
                    f"indexing {tar.location}: it was replaced or removed after it was read; nothing was published. Run again once nobody "
                    "writes there; only this tar is read again"
                )

    # --------------------------------------------------------------------------------------------------------- destination

    def _refuse_foreign_wids(self) -> None:
        data = content(self._store, WIDS)
        if data is not None and b'"name":"stagekit-' not in data:
            raise PublishError(
                f"indexing to {self._store.location}: it holds a {WIDS} of somebody else, which would be replaced; nothing was written. "
                f"Choose another destination, such as {self._store.location / 'indexed'}: the tars stay where they are"
            )

    def _enter(self, takeover: bool) -> None:
        """Claim the destination for these tars."""
        where = self._store.location
        for _ in range(3):
            claim = read_claim(self._store)
            if claim is None:
                if take_claim(self._store, self._plan):
                    return
                continue  # somebody was faster: look at what they wrote
            if claim.plan == self._plan:
                if claim.state() == "dead":
                    self._drop_open_uploads()
                replace_claim(self._store, self._plan)
                return
            if claim.state() == "running":
                raise PublishError(
                    f"indexing to {where}: {claim} is writing other data there right now; wait, or choose another destination"
                )
            if not claim.plan.startswith(_PLAN):
                raise PublishError(
                    f"indexing to {where}: it holds an unfinished publication, left by {claim}. Repeat the `stagekit shard` that wrote it, "
                    "or choose another destination: the tars stay where they are"
                )
            if claim.state() == "dead" or takeover:
                # What it left is used where it fits, since each journal says of which bytes it speaks.
                self._drop_open_uploads()
                replace_claim(self._store, self._plan)
                confirm_claim(self._store, self._plan)
                return
            raise PublishError(
                f"indexing to {where}: {claim}, which cannot be asked from here, was indexing other tars (or the tars have changed since). "
                "When it has ended, continue with --takeover (takeover=True)"
            )
        raise PublishError(f"indexing to {where}: other runs keep claiming this destination; choose another one")

    def _drop_open_uploads(self) -> None:
        """Only of what an index writes: the tars beside it may be on their way here, by somebody else."""
        sides = (index_name, samples_name, blocks_name, journal_name)
        drop_open_uploads(self._store, "", among={MANIFEST, WIDS, *(name(tar.name) for tar in self._tars for name in sides)})

    def _compare(self, manifest: Manifest) -> Indexed:
        """The destination is complete. If it holds these tars, mend what got lost since; else refuse, having changed nothing."""
        tars = {tar.name: tar for tar in self._tars}
        for record in manifest.shards:
            tar = tars.get(record.name)
            if tar is None:
                raise self._holds_another(manifest, f"{record.url or record.name} is part of it and was not named")
            if (tar.url, tar.info.size) != (record.url, record.bytes):
                raise self._holds_another(manifest, f"{tar.location} has changed since")
        new = tars.keys() - {record.name for record in manifest.shards}
        if new and self._on_bad == "raise":
            raise self._holds_another(manifest, f"{tars[min(new)].location} is no part of it")
        self._bad += [Bad(str(tars[name].location), "an earlier run left it out") for name in sorted(new)]
        self._tars = [tars[record.name] for record in manifest.shards]
        records = {record.name: record for record in manifest.shards}

        def mend(tar: Tar) -> Found | None:
            record = records[tar.name]
            if self._sides_are_whole(record):
                self._passed(tar.info.size, tars=1)
                return None
            scanned = self._scan(tar)
            if _found_in(tar, scanned).record != record:
                raise self._holds_another(manifest, f"{tar.location} has changed since")
            self._store_sides(record, scanned, ours=True)
            self._on_event(Message(f"the side files of {tar.location} were missing or damaged: made again", "warning"))
            self._passed(0, tars=1)
            return None

        for _ in self._each(mend):
            pass
        if content(self._store, WIDS) is None:
            put_object(self._store, WIDS, wids_json(manifest))
        claim = read_claim(self._store)
        if claim is not None and claim.plan == self._plan:
            release_claim(self._store)
        self._clear_journals()
        return self._indexed(manifest, [], 0)

    def _holds_another(self, manifest: Manifest, why: str) -> PublishError:
        return PublishError(
            f"indexing to {self._store.location}: it holds another data set ({counted(manifest.samples, 'sample')} in "
            f"{counted(len(manifest.shards), 'shard')}, digest {manifest.digest[:12]}…): {why}. Nothing of it was changed. "
            f"Choose another destination, or index anew after: {removal(self._store, MANIFEST)}"
        )

    def _clear_journals(self) -> None:
        for info in list(self._store.list(journal.FOLDER)):
            self._store.delete(info.key)

    # ------------------------------------------------------------------------------------------------------------- telling

    def _tell(self, bad: Bad) -> None:
        self._on_event(Message(f"left out {bad.url}: {bad.reason}", "warning"))

    def _passed(self, size: int, *, read: int = 0, tars: int = 0) -> None:
        with self._lock:
            self._done += size
            self._read_bytes += read
            self._finished += tars
            finished = self._finished == len(self._tars)
            now_s = time.monotonic()
            if not finished and now_s - self._reported_s < _REPORT_EVERY_S:
                return
            self._reported_s = now_s
            done, note = self._done, f"{format_count(self._finished)} of {format_count(len(self._tars))} tars"
        self._on_event(Progress("index", done, self._total, "bytes", note, finished))

    def _indexed(self, manifest: Manifest, found: list[Found], repeated: int) -> Indexed:
        skipped: Counter[str] = Counter()
        examples: dict[str, str] = {}
        for one in found:
            skipped.update(one.skipped)
            examples = one.examples | examples
        return Indexed(
            location=self._store.location,
            manifest=manifest,
            unchanged=not found and not self._read,
            read=self._read,
            kept=len(manifest.shards) - self._read,
            read_bytes=self._read_bytes,
            skipped=dict(sorted(skipped.items())),
            unnamed=sum(one.unnamed for one in found),
            examples=examples,
            repeated=repeated,
            bad=tuple(sorted(self._bad, key=lambda bad: bad.url)),
            seconds=time.monotonic() - self._started_s,
            config=self._config,
        )


def _part(keys: NDArray[np.uint64], part: int, parts: int) -> NDArray[np.uint64]:
    chosen: NDArray[np.uint64] = keys[keys % np.uint64(parts) == part]
    return chosen


def _found_in(tar: Tar, scanned: Scan) -> Found:
    built = scanned.built
    record = replace(ShardRecord.of(tar.name, built), url=tar.url)
    return Found(record, built.fields, built.table.largest, scanned.skipped, scanned.unnamed, scanned.examples)


def _manifest(found: list[Found]) -> Manifest:
    return Manifest(tuple(one.record for one in found), summed(one.fields for one in found), max(one.largest_block for one in found))


def _digest(tars: list[Tar]) -> str:
    """The identity of a plan: which tars, in which order, and what they were when they were looked up."""
    whole = hashlib.sha256()
    for tar in tars:
        whole.update(repr((tar.name, tar.url, sorted(journal.identity(tar.info).items()))).encode(errors="surrogatepass"))
    return whole.hexdigest()
