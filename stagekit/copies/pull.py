"""Copies to a local disk: a run's checkpoint, a data set, or whatever lies below a prefix, every byte that can be compared compared."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..config import StoreConfig
from ..contents import absent, checkpoint_at, kind_of, refuse_selector
from ..dataset import with_shards
from ..errors import BadDigest, CheckpointError, Conflict, Denied, InvalidReply, ManifestError, NotFound, StoreError, UsageError
from ..location import Location
from ..mounts import refuse_mount
from ..pace import Pace
from ..parallel import each
from ..progress import Message, Progress, Subscriber, ignore
from ..runs.layout import Checkpoint, Selector, address_of, parse_reference
from ..runs.restore import damage_named, first_taken, stamp
from ..saves.pulled import note_pulled
from ..shards.digests import digests_bytes, digests_from_bytes
from ..shards.index import BlockTable
from ..shards.manifest import MANIFEST, WIDS, Manifest, ShardRecord, blocks_name, index_name, samples_name, wids_json
from ..store import Where, open_store
from ..store.base import ObjectInfo, Store
from ..store.extras import list_strictly
from ..store.paced import PacedStore
from ..transfer.bulk.base import Item, place_of
from ..transfer.bulk.builtin import UNBOUNDED, Trust, same_bytes
from ..transfer.bulk.choice import EngineName, choose
from ..transfer.bulk.fetching import fetch_items
from ..transfer.checksum import Checksum
from ..transfer.fetch import fetch_object
from ..units import counted, format_count, format_size, parse_rate, parse_size
from .hub_cache import HubLink
from .landing import Landing, is_filled, local_files, remove_file
from .outgoing import announce
from .room import Room, room_within


@dataclass(frozen=True, slots=True)
class Pulled:
    """What ``pull`` has put where. ``fetched_bytes`` came over the network; the rest was there already, verified.

    ``unproven`` counts files whose size alone could be compared, since the store tells no checksum of theirs.
    """

    url: str
    kind: Literal["dataset", "checkpoint", "objects"]
    directory: str
    files: int
    bytes: int
    fetched_bytes: int
    step: int | None = None
    engine: str = "builtin"
    removed: int = 0
    unproven: int = 0
    linked: str | None = None

    @property
    def line(self) -> str:
        """One sentence for people."""
        if not self.files:
            return f"{self.url}: nothing was pulled"
        there = "" if self.fetched_bytes == self.bytes else f", {format_size(self.bytes - self.fetched_bytes)} of it was there already"
        removed = f", {counted(self.removed, 'other')} removed" if self.removed else ""
        linked = f"; from_pretrained finds it as {self.linked}" if self.linked else ""
        return (
            f"{self.url} is in {self.directory}: {counted(self.files, 'file')}, {format_size(self.bytes)}, "
            f"{verified(self.files, self.unproven)}{there}{removed}{linked}"
        )

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        return {name: getattr(self, name) for name in self.__slots__}


def verified(files: int, unproven: int) -> str:
    """How well ``files`` were compared, for a person."""
    if not unproven:
        return "every byte verified"
    which = "" if unproven == files == 1 else "all of them " if unproven == files else f"{format_count(unproven)} of them "
    return f"{which}by size alone, as the store tells no checksum"


@dataclass(slots=True)
class _Job:
    """What is to be pulled, and how."""

    name: str
    store: Store
    target: Path
    kind: Literal["dataset", "checkpoint", "objects"]
    options: _Options
    items: list[Item]
    known: dict[str, bytes] = field(default_factory=dict)
    """Files whose content is here already."""
    sample_digests: dict[str, int] = field(default_factory=dict)
    """Of how many samples a file among ``items`` has the digests. It carries its own checksum, and no reader needs it."""
    step: int | None = None

    @property
    def total(self) -> int:
        return sum(item.size for item in self.items) + sum(map(len, self.known.values()))

    def unproven(self, items: Iterable[Item]) -> int:
        """Of how many of ``items`` nothing but the size can be compared."""
        return sum(item.sha256 is None and not item.expected.has_md5 and item.path not in self.sample_digests for item in items)


@dataclass(frozen=True, slots=True)
class _Options:
    engine: EngineName
    threads: int
    delete: bool
    bytes_per_s: float | None
    disk_bytes: int | None
    on_event: Subscriber


def pull(
    where: Where,
    directory: str | os.PathLike[str],
    *,
    engine: EngineName = "auto",
    delete: bool = False,
    limit_rate: str | float | None = None,
    link_hf: str | None = None,
    disk: str | int | None = None,
    store: StoreConfig | None = None,
    threads: int = 8,
    allow_mount: bool = False,
    strict: bool = False,
    allow_fresh: bool = False,
    on_event: Subscriber = ignore,
) -> Pulled:
    """Copy a checkpoint (``RUN``, ``RUN@latest``, ``RUN@best``, ``RUN@1200``), a data set, or all objects below a prefix to a directory.

    A new or empty ``directory`` appears complete and verified, or not at all. Nothing that is there is changed or removed: the same files
    are left as they are, files of another name are left beside plain objects and refused beside a checkpoint or data set, and a file that
    differs is refused. ``delete`` makes the directory what the source is, and tells first what that removes or replaces.

    A pull that was killed goes on when it is repeated, in ``.NAME.pull`` beside the target, and fetches no verified file again. A
    checkpoint that turns out damaged is told as a warning and the next older one is taken, unless a step was named or ``strict`` is set.

    ``engine`` is what copies: ``builtin``, ``s5cmd``, ``rclone``, or ``auto``, which chooses by number and size. Whichever it is, every
    file is compared afterwards with the digest in the manifest, or with the store's checksum where there is one.
    ``limit_rate`` (``"20MB/s"``) bounds the bytes a second. ``link_hf="org/name"`` makes the copy known to Hugging Face's cache, so that
    ``from_pretrained("org/name")`` finds it offline.

    ``disk`` (``"80GiB"``) is one budget for what pulls in progress, cached blocks and pinned checkpoints take of this machine. Blocks give
    way, and while the pull runs no more are added than fit beside it; that is told. Checkpoints never do: what does not fit beside them
    raises ``OutOfSpace`` before the first byte. For one that is saved while the pull runs, blocks give way and then the pull waits until it
    is in the bucket; where even what has arrived leaves it no room, that is removed and ``OutOfSpace`` raised. The built-in engine copies.

    A run that has no checkpoint yet, or cannot be seen, or has none that is whole, raises, so that a script stops before it trains from
    scratch. ``allow_fresh`` accepts that with a warning: nothing is copied, and ``step`` of the result is ``None``.

    Raises ``OutOfSpace`` before the first byte when the disk is too small, ``MountRefused`` for a mounted bucket, ``BadDigest`` for an
    object that is not what its manifest says, ``CheckpointError`` for a step that is not there, ``UsageError`` for an object whose name
    cannot be that of a file here, or when another pull to the same directory is running.

    Example: ``stagekit.pull("s3://bucket/run@1200", "checkpoint")``.
    """
    target = Path(os.path.abspath(os.path.expanduser(os.fspath(directory))))
    judged = refuse_mount(target, "pulling to", allow_mount=allow_mount)
    if judged.warning:
        on_event(Message(judged.warning, "warning"))
    link = HubLink.parse(link_hf) if link_hf is not None else None
    bytes_per_s = rate_of(limit_rate)
    disk_bytes = parse_size(disk, name="disk") if disk is not None else None
    if disk_bytes is not None:
        if engine not in ("auto", "builtin"):
            raise UsageError(f"--disk with --engine {engine}: a program cannot be held up while it writes; leave one of the two out")
        engine = "builtin"
    options = _Options(engine, threads, delete, bytes_per_s, disk_bytes, on_event)
    url: Where = where
    selector: Selector = "latest"
    if isinstance(where, str):
        url, selector = parse_reference(where)
    opened = paced(open_store(url, store, on_event=on_event), bytes_per_s)
    try:
        kind = kind_of(opened)
        if kind == "run":
            pulled = _pull_checkpoint(opened, selector, target, strict, options)
            return _linked(pulled, link, on_event)
        if kind == "dataset" and isinstance(where, str):
            refuse_selector(str(url), where, "pulling")
        items = [] if kind == "dataset" else list(plain_items(opened))
        if kind is None and not items:
            return _linked(_pull_single(opened, url, store, target, options), link, on_event)
    except (StoreError, CheckpointError, ManifestError) as error:
        if not allow_fresh:
            raise
        on_event(Message(f"nothing is pulled, and training starts from scratch, as --allow-fresh says, although {error}", "warning"))
        return Pulled(str(opened.location), "checkpoint", str(target), 0, 0, 0)
    if kind == "dataset":
        return _linked(_pull_dataset(opened, target, store, options), link, on_event)
    pulled = _run(_Job(str(opened.location), opened, target, "objects", options, items))
    if not opened.location.is_directory:
        note_pulled(target, pulled.url, {item.path: item.size for item in items})
    return _linked(pulled, link, on_event)


def rate_of(limit_rate: str | float | None) -> float | None:
    """Bytes a second from what a person wrote. Raises ``UsageError`` for a rate of nothing."""
    if limit_rate is None:
        return None
    bytes_per_s = parse_rate(limit_rate, name="limit_rate")
    if bytes_per_s <= 0:
        raise UsageError(f"limit_rate: {limit_rate!r} lets nothing through; give a rate such as 20MB/s")
    return bytes_per_s


def paced(store: Store, bytes_per_s: float | None) -> Store:
    """``store`` itself, or no faster than ``bytes_per_s``."""
    return store if bytes_per_s is None else PacedStore(store, Pace(bytes_per_s))


def plain_items(store: Store) -> Iterator[Item]:
    """Every object below the store's location. Raises ``UsageError`` for one that no key can name."""
    for info in list_strictly(store):
        yield Item(info.key, info.key, info.size, info.etag, info.sha256)


