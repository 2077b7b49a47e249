"""From one store to another without a disk in between: ranged reads on one side, a verified upload on the other."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..config import StoreConfig, home_directory
from ..contents import absent
from ..errors import BadDigest, CheckpointError, LocationError, NotFound, StagekitError, UsageError
from ..location import Location
from ..parallel import each
from ..progress import Subscriber, ignore
from ..runs.layout import parse_reference
from ..store import Where, open_store
from ..store.base import ObjectInfo, Store
from ..transfer.bulk.base import Item
from ..transfer.bulk.builtin import Trust, pieces_of
from ..transfer.checksum import Checksum, Expected
from ..transfer.names import check_names
from ..transfer.put import Stored, object_writer, part_size_for
from ..units import counted, format_size
from .outgoing import aside, make_plan, remove
from .pull import Bar, paced, plain_items, rate_of, verified

_OBJECTS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Copied:
    """What ``copy`` has put where. ``sent_bytes`` passed through this machine; the rest was there already, compared.

    ``unproven`` counts objects of whose bytes the source tells no checksum: they are in the target as they came.
    """

    source: str
    url: str
    objects: int
    bytes: int
    sent_bytes: int
    replaced: int = 0
    removed: int = 0
    unproven: int = 0

    @property
    def line(self) -> str:
        """One sentence for people."""
        return (
            f"{self.source} is in {self.url}: {counted(self.objects, 'object')}, {format_size(self.bytes)}, "
            f"{verified(self.objects, self.unproven)}{aside(self.bytes, self.sent_bytes, self.replaced, self.removed)}"
        )

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        return {name: getattr(self, name) for name in self.__slots__}


def copy(
    source: Where,
    target: Where,
    *,
    delete: bool = False,
    limit_rate: str | float | None = None,
    store: StoreConfig | None = None,
    threads: int = 8,
    on_event: Subscriber = ignore,
) -> Copied:
    """Copy every object below ``source`` to the same name below ``target``, through this machine's memory and never its disk.

    Either may have a profile of its own (``s3://PROFILE@bucket/prefix``), so two providers fit into one call, and ``source`` may be a
    model of the Hugging Face Hub (``hf://org/name``). One object is copied to the key ``target``, or into it when it ends in a slash.

    An object becomes visible once all of its bytes have passed and equal the source's checksum where it tells one, and is then asked for:
    the target's size and checksum are those of what was sent, or it is read back. Nothing that is there is changed or removed; see
    ``push``, whose rules hold, ``delete`` included. Stopped at any moment, the same call copies the objects that are missing.

    Raises ``BadDigest`` for bytes that are not what the source says, ``UsageError`` for an object that is there and differs, and the
    stores' errors.

    Example: ``stagekit.copy("hf://org/model", "s3://bucket/models/model")``.
    """
    bytes_per_s = rate_of(limit_rate)
    one, other = paced(open_store(source, store, on_event=on_event), bytes_per_s), open_store(target, store, on_event=on_event)
    if one.location.contains(other.location) or other.location.contains(one.location):
        raise UsageError(f"copying {one.location} to {other.location}: one lies in the other; give a place elsewhere")
    name, url = str(one.location), str(other.location)
    items = list(plain_items(one))
    there = {info.key: info for info in other.list()} if items else {}
    if not items:
        if delete:
            raise UsageError(f"copying {name}: nothing lies below it, and --delete is for what does; leave it out")
        one, other, items = _single(one, other, target, store, bytes_per_s, on_event)
        with suppress(NotFound):
            there[items[0].path] = other.head(items[0].path)
    check_names((item.path for item in items), name)
    work = _Work(one, other, _Notes(name, url), threads)
    plan = make_plan(
        there, items, work.same, doing=f"copying {name} to {url}", where=url, delete=delete, threads=threads, on_event=on_event
    )
    due = sum(item.size for item in plan.due)
    bar = Bar(f"copy {name}", sum(item.size for item in items), on_event)
    bar.add(bar.total - due)
    for phase in plan.phases:
        for _ in each(lambda item: work.bring(item, bar), phase, threads=max(1, min(_OBJECTS_AT_ONCE, threads))):
            pass
    remove(other, plan.removed, threads=threads)
    bar.finish()
    return Copied(name, url, len(items), bar.total, due, len(plan.replaced), len(plan.removed), work.unproven)


def _single(
    one: Store, other: Store, target: Where, config: StoreConfig | None, bytes_per_s: float | None, on_event: Subscriber
) -> tuple[Store, Store, list[Item]]:
    """The one object that the source's location names, and the stores in which it and its copy have a name."""
    location = one.location
    if not location.path:
        raise absent(location, "copying")
    folder = paced(open_store(location.parent, config, on_event=on_event), bytes_per_s)
    try:
        info = folder.head(location.name)
    except (NotFound, UsageError):
        raise _nothing(location) from None
    into, key = other, location.name
    if not (isinstance(target, str) and target.endswith("/")) and other.location.path:
        if not isinstance(target, str | os.PathLike | Location):
            raise LocationError(f"copying {location}: give the target as a URL")
        into, key = open_store(other.location.parent, config, on_event=on_event), other.location.name
    return folder, into, [Item(location.name, key, info.size, info.etag, info.sha256)]


def _nothing(location: Location) -> StagekitError:
    run, _ = parse_reference(str(location))
    if run == str(location):
        return absent(location, "copying")
    return CheckpointError(
        f"copying {location}: this copies places whole, and no single checkpoint of a run; copy {run}, or bring the checkpoint to a disk "
        f"with: stagekit pull {location} DIRECTORY"
    )


class _Work:
    """The two stores, and what is known of what went from one to the other."""

    def __init__(self, source: Store, target: Store, notes: _Notes, threads: int) -> None:
        self._source, self._target, self._notes = source, target, notes
        self._inner = max(1, threads // min(_OBJECTS_AT_ONCE, threads))
        self._trust, self._target_trust = Trust(), Trust()
        self._lock = threading.Lock()
        self.unproven = 0

    def same(self, item: Item, info: ObjectInfo) -> bool:
        """Whether the target's object has the source's bytes. What has to be read for that is the target's, and the source's only where
        it tells no checksum."""
        if item.etag is not None and item.etag == info.etag and item.expected.has_md5:
            return True
        if self._notes.holds(item, info):
            return True
        there = Item(item.path, item.path, info.size, info.etag)
        found = self._read(self._target, there, item.expected)
        if found.finding == "proven":
            return True
        if item.sha256 is not None:
            return False
        plain = Expected(item.size)
        return found.digest == self._read(self._source, item, plain).digest

    def _read(self, store: Store, item: Item, expected: Expected) -> Checksum:
        checksum = Checksum(expected)
        for data in pieces_of(store, item, self._inner):
            checksum.update(data)
        return checksum

    def bring(self, item: Item, bar: Bar) -> None:
        """One object, whole and equal to what the source says, or not at all. Passes twice when the first pass gave other bytes."""
        try:
            checksum, stored = self._pass(item, None, bar)
        except _Differs as differs:
            checksum, stored = self._pass(item, differs.checksum, bar)
        if checksum.finding == "differs":
            self._trust.etags = False
        with self._lock:
            self.unproven += checksum.finding != "proven"
        self._notes.add(item, stored)

    def _pass(self, item: Item, before: Checksum | None, bar: Bar) -> tuple[Checksum, Stored]:
        checksum = Checksum(item.expected, trust_etag=self._trust.etags)

        def check() -> None:
            if checksum.finding != "differs":
                return
            if before is None:
                raise _Differs(checksum)
            if item.sha256 is not None or checksum.digest != before.digest:
                expected = f"sha-256 {item.sha256}" if item.sha256 else f"etag {item.etag}"
                raise BadDigest(
                    f"copying {self._source.location / item.key}: expected {expected}, found {before.digest} and then {checksum.digest}; "
                    "the object is damaged or was replaced, and nothing of it is in the target",
                    transient=False,
                )

        passed = 0
        try:
            with object_writer(self._target, item.path, threads=2, part_size=part_size_for(item.size), check=check) as writer:
                for data in pieces_of(self._source, item, self._inner):
                    checksum.update(data)
                    writer.write(data)
                    passed += len(data)
                    bar.add(len(data))
        except BaseException:
            bar.add(-passed)
            raise
        return checksum, writer.stored


class _Differs(Exception):
    """The bytes are not what the source's checksum says, for the first time."""

    def __init__(self, checksum: Checksum) -> None:
        super().__init__()
        self.checksum = checksum


class _Notes:
    """Which object was copied to which, kept on this machine: so that a repeated copy need not read what cannot be compared by checksums.

    A note is believed as long as both etags are the ones it names. Without notes everything is compared by reading.
    """

    def __init__(self, source: str, target: str) -> None:
        name = hashlib.sha256(f"{source}\n{target}".encode()).hexdigest()[:32]
        self._path = home_directory() / "copies" / name
        self._lock = threading.Lock()
        self._known: set[tuple[str, int, str, str]] = set()
        with suppress(OSError):
            for line in self._path.read_bytes().split(b"\n"):
                with suppress(ValueError, TypeError):
                    key, size, ours, theirs = json.loads(line)
                    self._known.add((key, size, ours, theirs))

    def holds(self, item: Item, info: ObjectInfo) -> bool:
        return item.etag is not None and info.etag is not None and (item.path, item.size, item.etag, info.etag) in self._known

    def add(self, item: Item, stored: Stored) -> None:
        if item.etag is None or stored.etag is None:
            return
        line = json.dumps([item.path, item.size, item.etag, stored.etag]).encode() + b"\n"
        with self._lock, suppress(OSError):  # a disk that takes no notes costs time, later
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                file.write(line)