def _pull_single(opened: Store, url: Where, config: StoreConfig | None, target: Path, options: _Options) -> Pulled:
    """The one object that ``url`` names, where nothing lies below it."""
    location = opened.location
    if not isinstance(url, str | os.PathLike | Location) or not location.path:
        raise absent(location, "pulling")
    folder = paced(open_store(location.parent, config, on_event=options.on_event), options.bytes_per_s)
    try:
        info = folder.head(location.name)
    except (NotFound, UsageError):
        raise absent(location, "pulling") from None
    item = Item(location.name, location.name, info.size, info.etag, info.sha256)
    return _run(_Job(str(location), folder, target, "objects", options, [item]))


def _pull_checkpoint(store: Store, selector: Selector, target: Path, strict: bool, options: _Options) -> Pulled:
    done: list[Pulled] = []

    def take(checkpoint: Checkpoint) -> None:
        items = [Item(one.key(checkpoint.name), one.path, one.bytes, sha256=one.sha256) for one in checkpoint.files]
        name = f"{store.location}@{address_of(checkpoint.name, selector)}"
        job = _Job(name, store, target, "checkpoint", options, items, step=checkpoint.step)
        with damage_named(store, checkpoint):
            done.append(_run(job))

    if is_filled(target) and not options.delete:
        # What is there is what a manifest says, or it is refused: another checkpoint would never do.
        take(checkpoint_at(store, selector, on_event=options.on_event))
    elif first_taken(store, selector, take, strict=strict, on_event=options.on_event) is None:
        raise CheckpointError(f"pulling {store.location}: the run has no checkpoint yet")
    return done[0]


def _pull_dataset(store: Store, target: Path, config: StoreConfig | None, options: _Options) -> Pulled:
    name = str(store.location)
    data = bytes(store.get(MANIFEST))
    manifest = Manifest.from_bytes(data, source=str(store.location / MANIFEST))
    if any(shard.url is not None for shard in manifest.shards):
        # The copy has its shards with it.
        store = with_shards(store, manifest, config, allow_mount=True, on_event=options.on_event)
        manifest = manifest.gathered()
        data = manifest.to_bytes()
    items: list[Item] = []
    known: dict[str, bytes] = {}
    sample_digests: dict[str, int] = {}
    for shard, table, index_size, digests in each(lambda shard: _side_files(store, shard), manifest.shards, threads=options.threads):
        blocks, index = blocks_name(shard.name), index_name(shard.name)
        known[blocks] = table
        parsed = BlockTable.from_bytes(table, source=str(store.location / blocks))
        items.append(Item(shard.name, shard.name, shard.bytes, sha256=shard.sha256, blocks=parsed))
        items.append(Item(index, index, index_size, sha256=shard.idx_sha256))
        if digests is not None:
            items.append(Item(digests.key, digests.key, digests.size, digests.etag))
            sample_digests[digests.key] = shard.samples
    known |= {WIDS: wids_json(manifest), MANIFEST: data}
    return _run(_Job(name, store, target, "dataset", options, items, known, sample_digests))


def _side_files(store: Store, shard: ShardRecord) -> tuple[ShardRecord, bytes, int, ObjectInfo | None]:
    """The shard's block table, compared with the manifest, the size of its index, and the digests of its samples where there are any."""
    table = fetch_object(store, blocks_name(shard.name), sha256=shard.blocks_sha256)
    digests: ObjectInfo | None = None
    with suppress(NotFound, Denied):  # which of the two it is, keys that may not list are not told; no reader needs it
        digests = store.head(samples_name(shard.name))
    if digests is not None and digests.size != digests_bytes(shard.samples):
        digests = None
    return shard, bytes(table), store.head(index_name(shard.name)).size, digests


def _linked(pulled: Pulled, link: HubLink | None, on_event: Subscriber) -> Pulled:
    if link is None or not pulled.files:
        return pulled
    link.lay_out(Path(pulled.directory), on_event=on_event)
    return replace(pulled, linked=link.name)


# ------------------------------------------------------------------------------------------------------------- the work


@dataclass(slots=True)
class _There:
    """What a filled target holds: files that are the same, files that differ, and files that the source does not have."""

    same: set[str]
    differing: set[str]
    strange: list[str]


def _run(job: _Job) -> Pulled:
    filled = is_filled(job.target)
    there = _compare(job) if filled else _There(set(), set(), [])
    _refuse(job, there, filled)
    wanted = [item for item in job.items if item.path not in there.same]
    writes = {path: data for path, data in job.known.items() if path not in there.same}
    if filled and not wanted and not writes and not there.strange:
        job.options.on_event(Message(f"{job.target} holds {job.name} already"))
        return _result(job, 0, job.unproven(job.items), 0)
    removed = sorted(there.strange) if job.options.delete else []
    if job.options.delete:
        announce(removed, sorted(there.differing), str(job.target), job.options.on_event)
    unproven = job.unproven(job.items)
    with Landing(job.target, job.name) as landing:
        missing = landing.missing(wanted, also=writes, threads=min(job.options.threads, 4))
        needed = sum(item.size for item in missing) + sum(map(len, writes.values()))
        with _room(job, landing, needed) as room:
            landing.require(needed, what=job.name)
            try:
                engine, arrived_unproven = _fetch(job, landing, missing, room)
                for path, data in writes.items():
                    with room.taking(len(data)) if room is not None else nullcontext():
                        landing.write(path, data)
            except (NotFound, BadDigest, Conflict, InvalidReply):
                if job.kind == "checkpoint":
                    landing.clear()
                raise
            except FileNotFoundError as error:
                if room is not None and room.overrun:
                    raise room.refusal() from error  # it was removed to make room
                raise
            unproven += arrived_unproven - job.unproven(missing)
        if not filled:
            if job.step is not None:
                stamp(landing.files, job.step)
            landing.reveal()
        else:
            for path in removed:
                remove_file(job.target, path)
            landing.merge([*(item.path for item in wanted), *writes])
            if job.step is not None:
                stamp(job.target, job.step)
    return _result(job, needed, unproven, len(removed), engine)


def _room(job: _Job, landing: Landing, needed: int) -> AbstractContextManager[Room | None]:
    """The pull's room in the budget of this machine; ``None`` where it has none to keep."""
    limit, on_event = job.options.disk_bytes, job.options.on_event
    if limit is None:
        return nullcontext()
    held = landing.held_bytes
    return room_within(limit, needed + held, held, landing.clear, name=job.name, target=job.target, on_event=on_event)


def _fetch(job: _Job, landing: Landing, missing: Sequence[Item], room: Room | None) -> tuple[str, int]:
    """Bring ``missing`` into ``landing``. Returns the engine's name, and of how many files nothing but the size could be compared."""
    options = job.options
    bar = Bar(f"pull {job.name}", job.total, options.on_event)
    bar.add(job.total - sum(item.size for item in missing))
    engine = choose(
        options.engine, place_of(job.store), missing, doing=f"pulling {job.name}", threads=options.threads, bytes_per_s=options.bytes_per_s
    )
    unproven = 0
    lock = threading.Lock()

    def accept(item: Item, path: Path, checksum: Checksum) -> None:
        nonlocal unproven
        samples = job.sample_digests.get(item.path)
        proven = checksum.finding == "proven" or (samples is not None and digests_from_bytes(path.read_bytes(), samples) is not None)
        landing.accept(item, path, checksum)
        with lock:
            unproven += not proven

    fetch_items(
        job.store,
        missing,
        landing.incoming,
        accept,
        engine=engine if missing else None,
        threads=options.threads,
        space=room if room is not None else UNBOUNDED,
        on_bytes=bar.add,
        on_event=options.on_event,
    )
    bar.finish()
    return engine.name if engine is not None else "builtin", unproven


def _result(job: _Job, fetched: int, unproven: int, removed: int, engine: str = "builtin") -> Pulled:
    files = len(job.items) + len(job.known)
    return Pulled(job.name, job.kind, str(job.target), files, job.total, fetched, job.step, engine, removed, unproven)


def _compare(job: _Job) -> _There:
    names = set(local_files(job.target))
    found = _There(set(), set(), [])
    trust = Trust()

    def same(item: Item) -> bool:
        path = job.target / item.path
        return not path.is_symlink() and path.stat().st_size == item.size and same_bytes(job.store, item, path, trust)

    there = [item for item in job.items if item.path in names]
    for item, held in zip(there, each(same, there, threads=min(job.options.threads, 4)), strict=True):
        (found.same if held else found.differing).add(item.path)
    for path, data in job.known.items():
        if path in names:
            held = not (job.target / path).is_symlink() and (job.target / path).read_bytes() == data
            (found.same if held else found.differing).add(path)
    found.strange = sorted(names - {item.path for item in job.items} - job.known.keys())
    return found


def _refuse(job: _Job, there: _There, filled: bool) -> None:
    """Nothing when the pull may go on. Raises ``UsageError`` naming what stands in its way."""
    if not filled or job.options.delete:
        return
    doing = f"pulling {job.name} to {job.target}"
    if there.strange and job.kind != "objects":
        raise UsageError(f"{doing}: it holds {there.strange[0]}, which does not belong to it; give a new or empty directory")
    strange = set(there.strange)
    paths = [*(item.path for item in job.items), *job.known]
    for path in paths:
        if path in there.differing:
            raise UsageError(
                f"{doing}: the directory is not empty and {path} differs; give a new or empty directory, remove this one, or have it "
                "replaced with --delete"
            )
        if path not in there.same and path not in job.sample_digests:
            if job.kind != "objects":
                raise UsageError(
                    f"{doing}: the directory is not empty and {path} is missing; give a new or empty directory, or remove this one"
                )
            parents = [path[:end] for end in range(len(path)) if path[end] == "/"]
            if blocked := strange.intersection(parents):
                raise UsageError(f"{doing}: {min(blocked)} is a file or link there, and {path} would lie in it; remove it, or use --delete")


class Bar:
    """Bytes of several threads as one task."""

    def __init__(self, task: str, total: int, on_event: Subscriber) -> None:
        self.task, self.total, self.done = task, total, 0
        self._on_event, self._lock = on_event, threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self.done += size
            self._on_event(Progress(self.task, self.done, self.total))

    def finish(self) -> None:
        self._on_event(Progress(self.task, self.done, self.total, finished=True))
